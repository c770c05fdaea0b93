"""JSON Schema of a tool's arguments: said in few words, made into an example (SPEC 6).

Schemas come from other people's programs: they reach 45 kB, use references, unions and lists of types, or lack
properties. Nothing here fails on one that is odd.
"""

import json
from collections.abc import Mapping
from typing import Any

from loopd.tools.port import Tool

_NOTES = frozenset({"title", "description", "examples", "default", "$schema", "$comment", "$id"})
_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_MAX_DEPTH = 6


def compact(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return `value` as JSON without white space, in its own key order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the named arguments of a schema; none where it lists none."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def shortened(schema: Mapping[str, Any], max_bytes: int) -> str:
    """Return the schema in at most `max_bytes`: whole, else without its notes, else as an outline, else required names.

    Returns:
        JSON text, or "" where not even the required names fit.
    """
    for form in (dict, _without_notes, _outline, _names):
        try:
            text = compact(form(schema))
        except RecursionError:
            continue
        if len(text.encode("utf-8", "surrogatepass")) <= max_bytes:
            return text
    return ""


def example(tool: Tool) -> dict[str, Any]:
    """Return arguments that show how the tool is called: its own example, else one made from its schema."""
    if tool.example:
        return tool.example
    known = properties(tool.schema)
    return {name: _example(known.get(name, {}), name, tool.schema, 0) for name in _required(tool.schema)}


def _required(schema: Mapping[str, Any]) -> list[str]:
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _outline(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema's arguments with their types, whatever is inside them left out."""
    kept = {
        name: {"type": part["type"]} if isinstance(part, dict) and "type" in part else {}
        for name, part in properties(schema).items()
    }
    return {"properties": kept, **_names(schema)}


def _names(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"required": _required(schema)}


def _without_notes(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return the schema without what only explains; a property named `title` stays."""
    if isinstance(schema, list):
        return [_without_notes(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: _without_notes(part) for name, part in value.items()}
        elif key in {"enum", "const"}:
            kept[key] = value
        elif key not in _NOTES:
            kept[key] = _without_notes(value)
    return kept


def _example(schema: Any, name: str, root: Mapping[str, Any], depth: int) -> Any:  # noqa: ANN401 - any JSON value
    """Return a value for one argument; `<name>` stands for a text that only the caller knows."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return f"<{name}>"
    if values := _values(schema):
        return values[0]
    if (other := _alternative(schema, root)) is not None:
        return _example(other, name, root, depth + 1)
    kind = schema.get("type")
    kind = next((part for part in kind if part != "null"), None) if isinstance(kind, list) else kind
    if kind == "object":
        known = properties(schema)
        return {part: _example(known.get(part, {}), part, root, depth + 1) for part in _required(schema)}
    if kind == "array":
        return [_example(schema.get("items", {}), name.removesuffix("s"), root, depth + 1)]
    smallest = schema.get("minimum", 1)
    return {"integer": smallest, "number": smallest, "boolean": True, "null": None}.get(str(kind), f"<{name}>")


def _values(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values that the schema itself names, the most telling first."""
    listed = (schema.get(key) for key in ("examples", "enum"))
    named = [schema[key] for key in ("const", "default") if schema.get(key) is not None]
    return named + [value for values in listed if isinstance(values, list) for value in values]


def _alternative(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
    """Return the schema that this one refers to or allows first, null left out; None where it stands for itself."""
    if isinstance(reference := schema.get("$ref"), str):
        return _referred(reference, root)
    parts: list[Any] = next(
        (schema[key] for key in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(key), list)), []
    )
    return next((part for part in parts if isinstance(part, dict) and part.get("type") != "null"), None)


def _referred(reference: str, root: Mapping[str, Any]) -> Any:  # noqa: ANN401 - any JSON value
    """Return what a reference within the same document points at, {} where there is nothing."""
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part, {}) if isinstance(found, dict) else {}
    return found
