import json

import pytest

from loopd.config import ToolsTable
from loopd.tools.catalogue import Catalogue
from loopd.tools.find import BYTES_PER_TOKEN, answer
from loopd.tools.port import Tool
from tests.tools.fake import tool

MANY = [("port", tuple(tool(f"read_{n}", f"Read thing {n}. Then more.", path={"type": "string"}) for n in range(20)))]


def answered(query: str, listed: object = MANY, *, table: ToolsTable | None = None, down: tuple[str, ...] = ()) -> str:
    catalogue = Catalogue(listed)  # type: ignore[arg-type] # each test lists what it needs
    try:
        outcome = answer(query, catalogue, table or ToolsTable(), down)
    finally:
        catalogue.close()
    return outcome.content


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


def test_tools_of_a_port_that_is_down_are_marked() -> None:
    assert "- port.read_0 (unavailable now): Read thing 0." in answered("read thing", down=("port",))


def test_without_any_tools_the_answer_says_so() -> None:
    assert answered("anything", []) == "There are no tools."


def test_a_long_description_ends_at_a_word() -> None:
    line = answered("long", [("p", (Tool("t", "long words " * 100, {}),))]).splitlines()[1]
    assert line.endswith(("long...", "words..."))
    assert len(line) < 200
