import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopd.tools.call import Fault, Find, Mend, Prepared, Refused, prepare
from loopd.tools.catalogue import Catalogue
from loopd.tools.port import Tool
from tests.tools.fake import tool

STRING = {"type": "string"}
PORTS = [
    ("web", (tool("fetch", "Fetch a page.", url=STRING), tool("options", "", filter={"type": "object"}))),
    ("exec", (tool("run", "Run a program.", program=STRING, arguments={"type": "array"}), Tool("free", "", {}))),
    ("host", (Tool("now", "", {"type": "object", "additionalProperties": False}),)),
]
URL = "http://a/b"
INNER: dict[str, Any] = {"name": "web.fetch", "arguments": {"url": URL}}
FETCH = ("web.fetch", {"url": URL})
RUN = ("exec.run", {"program": "ls", "arguments": ["-l"]})
NOW: tuple[str, dict[str, Any]] = ("host.now", {})


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return Catalogue(PORTS)


# Each way to write a call by the name of its mend; the forms of CASES 21 to 23 first.
FORMS: list[tuple[str, Any, tuple[str, dict[str, Any]], set[str]]] = [
    ("call_tool", INNER, FETCH, set()),
    ("call_tool", {"name": "web.fetch", "arguments": json.dumps({"url": URL})}, FETCH, {"json_string"}),
    ("call_tool", {"name": "web.fetch", "arguments": json.dumps(json.dumps({"url": URL}))}, FETCH, {"json_string"}),
    ("call_tool", json.dumps(INNER), FETCH, {"json_string"}),
    ("call_tool", {"name": "web.fetch", "arguments.url": URL}, FETCH, {"flattened"}),
    ("call_tool", {"name": "web.fetch", "url": URL}, FETCH, {"beside_name"}),
    ("web.fetch", {"url": URL}, FETCH, {"inner_name"}),
    ("WEB.Fetch", {"url": URL}, FETCH, {"inner_name", "other_case"}),
    ("call_tool", {"name": "Web.Fetch", "arguments": {"url": URL}}, FETCH, {"other_case"}),
    ("Call_Tool", INNER, FETCH, {"other_case"}),
    ("call_tool", {"name": "call_tool", "arguments": INNER}, FETCH, {"nested_call"}),
    ("call_tool", {"name": "call_tool", "arguments": json.dumps(INNER)}, FETCH, {"nested_call", "json_string"}),
    ("call_tool", {"name": "call_tool", **INNER["arguments"], "arguments": INNER}, FETCH, {"nested_call"}),
    ("call_tool", {"arguments": INNER}, FETCH, {"nested_call"}),
    ("call_tool", {"name": "fetch", "arguments": {"url": URL}}, FETCH, {"short_name"}),
    ("call_tool", {"name": "Fetch", "arguments": {"url": URL}}, FETCH, {"short_name", "other_case"}),
    ("call_tool", {"name": "web.fetch", "url": URL, "arguments": {}}, FETCH, {"beside_name"}),
    ("call_tool", {"name": "web.fetch", "url": URL, "arguments": None}, FETCH, {"beside_name", "no_arguments"}),
    ("call_tool", {"name": "web.fetch", "url": "other", "arguments": {"url": URL}}, FETCH, {"beside_name"}),
    ("call_tool", {**INNER, "reason": "because"}, FETCH, {"extra_keys"}),
    ("fetch", {"url": URL}, FETCH, {"inner_name", "short_name"}),
    ("web.fetch", json.dumps({"url": URL}), FETCH, {"inner_name", "json_string"}),
    ("web.fetch", {"arguments": {"url": URL}}, FETCH, {"inner_name", "nested_call"}),
    ("web.fetch", {"arguments.url": URL}, FETCH, {"inner_name", "flattened"}),
    ("web.fetch", INNER, FETCH, {"inner_name", "nested_call", "extra_keys"}),
    (
        "call_tool",
        {"name": "web.options", "arguments.filter.a.b": 1},
        ("web.options", {"filter": {"a": {"b": 1}}}),
        {"flattened"},
    ),
    ("exec.run", {"program": "ls", "arguments": ["-l"]}, RUN, {"inner_name"}),
    ("call_tool", {"name": "exec.run", "arguments": {"program": "ls", "arguments": ["-l"]}}, RUN, set()),
    ("call_tool", {"name": "exec.free", "anything": 1}, ("exec.free", {"anything": 1}), {"beside_name"}),
    ("call_tool", {"name": "host.now", "arguments": {}}, NOW, set()),
    ("call_tool", {"name": "host.now", "arguments": ""}, NOW, {"no_arguments"}),
    ("call_tool", {"name": "host.now", "arguments": None}, NOW, {"no_arguments"}),
    ("call_tool", {"name": "host.now", "arguments": "null"}, NOW, {"no_arguments", "json_string"}),
    ("call_tool", {"name": "host.now"}, NOW, {"no_arguments"}),
    ("host.now", {}, NOW, {"inner_name"}),
    ("host.now", None, NOW, {"inner_name", "no_arguments"}),
    ("host.now", "", NOW, {"inner_name", "no_arguments"}),
]


