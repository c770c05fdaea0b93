import asyncio
import json
from typing import Any

import pytest

from loopd.config import ToolsTable
from loopd.tools.catalogue import Catalogue
from loopd.tools.find import BYTES_PER_TOKEN, answer
from loopd.tools.port import Outcome, Tool
from loopd.tools.registry import Registry
from tests.tools.fake import FakePort, planned, tool

MANY = [("port", tuple(tool(f"read_{n}", f"Read thing {n}. Then more.", path={"type": "string"}) for n in range(20)))]


def answered(query: str, listed: object = MANY, *, table: ToolsTable | None = None, down: tuple[str, ...] = ()) -> str:
    catalogue = Catalogue(listed)  # type: ignore[arg-type] # each test lists what it needs
    return answer(query, catalogue, table or ToolsTable(), down).content


def test_few_hits_each_with_an_example_the_first_with_their_arguments() -> None:
    lines = answered("read thing", table=ToolsTable(find_hits=4, find_schemas=2)).splitlines()
    assert [line.split(":")[0].rstrip("_0123456789").strip() for line in lines[1:]] == [
        *("- port.read", "example", "arguments"),
        *("- port.read", "example", "arguments"),
        *("- port.read", "example"),
        *("- port.read", "example"),
    ]
    assert lines[1] == "- port.read_0: Read thing 0."
    example = json.loads(lines[2].removeprefix("  example: "))
    assert example == {"name": "port.read_0", "arguments": {"path": "<path>"}}
    assert json.loads(lines[3].removeprefix("  arguments: ")) == MANY[0][1][0].schema


@pytest.mark.parametrize("tokens", [100, 200, 1200])
def test_the_answer_stays_within_its_budget(tokens: int) -> None:
    large = tuple(
        tool(f"read_{n}", "Read. " + "word " * 200, **{f"p{k}": {"type": "string"} for k in range(100)})
        for n in range(9)
    )
    text = answered("read", [("port", large)], table=ToolsTable(find_tokens=tokens))
    assert "port.read_0" in text
    assert len(text.encode()) <= max(tokens * BYTES_PER_TOKEN, 400)


def test_a_tool_asked_for_by_its_name_is_described_in_full() -> None:
    lines = answered("port.read_17", table=ToolsTable(find_schemas=1)).splitlines()
    assert lines[1].startswith("- port.read_17:")
    assert lines[3].startswith("  arguments: ")


def test_where_nothing_matches_the_answer_asks_for_other_words_and_shows_some_tools() -> None:
    text = answered("xyzzy")
    assert text.startswith("No tool matches 'xyzzy'. Ask again with verb, object and service. Some of 20 tools:")
    assert "- port.read_0:" in text


def test_the_last_line_names_some_ports_that_are_down_and_is_within_the_budget() -> None:
    absent, table = [f"server{n}" for n in range(12)], ToolsTable(find_tokens=400)
    for listed, query in ((MANY, "read thing"), (MANY, "no such need"), ([], "read thing")):
        content = answer(query, Catalogue(listed), table, (), absent).content
        assert content.splitlines()[-1].startswith("Down now, their tools not known: server0, server1, ")
        assert content.endswith(", server9 and 2 more.")
        assert len(content) <= 400 * BYTES_PER_TOKEN


def test_tools_of_a_port_that_is_down_are_marked() -> None:
    assert "- port.read_0 (unavailable now): Read thing 0." in answered("read thing", down=("port",))


def test_without_any_tools_the_answer_says_so() -> None:
    assert answered("anything", []) == "There are no tools."


def test_a_long_description_ends_at_a_word() -> None:
    line = answered("long", [("p", (Tool("t", "long words " * 100, {}),))]).splitlines()[1]
    assert line.endswith(("long...", "words..."))
    assert len(line) < 200


def test_of_a_schema_of_45_kb_an_outline_is_shown() -> None:
    options: dict[str, Any] = {
        f"option_{n}": {"type": "object", "properties": {"deep": {"enum": ["x" * 2000]}}} for n in range(25)
    }
    large = Tool("large", "Do it.", {"type": "object", "properties": options, "required": ["option_0"]})
    assert len(json.dumps(large.schema)) > 45_000
    line = answered("do it", [("p", (large,))]).splitlines()[3]
    shown = json.loads(line.removeprefix("  arguments: "))
    assert shown == {"properties": {name: {"type": "object"} for name in options}, "required": ["option_0"]}


def test_up_to_eight_hits_are_shown_by_default() -> None:
    assert answered("read thing").count("\n- ") == 8


def test_a_foreign_list_of_lone_surrogates_is_answered_in_clean_text() -> None:
    port = FakePort("port", tool("na\ud800me", "Do \0 it \udfff."), tool("na\ud800me", "Do it twice."))
    registry = Registry(planned(port), ToolsTable())

    async def found() -> Outcome:
        call = registry.prepare("find_tool", json.dumps({"query": "do \ud800 it"}))
        return await registry.run(call, timeout_s=60, max_bytes=4096)

    content = asyncio.run(found()).content
    registry.close()
    assert content.encode("utf-8")
    assert "\0" not in content
    assert content.startswith("Best of 1 tools")
