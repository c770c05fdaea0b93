"""What a server answers, as text: by table."""

from typing import Any

import pytest
from mcp_types import CallToolResult

from loopd.tools.mcp.results import outcome
from loopd.tools.port import Outcome

TEXT = {"type": "text", "text": "hello"}
IMAGE = {"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"}
SOUND = {"type": "audio", "data": "aGVsbG8h", "mimeType": "audio/wav"}
LINK = {"type": "resource_link", "uri": "file:///a", "name": "a", "mimeType": "text/plain", "size": 5}
BARE_LINK = {"type": "resource_link", "uri": "file:///a", "name": "a"}
TEXT_RESOURCE = {"type": "resource", "resource": {"uri": "file:///a", "mimeType": "text/plain", "text": "within"}}
BLOB_RESOURCE = {"type": "resource", "resource": {"uri": "file:///b", "blob": "aGk="}}


def told(*content: dict[str, Any], **keys: Any) -> Outcome:
    return outcome(CallToolResult.model_validate({"content": content, **keys}), 4096)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([TEXT], "hello"),
        ([TEXT, TEXT], "hello\nhello"),
        ([IMAGE], "[image: image/png, 5 bytes]"),
        ([SOUND], "[audio: audio/wav, 6 bytes]"),
        ([LINK], "[resource: file:///a, text/plain, 5 bytes]"),
        ([BARE_LINK], "[resource: file:///a]"),
        ([TEXT_RESOURCE], "[resource: file:///a, text/plain]\nwithin"),
        ([BLOB_RESOURCE], "[resource: file:///b, 2 bytes]"),
        ([TEXT, IMAGE], "hello\n[image: image/png, 5 bytes]"),
        ([], ""),
    ],
)
def test_a_result_is_its_text_and_names_what_is_none(content: list[dict[str, Any]], text: str) -> None:
    assert told(*content) == Outcome(ok=True, content=text)


def test_structured_content_is_told_where_there_is_no_text() -> None:
    assert told(structuredContent={"b": 1, "a": [2]}).content == '{"b":1,"a":[2]}'
    assert told(IMAGE, structuredContent={"a": 1}).content == '[image: image/png, 5 bytes]\n{"a":1}'
    assert told(TEXT, structuredContent={"a": 1}).content == "hello"
    assert told({"type": "text", "text": ""}, structuredContent={"a": 1}).content == '{"a":1}'


def test_an_error_is_not_ok_and_never_without_a_word() -> None:
    assert told(TEXT, isError=True) == Outcome(ok=False, content="hello")
    assert told(isError=True) == Outcome(ok=False, content="The tool failed and gave no reason.")


def test_a_long_result_keeps_head_and_tail_and_says_how_much_is_left_out() -> None:
    found = told({"type": "text", "text": "a" * 10_000}, {"type": "text", "text": "b" * 10_000})
    assert len(found.content) <= 4096
    assert found.content.startswith("aaaa")
    assert found.content.endswith("bbbb")
    kept = found.content.count("a") + found.content.count("b") - "bytes left out".count("b")
    assert found.cut == 20_001 - kept
