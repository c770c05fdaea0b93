"""Arguments held against a JSON Schema that somebody else wrote: bounded in time, whatever the schema is (SPEC 6).

Two things in a schema may take for ever: a pattern, in an engine that tries all ways to match, and references that
double at each level. Patterns are matched by pydantic's engine, in time proportional to the text; the rest ends at a
deadline. What cannot be judged so is left to the tool itself.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from pydantic_core import SchemaError as PatternError
from pydantic_core import SchemaValidator, core_schema

from loopd.clock import monotonic_s

MAX_S = 0.5
"""Of one validation; the event loop waits for it. A usual one takes less than a millisecond."""

_MAX_ERROR_CHARS = 300
_MAPS_OF_SCHEMAS = frozenset({"properties", "$defs", "definitions", "dependentSchemas"})
_BY_NAME_PATTERN = frozenset({"patternProperties", "additionalProperties", "unevaluatedProperties"})
_deadline_s: ContextVar[float] = ContextVar("deadline_s")

_Rule = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


class _TooLong(Exception):
    """The deadline has gone by."""


def fault(schema: dict[str, Any], arguments: dict[str, Any]) -> str:
    """Return in one line what is wrong with `arguments`, "" if nothing is.

    A schema that is broken, refers to another document or takes too long judges nothing. Nothing is fetched.
    """
    # They take a third of the daemon's start, and the first call can wait for them.
    from jsonschema.exceptions import SchemaError, best_match  # noqa: PLC0415
    from jsonschema.validators import validator_for  # noqa: PLC0415
    from referencing import Registry  # noqa: PLC0415
    from referencing.exceptions import Unresolvable  # noqa: PLC0415

    _deadline_s.set(monotonic_s() + MAX_S)
    try:
        kind = validator_for(schema)
        kind.check_schema(schema)
        error = best_match(_bounded(kind)(_plain(schema), registry=Registry()).iter_errors(arguments))
    except (SchemaError, Unresolvable, RecursionError, _TooLong):
        return ""
    if error is None:
        return ""
    message = error.message
    if len(message) > _MAX_ERROR_CHARS:
        message = f"{message[:_MAX_ERROR_CHARS]}..."
    place = error.json_path.removeprefix("$").removeprefix(".")
    return f"{place}: {message}" if place else message


@lru_cache
def _bounded(kind: Any) -> Any:  # noqa: ANN401 - jsonschema's validators are classes without a common type
    """Return a validator of the same dialect whose patterns are quick and whose rules keep the deadline."""
    from jsonschema.validators import extend  # noqa: PLC0415

    rules = {**kind.VALIDATORS, "pattern": _pattern}
    return extend(kind, {name: _in_time(rule) for name, rule in rules.items()})  # type: ignore[no-untyped-call] # so it ships


def _in_time(rule: _Rule) -> _Rule:
    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any] | None:  # noqa: ANN401 - as above
        if monotonic_s() > _deadline_s.get():
            raise _TooLong
        return rule(validator, value, instance, schema)

    return check


def _pattern(validator: Any, pattern: Any, instance: Any, _schema: Any) -> Iterator[Any]:  # noqa: ANN401 - as above
    from jsonschema.exceptions import ValidationError  # noqa: PLC0415

    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _matches(pattern: str, text: str) -> bool:
    """Tell whether the pattern is found in the text; one that the engine does not know judges nothing."""
    try:
        return SchemaValidator(core_schema.str_schema(pattern=pattern)).isinstance_python(text)
    except PatternError:
        return True


def _plain(schema: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return the schema without what jsonschema itself would match by pattern, and without a change of dialect."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = _BY_NAME_PATTERN if "patternProperties" in schema else frozenset()
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            kept[key] = {name: _plain(part) for name, part in value.items()}
        elif key in {"enum", "const"}:
            kept[key] = value
        elif key not in left_out and key != "$schema":
            kept[key] = _plain(value)
    return kept
