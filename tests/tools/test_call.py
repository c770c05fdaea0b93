import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopd.tools.call import Find, Prepared, prepare
from loopd.tools.catalogue import Catalogue
from loopd.tools.port import Outcome, Tool
from tests.tools.fake import tool

STRING = {"type": "string"}
PORTS = [
    ("web", (tool("fetch", "Fetch a page.", url=STRING), tool("options", "", filter={"type": "object"}))),
    ("exec", (tool("run", "Run a program.", program=STRING, arguments={"type": "array"}), Tool("free", "", {}))),
    ("host", (Tool("now", "", {"type": "object", "additionalProperties": False}),)),
]
URL = "http://a/b"
INNER = {"name": "web.fetch", "arguments": {"url": URL}}
FETCH = ("web.fetch", {"url": URL})


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return Catalogue(PORTS)


@pytest.mark.parametrize(
    ("name", "arguments", "meant"),
    [
        ("call_tool", INNER, FETCH),
        ("call_tool", {"name": "fetch", "arguments": {"url": URL}}, FETCH),
        ("call_tool", {"name": "web.fetch", "arguments": json.dumps({"url": URL})}, FETCH),
        ("call_tool", {"name": "fetch", "arguments": json.dumps(json.dumps({"url": URL}))}, FETCH),
        ("call_tool", json.dumps(INNER), FETCH),
        ("call_tool", {"name": "fetch", "arguments.url": URL}, FETCH),
        ("call_tool", {"name": "fetch", "url": URL}, FETCH),
        ("call_tool", {"name": "fetch", "url": URL, "arguments": {}}, FETCH),
        ("call_tool", {"name": "fetch", "url": URL, "arguments": None}, FETCH),
        ("call_tool", {"name": "fetch", "url": "other", "arguments": {"url": URL}}, FETCH),
        ("call_tool", {"name": "fetch", "arguments": {"url": URL}, "reason": "because"}, FETCH),
        ("call_tool", {"name": "call_tool", "arguments": INNER}, FETCH),
        ("call_tool", {"name": "call_tool", "arguments": json.dumps(INNER)}, FETCH),
        ("call_tool", {"arguments": INNER}, FETCH),
        ("Call_Tool", {"name": "WEB.Fetch", "arguments": {"url": URL}}, FETCH),
        ("web.fetch", {"url": URL}, FETCH),
        ("fetch", {"url": URL}, FETCH),
        ("fetch", json.dumps({"url": URL}), FETCH),
        ("fetch", {"arguments": {"url": URL}}, FETCH),
        ("fetch", {"arguments.url": URL}, FETCH),
        ("fetch", INNER, FETCH),
        ("call_tool", {"name": "options", "arguments.filter.a.b": 1}, ("web.options", {"filter": {"a": {"b": 1}}})),
        ("run", {"program": "ls", "arguments": ["-l"]}, ("exec.run", {"program": "ls", "arguments": ["-l"]})),
        (
            "call_tool",
            {"name": "run", "arguments": {"program": "ls", "arguments": ["-l"]}},
            ("exec.run", {"program": "ls", "arguments": ["-l"]}),
        ),
        ("call_tool", {"name": "free", "anything": 1}, ("exec.free", {"anything": 1})),
        ("call_tool", {"name": "now", "arguments": ""}, ("host.now", {})),
        ("call_tool", {"name": "now", "arguments": None}, ("host.now", {})),
        ("call_tool", {"name": "now", "arguments": "null"}, ("host.now", {})),
        ("call_tool", {"name": "now"}, ("host.now", {})),
        ("now", None, ("host.now", {})),
        ("now", "", ("host.now", {})),
    ],
    ids=str,
)
def test_a_call_is_understood_however_it_is_written(
    catalogue: Catalogue, name: str, arguments: Any, meant: tuple[str, dict[str, Any]]
) -> None:
    call = prepare(name, json.dumps(arguments), catalogue)
    assert isinstance(call, Prepared), call
    assert (call.name, call.arguments) == meant


def test_no_arguments_at_all_are_an_empty_object(catalogue: Catalogue) -> None:
    call = prepare("now", "", catalogue)
    assert isinstance(call, Prepared)
    assert call.arguments == {}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("find_tool", {"query": "fetch page"}),
        ("FindTool", {"query": "fetch page"}),
        ("find_tool", {"need": "fetch page"}),
        ("find_tool", {"arguments": {"query": "fetch page"}}),
        ("find_tool", json.dumps({"query": "fetch page"})),
        ("call_tool", {"name": "find_tool", "arguments": {"query": "fetch page"}}),
    ],
    ids=str,
)
def test_find_tool_is_understood_however_it_is_written(catalogue: Catalogue, name: str, arguments: Any) -> None:
    assert prepare(name, json.dumps(arguments), catalogue) == Find("fetch page")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("call_tool", '{"a":', "not JSON"),
        ("call_tool", "[1]", "not a JSON object"),
        ("call_tool", '"text"', "not JSON"),
        ("call_tool", "{}", "needs the name of a tool"),
        ("call_tool", '{"name": 3}', "needs the name of a tool"),
        ("call_tool", '{"name": "call_tool"}', "needs the name of a tool"),
        ("call_tool", '{"name": "fetch", "arguments": [1]}', "not a JSON object"),
        ("call_tool", '{"name": "fetch", "arguments": "{"}', "not JSON"),
        ("call_tool", '{"name": "fetsh"}', "The nearest are web.fetch"),
        ("fetch_page", "{}", "The nearest are web.fetch"),
        ("x" * 1_000_000, "{}", "There is no one tool named 'xxx"),
        ("zzz", "{}", "Use find_tool to look for others"),
        ("fetch", '{"url": 5}', "url: 5 is not of type 'string'. The schema: {"),
        ("fetch", "{}", "'url' is a required property"),
        ("find_tool", "{}", "needs what to look for"),
        ("find_tool", '{"query": " "}', "needs what to look for"),
        ("fetch", '{"url":' * 100_000, "not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_run_becomes_a_result_that_says_what_would_be_right(
    catalogue: Catalogue, name: str, text: str, said: str
) -> None:
    call = prepare(name, text, catalogue)
    assert isinstance(call, Outcome)
    assert not call.ok
    assert said in call.content


def test_a_call_nested_a_hundred_times_still_ends(catalogue: Catalogue) -> None:
    nested: dict[str, Any] = INNER
    for _ in range(100):
        nested = {"name": "call_tool", "arguments": nested}
    call = prepare("call_tool", json.dumps(nested), catalogue)
    assert isinstance(call, Prepared)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["call_tool", "fetch", "now"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "arguments", "arguments.url", "query", "url"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.sampled_from(["call_tool", "find_tool", "fetch", "", "\ud800"]), JSON.map(json.dumps) | st.text(max_size=20))
def test_no_call_raises(name: str, text: str) -> None:
    assert isinstance(prepare(name, text, Catalogue(PORTS)), Prepared | Find | Outcome)
