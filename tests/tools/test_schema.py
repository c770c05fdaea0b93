import json
from typing import Any

import jsonschema
import pytest

from loopd.tools.port import Tool
from loopd.tools.schema import example, shortened

ODD: dict[str, dict[str, Any]] = {
    "no schema at all": {},
    "no properties": {"type": "object"},
    "required but not described": {"type": "object", "required": ["x"]},
    "properties that are no object": {"type": "object", "properties": []},
    "a list of types": {"properties": {"x": {"type": ["null", "integer"]}}, "required": ["x"]},
    "a union": {"properties": {"x": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}}, "required": ["x"]},
    "a reference": {"properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"], "$defs": {"n": {"type": "number"}}},
    "an enumeration": {"properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]},
    "a constant": {"properties": {"x": {"const": 7}}, "required": ["x"]},
    "a default": {"properties": {"x": {"type": "string", "default": "d"}}, "required": ["x"]},
    "a minimum": {"properties": {"x": {"type": "integer", "minimum": 5}}, "required": ["x"]},
    "a list": {"properties": {"x": {"type": "array", "items": {"type": "string"}}}, "required": ["x"]},
    "an object inside": {
        "properties": {"x": {"type": "object", "properties": {"y": {"type": "integer"}}, "required": ["y"]}},
        "required": ["x"],
    },
}


@pytest.mark.parametrize("schema", ODD.values(), ids=ODD.keys())
def test_the_example_made_from_a_schema_is_valid_under_it(schema: dict[str, Any]) -> None:
    made = example(Tool("t", "", schema))
    if isinstance(schema.get("properties", {}), dict):
        jsonschema.validate(made, schema)
    assert list(made) == schema.get("required", [])


def test_the_example_of_a_schema_that_contains_itself_ends() -> None:
    schema: dict[str, Any] = {"properties": {"x": {"$ref": "#"}}, "required": ["x"], "type": "object"}
    json.dumps(example(Tool("t", "", schema)))


def test_a_tools_own_example_goes_first() -> None:
    assert example(Tool("t", "", ODD["a constant"], example={"x": 1})) == {"x": 1}


def test_a_schema_is_shown_whole_then_without_notes_then_by_its_required_names() -> None:
    schema = {
        "type": "object",
        "properties": {"title": {"type": "string", "description": "long " * 20}, "n": {"enum": [{"title": 1}]}},
        "required": ["title"],
    }
    assert json.loads(shortened(schema, 1000)) == schema
    bare = {
        "type": "object",
        "properties": {"title": {"type": "string"}, "n": {"enum": [{"title": 1}]}},
        "required": ["title"],
    }
    assert json.loads(shortened(schema, 120)) == bare
    outline = {"properties": {"title": {"type": "string"}, "n": {}}, "required": ["title"]}
    assert json.loads(shortened(schema, 80)) == outline
    assert json.loads(shortened(schema, 25)) == {"required": ["title"]}
    assert shortened(schema, 5) == ""


def test_a_schema_too_deep_to_be_walked_is_left_out() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"properties": {"a": deep}}
    assert shortened(deep, 1000) == '{"properties":{"a":{}},"required":[]}'
