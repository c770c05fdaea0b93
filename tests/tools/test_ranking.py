import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from loopd.tools.port import Tool
from loopd.tools.ranking import Index, fused, plain, words
from tests.tools.fake import tool

HOUSE = [
    ("files", tool("delete_directory", "Delete a directory and all that is in it.", path={})),
    ("files", tool("create_directory", "Create a directory.", path={})),
    ("files", tool("read_file", "Read the contents of a file.", path={})),
    ("files", tool("move_file", "Move or rename a file.", source={}, destination={})),
    ("mail", tool("send_message", "Send an email to somebody.", to={}, subject={}, body={})),
    ("mail", tool("search_inbox", "Search the inbox.", query={})),
    ("calendar", tool("create_event", "Add an event to the calendar.", title={}, start={})),
    ("calendar", tool("list_events", "List events between two days.", start={}, end={})),
    ("home", tool("turn_on_light", "Turn on a light in a room.", room={})),
    ("home", tool("turn_off_light", "Turn off a light in a room.", room={})),
    ("home", tool("get_temperature", "Read a thermometer.", room={})),
    ("home", tool("restart_hub", "Restart the hub.")),
    ("tracker", tool("createIssue", "File a new issue.", title={}, project={})),
    ("tracker", tool("closeIssue", "Close an issue.", number={})),
    ("browser", tool("screenshot", "Take a screenshot of the page.", full_page={})),
    ("weather", tool("forecast", "Weather forecast for a place.", place={})),
]


@pytest.fixture(scope="module")
def index() -> Index:
    return Index(HOUSE)


@pytest.mark.parametrize(
    ("request_text", "best"),
    [
        ("get rid of the old folder", "files.delete_directory"),
        ("make a folder called Taxes", "files.create_directory"),
        ("what does the letter.txt document say, read it to me", "files.read_file"),
        ("deliver a letter to Anna by email", "mail.send_message"),
        ("look for the mail from the bank in my inbox", "mail.search_inbox"),
        ("put an appointment with the dentist in my calendar", "calendar.create_event"),
        ("switch off the lamp in the kitchen", "home.turn_off_light"),
        ("switch on the lamp in the kitchen", "home.turn_on_light"),
        ("how warm is the bedroom, read the thermometer", "home.get_temperature"),
        ("reboot the hub", "home.restart_hub"),
        ("file a bug in the tracker", "tracker.createIssue"),
        ("resolve the ticket", "tracker.closeIssue"),
        ("take a picture of the page", "browser.screenshot"),
        ("will it rain tomorrow", "weather.forecast"),
    ],
)
def test_a_persons_words_find_the_tool(index: Index, request_text: str, best: str) -> None:
    assert index.rank(request_text, 3)[0] == best


@pytest.mark.parametrize(
    ("query", "best"),
    [("create event calendar", "calendar.create_event"), ("list events in calendar", "calendar.list_events")],
)
def test_verb_object_and_service_find_the_tool(index: Index, query: str, best: str) -> None:
    assert index.rank(query, 3)[0] == best


@pytest.mark.parametrize(
    "query",
    [
        "",
        " \n",
        "the of to in a",
        "🙂🙂",
        '"',
        "*",
        "AND OR NOT",
        "server:x*",
        "NEAR(q z, 2)",
        "'; DELTA tool",
        "\0\ud800",
        "^xyzzy",
    ],
)
def test_what_holds_no_known_word_finds_nothing_and_is_never_syntax(index: Index, query: str) -> None:
    assert index.rank(query, 3) == []


@pytest.mark.parametrize("query", ["カレンダーの予定", "календарь", "z" * 100_000, "file\ud800", "a\0file"])
def test_any_query_is_answered(index: Index, query: str) -> None:
    assert len(index.rank(query, 3)) <= 3


def test_of_ten_thousand_words_the_first_count(index: Index) -> None:
    assert index.rank("reboot hub " + "word " * 10_000, 1) == ["home.restart_hub"]


def test_other_scripts_are_indexed_too() -> None:
    index = Index(
        [("kalender", tool("termin_löschen", "Einen Termin löschen.")), ("wetter", tool("天気", "天気 予報"))]
    )
    assert index.rank("termin loschen", 1) == ["kalender.termin_löschen"]
    assert index.rank("予報", 1) == ["wetter.天気"]


def test_equals_keep_the_order_of_the_list() -> None:
    index = Index([(server, tool("same", "the same")) for server in ("b", "a", "c")])
    assert index.rank("same", 3) == ["b.same", "a.same", "c.same"]


def test_an_index_made_twice_ranks_alike() -> None:
    queries = ["light", "file in a directory", "create", "the"]
    assert [Index(HOUSE).rank(query, 16) for query in queries] == [Index(HOUSE).rank(query, 16) for query in queries]


def test_ten_thousand_tools_are_ranked() -> None:
    index = Index([(f"server{n % 50}", tool(f"act_on_{n}", f"Act on thing {n}.")) for n in range(10_000)])
    assert index.rank("act on thing 9876", 1) == ["server26.act_on_9876"]


def test_a_schema_of_45_kb_is_indexed_by_its_parameter_names() -> None:
    properties: dict[str, Any] = {f"option_{n}": {"type": "string", "description": "x" * 200} for n in range(200)}
    large = Tool("large", "", {"type": "object", "properties": {**properties, "zebra": {"$ref": "#/none"}}})
    assert len(json.dumps(large.schema)) > 45_000
    assert Index([*HOUSE, ("s", large)]).rank("zebra", 1) == ["s.large"]


@pytest.mark.parametrize("schema", [{}, {"properties": []}, {"properties": None}, {"properties": {"a\ud800": 1}}])
def test_an_odd_schema_loses_no_tool(schema: dict[str, Any]) -> None:
    assert Index([("s", Tool("odd", "", schema))]).rank("odd", 1) == ["s.odd"]


def test_an_index_is_asked_from_several_threads_at_once(index: Index) -> None:
    together = threading.Barrier(8)

    def ask(query: str) -> list[str]:
        together.wait(timeout=30)
        return index.rank(query, 5)

    queries = ["reboot the hub", "take a picture"] * 4
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, queries, timeout=60)) == [index.rank(query, 5) for query in queries]


def test_fusion_puts_first_what_stands_high_in_both() -> None:
    assert fused([1, 2, 3], [3, 2, 4]) == [3, 2, 1, 4]
    assert fused([5], [4]) == [4, 5]
    assert fused([], []) == []


class Reversed:
    """Vectors to which the last rows are the nearest, whatever is asked."""

    def nearest(self, query: str, limit: int) -> list[int]:
        return list(range(len(HOUSE)))[::-1][:limit]


def test_with_vectors_a_tool_is_found_that_shares_no_word() -> None:
    index = Index(HOUSE)
    assert index.rank("xyzzy", 2) == []
    index.vectors = Reversed()
    assert index.rank("xyzzy", 2) == ["weather.forecast", "browser.screenshot"]
    assert "home.restart_hub" in index.rank("reboot the hub", 3)


def test_identifiers_are_found_whole_and_by_their_parts() -> None:
    assert words("getHttpUrl_2 GitHub") == ["getHttpUrl", "get", "Http", "Url", "2", "GitHub", "Git", "Hub"]
    assert plain("getHttpUrl_2 git-hub") == "get Http Url 2 git hub"
