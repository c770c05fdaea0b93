"""What a model's call means, however it was written: pure (SPEC 6).

Small models write the same call in many ways. Each way that is understood has a name, a `Mend`, so that it can be
counted; what is not understood becomes a `Refused`: a result that says what would have been right, never an exception.

    json_string   the arguments are JSON text instead of an object, however often encoded
    no_arguments  the arguments are `""`, null or missing
    flattened     `"arguments.url": …` instead of `"arguments": {"url": …}`
    beside_name   the arguments stand beside `name` instead of under `arguments`
    inner_name    the tool is called by its own name instead of through call_tool
    nested_call   a call, find_tool or the arguments are one level too deep, as in call_tool of call_tool
    short_name    the tool's name without its server
    other_case    another case or punctuation in a name
    other_key     what to look for stands under another key than `query`
    extra_keys    keys that belong to nothing, which are left out
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from loopd.config import Effect
from loopd.tools.catalogue import Catalogue, Entry, fold
from loopd.tools.meta import CALL, FIND
from loopd.tools.port import Outcome, Tool
from loopd.tools.schema import compact, properties, shortened
from loopd.tools.validation import fault

_MAX_SCHEMA_BYTES = 1500
_MAX_SHOWN_CHARS = 80
_NEAREST = 5

Mend = Literal[
    "json_string",
    "no_arguments",
    "flattened",
    "beside_name",
    "inner_name",
    "nested_call",
    "short_name",
    "other_case",
    "other_key",
    "extra_keys",
]
Fault = Literal["not_json", "not_object", "no_name", "no_query", "unknown_tool", "schema"]
"""Why a call was refused."""


@dataclass(frozen=True, slots=True)
class Find:
    """Answer with the tools for `query`."""

    query: str
    mended: tuple[Mend, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A tool of a port with arguments that its schema allows."""

    port: str
    tool: Tool
    arguments: dict[str, Any]
    mended: tuple[Mend, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The full name, `port.name`."""
        return f"{self.port}.{self.tool.name}"

    @property
    def effect(self) -> Effect:
        """Whether the tool only reads."""
        return self.tool.effect

    @property
    def arguments_text(self) -> str:
        """The arguments as compact JSON; there may be lone surrogates in it."""
        return compact(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Outcome):
    """A result already: there is nothing to run, and the content says why."""

    fault: Fault


Call = Prepared | Find | Outcome
"""What is to be done; an `Outcome` is a result already."""


class _Fault(Exception):
    """A call's way out of being read: it becomes a `Refused`."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault, self.message = fault, message


class _Mends(set[Mend]):
    """How the call had to be mended so far."""

    def sorted(self) -> tuple[Mend, ...]:
        return tuple(mend for mend in get_args(Mend) if mend in self)


def prepare(name: str, arguments_text: str, catalogue: Catalogue) -> Call:
    """Return what the call means.

    Args:
        name: the function that the model called.
        arguments_text: its arguments exactly as the model produced them.
        catalogue: the tools that there are now.
    """
    mends = _Mends()
    try:
        given = _object(_decoded(arguments_text, mends), mends)
        through_call = fold(name) == fold(CALL)
        if through_call:
            name, given = _through_call(name, given, mends)
        if fold(name) == fold(FIND):
            return Find(_query(name, given, mends, through_call=through_call), mends.sorted())
        return _prepared(name, given, catalogue, mends, through_call=through_call)
    except _Fault as refused:
        return Refused(ok=False, content=refused.message, fault=refused.fault)


def _decoded(text: str, mends: _Mends) -> Any:  # noqa: ANN401 - any JSON value
    """Return what JSON text holds; nothing at all is `{}`."""
    if not text.strip():
        mends.add("no_arguments")
        return {}
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Fault("not_json", f"The arguments are not JSON: {error}. Call again with a JSON object.") from error


def _object(value: Any, mends: _Mends) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """Return the object that `value` is or holds as JSON text, however often encoded; null is `{}`."""
    while isinstance(value, str):
        if value.strip():
            mends.add("json_string")
        value = _decoded(value, mends)
    if value is None:
        mends.add("no_arguments")
        return {}
    if not isinstance(value, dict):
        raise _Fault(
            "not_object",
            f"The arguments are {type(value).__name__}, not a JSON object. Call again with a JSON object.",
        )
    return value


def _through_call(name: str, given: dict[str, Any], mends: _Mends) -> tuple[str, dict[str, Any]]:
    """Return what call_tool was told to call; a call inside a call stands one level deeper."""
    deep = False
    while fold(name) == fold(CALL):
        if name != CALL:
            mends.add("other_case")
        if deep:
            mends.add("nested_call")
        name, given = _inner(given, mends)
        deep = True
    return name, given


def _inner(given: Mapping[str, Any], mends: _Mends) -> tuple[str, dict[str, Any]]:
    """Return the name of the tool, and what else was given."""
    if "name" not in given and "arguments" in given:
        given = _object(given["arguments"], mends)
        mends.add("nested_call")
    name = given.get("name")
    if not isinstance(name, str) or not name.strip():
        raise _Fault("no_name", f'{CALL} needs the name of a tool: {{"name": "...", "arguments": {{...}}}}.')
    return name.strip(), {key: value for key, value in given.items() if key != "name"}


def _query(name: str, given: Mapping[str, Any], mends: _Mends, *, through_call: bool) -> str:
    if name != FIND:
        mends.add("other_case")
    if through_call:
        mends.add("nested_call")
    arguments = _arguments(given, {}, mends, through_call=through_call)
    asked = arguments.get("query")
    if not isinstance(asked, str):
        asked = " ".join(value for value in arguments.values() if isinstance(value, str))
        mends.add("other_key")
    if not asked.strip():
        raise _Fault("no_query", f'{FIND} needs what to look for: {{"query": "verb, object and service"}}.')
    return asked


def _prepared(name: str, given: dict[str, Any], catalogue: Catalogue, mends: _Mends, *, through_call: bool) -> Prepared:
    entry = _entry(name, catalogue, mends)
    schema = entry.tool.schema
    if not through_call:
        mends.add("inner_name")
    own = not through_call and "arguments" in properties(schema)
    arguments = given if own else _arguments(given, properties(schema), mends, through_call=through_call)
    if wrong := fault(schema, arguments):
        allowed = shortened(schema, _MAX_SCHEMA_BYTES)
        raise _Fault("schema", f"The arguments of {entry.name} do not fit its schema: {wrong}. The schema: {allowed}")
    return Prepared(entry.port, entry.tool, arguments, mends.sorted())


def _entry(name: str, catalogue: Catalogue, mends: _Mends) -> Entry:
    entry = catalogue.get(name)
    if entry is None:
        nearest = catalogue.nearest(name, _NEAREST)
        near = f" The nearest are {', '.join(nearest)}." if nearest else ""
        raise _Fault(
            "unknown_tool",
            f"There is no one tool named {name[:_MAX_SHOWN_CHARS]!r}.{near} Use {FIND} to look for others.",
        )
    if name not in {entry.name, entry.tool.name}:
        mends.add("other_case")
    if fold(name) != fold(entry.name):
        mends.add("short_name")
    return entry


def _arguments(
    given: Mapping[str, Any], known: Mapping[str, Any], mends: _Mends, *, through_call: bool
) -> dict[str, Any]:
    """Return the arguments from wherever they stand: under `arguments`, flattened, or beside the name.

    Beside a proper `arguments` only names that the schema knows are taken: the rest is chatter.
    """
    wrapped = "arguments" in given
    if wrapped and not through_call:
        mends.add("nested_call")
    proper = _object(given["arguments"], mends) if wrapped else {}
    found: dict[str, Any] = {}
    for key, value in given.items():
        prefix, dot, path = key.partition(".")
        if prefix == "arguments" and dot:
            mends.add("flattened")
            _put(found, [path] if path in known else path.split("."), value)
        elif key == "arguments":
            continue
        elif wrapped and key not in known:
            mends.add("extra_keys")
        else:
            found[key] = value
            if wrapped or through_call:
                mends.add("beside_name")
    if through_call and not given:
        mends.add("no_arguments")
    return found | proper


def _put(target: dict[str, Any], path: list[str], value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Set a flattened value where its path says; what stands in the way is replaced."""
    for part in path[:-1]:
        inner = target.get(part)
        if not isinstance(inner, dict):
            inner = target[part] = {}
        target = inner
    target[path[-1]] = value
