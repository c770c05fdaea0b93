from typing import Any

import pytest

from loopd.clock import monotonic_s
from loopd.tools import validation
from loopd.tools.validation import fault


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": "1"}, ["x: ", "'1' is not of type 'integer'"]),
        ({}, ["'x' is a required property"]),
        ({"x": 1, "z": 2}, ["'z' was unexpected"]),
    ],
)
def test_a_fault_names_the_place_and_what_is_wrong(arguments: dict[str, Any], words: list[str]) -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "integer"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    assert fault(schema, {"x": 1}) == ""
    assert all(word in fault(schema, arguments) for word in words)


def test_a_fault_does_not_repeat_a_large_argument() -> None:
    assert len(fault({"properties": {"x": {"type": "integer"}}}, {"x": "y" * 100_000})) < 400


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"properties": {"x": {"$ref": "#/nowhere"}}},
        {"properties": {"x": {"$ref": "http://127.0.0.1:9/schema.json"}}},
        {"$ref": "#"},
        {"properties": []},
    ],
)
def test_a_broken_schema_judges_nothing_and_nothing_is_fetched(schema: dict[str, Any]) -> None:
    assert fault(schema, {"x": 1}) == ""


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        (r"^\d{4}-\d{2}$", "2026-12", True),
        (r"^\d{4}-\d{2}$", "2026-1", False),
        ("b", "abc", True),
        (r"^\w+$", "Zürich", True),
        ("^([a-zA-Z0-9]+)+@x$", "a" * 60 + ".example", False),
        ("(a+)+$", "a" * 60 + "!", False),
    ],
)
def test_a_pattern_is_matched_however_long_an_engine_that_tries_would_take(
    pattern: str, text: str, *, matches: bool
) -> None:
    assert (fault({"properties": {"x": {"type": "string", "pattern": pattern}}}, {"x": text}) == "") is matches


@pytest.mark.parametrize("pattern", ["(?=a)b", r"(a)\1", "((", "(a{1000}){1000}"])
def test_a_pattern_that_cannot_be_judged_judges_nothing(pattern: str) -> None:
    assert fault({"properties": {"x": {"pattern": pattern}}}, {"x": "y"}) == ""


@pytest.mark.parametrize(
    "schema",
    [
        {"patternProperties": {"(a+)+$": {}}, "additionalProperties": False},
        {"patternProperties": {"(a+)+$": {}}, "unevaluatedProperties": False},
        {"properties": {"x": {"$ref": "#/hidden"}}, "hidden": {"patternProperties": {"(a+)+$": False}}},
        {
            "properties": {
                "x": {
                    "$schema": "http://json-schema.org/draft-07/schema#",
                    "properties": {"y": {"pattern": "(a+)+$"}},
                }
            }
        },
    ],
    ids=["additional", "unevaluated", "behind-a-reference", "another-dialect-inside"],
)
def test_no_other_way_leads_to_an_engine_that_tries(schema: dict[str, Any]) -> None:
    hard = "a" * 60 + "!"
    fault(schema, {hard: 1, "x": {hard: 1, "y": hard}})


def test_references_that_double_at_each_level_end_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_S", 0.05)
    levels = {f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 2} for n in range(60)}
    schema = {"$defs": {**levels, "l60": {"type": "object"}}, "$ref": "#/$defs/l0"}
    began_s = monotonic_s()
    assert fault(schema, {"x": 1}) == ""
    assert monotonic_s() - began_s < 60  # and not the age of the world


def test_arguments_of_other_patterns_are_still_judged_by_the_rest_of_the_schema() -> None:
    schema = {"patternProperties": {"^x-": {}}, "additionalProperties": False, "required": ["y"]}
    assert "'y' is a required property" in fault(schema, {"x-1": 1})


def test_a_lone_surrogate_in_an_argument_does_no_harm() -> None:
    fault({"properties": {"x": {"pattern": "^a$"}}}, {"x": "\ud800"})