@pytest.mark.parametrize(("name", "arguments", "meant", "mended"), FORMS, ids=str)
def test_a_call_is_understood_however_it_is_written_and_how_it_was_is_told(
    catalogue: Catalogue, name: str, arguments: Any, meant: tuple[str, dict[str, Any]], mended: set[str]
) -> None:
    call = prepare(name, json.dumps(arguments), catalogue)
    assert isinstance(call, Prepared), call
    assert (call.name, call.arguments) == meant
    assert len(call.mended) == len(mended)
    assert set(call.mended) == mended


def test_every_way_to_mend_a_call_is_tried() -> None:
    tried = {mend for *_, mended in [*FORMS, *FINDS] for mend in mended}
    assert tried == set(get_args(Mend))


def test_no_arguments_at_all_are_an_empty_object(catalogue: Catalogue) -> None:
    call = prepare("host.now", "", catalogue)
    assert isinstance(call, Prepared)
    assert (call.arguments, call.mended) == ({}, ("no_arguments", "inner_name"))


FINDS: list[tuple[str, Any, set[str]]] = [
    ("find_tool", {"query": "fetch page"}, set()),
    ("FindTool", {"query": "fetch page"}, {"other_case"}),
    ("find_tool", {"need": "fetch page"}, {"other_key"}),
    ("find_tool", {"arguments": {"query": "fetch page"}}, {"nested_call"}),
    ("find_tool", json.dumps({"query": "fetch page"}), {"json_string"}),
    ("call_tool", {"name": "find_tool", "arguments": {"query": "fetch page"}}, {"nested_call"}),
    ("call_tool", {"name": "find_tool", "query": "fetch page"}, {"nested_call", "beside_name"}),
]


@pytest.mark.parametrize(("name", "arguments", "mended"), FINDS, ids=str)
def test_find_tool_is_understood_however_it_is_written(
    catalogue: Catalogue, name: str, arguments: Any, mended: set[str]
) -> None:
    found = prepare(name, json.dumps(arguments), catalogue)
    assert isinstance(found, Find)
    assert found.query == "fetch page"
    assert set(found.mended) == mended


# CASES 22 first, then 23.
FAULTS: list[tuple[str, str, str, str]] = [
    ("call_tool", '{"a":', "not_json", "not JSON"),
    ("call_tool", '{"name": "web.fetch", "arguments": "{"}', "not_json", "not JSON"),
    ("call_tool", '"text"', "not_json", "not JSON"),
    ("fetch", '{"url":' * 100_000, "not_json", "not JSON"),
    ("call_tool", "[1]", "not_object", "not a JSON object"),
    ("call_tool", '{"name": "web.fetch", "arguments": [1]}', "not_object", "not a JSON object"),
    ("call_tool", "{}", "no_name", "needs the name of a tool"),
    ("call_tool", "", "no_name", "needs the name of a tool"),
    ("call_tool", '{"name": 3}', "no_name", "needs the name of a tool"),
    ("call_tool", '{"name": "call_tool"}', "no_name", "needs the name of a tool"),
    ("call_tool", '{"name": "fetsh"}', "unknown_tool", "The nearest are web.fetch"),
    ("fetch_page", "{}", "unknown_tool", "The nearest are web.fetch"),
    ("x" * 1_000_000, "{}", "unknown_tool", "There is no one tool named 'xxx"),
    ("zzz", "{}", "unknown_tool", "Use find_tool to look for others"),
    ("fetch", '{"url": 5}', "schema", "url: 5 is not of type 'string'. The schema: {"),
    ("fetch", "{}", "schema", "'url' is a required property"),
    ("find_tool", "{}", "no_query", "needs what to look for"),
    ("find_tool", '{"query": " "}', "no_query", "needs what to look for"),
]


@pytest.mark.parametrize(("name", "text", "fault", "said"), FAULTS, ids=lambda value: str(value)[:40])
def test_what_cannot_be_run_becomes_a_result_that_says_what_would_be_right(
    catalogue: Catalogue, name: str, text: str, fault: str, said: str
) -> None:
    call = prepare(name, text, catalogue)
    assert isinstance(call, Refused)
    assert (call.ok, call.fault) == (False, fault)
    assert said in call.content


def test_every_reason_to_refuse_a_call_is_tried() -> None:
    assert {fault for _, _, fault, _ in FAULTS} == set(get_args(Fault))


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
    assert isinstance(prepare(name, text, Catalogue(PORTS)), Prepared | Find | Refused)
