"""What a model's call means, however it was written: pure (SPEC 6).

Understood are: arguments as a JSON string, `""` or null; `arguments.url` flattened; arguments beside `name`; a call
inside a call; the inner tool called by its own name; another case or punctuation in names. Everything else becomes a
result that says what would have been right, never an exception.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loopd.config import Effect
from loopd.errors import ToolError
from loopd.tools.catalogue import Catalogue, fold
from loopd.tools.meta import CALL, FIND
from loopd.tools.port import Outcome, Tool
from loopd.tools.schema import fault, properties, shortened

_MAX_SCHEMA_BYTES = 1500
_MAX_SHOWN_CHARS = 80
_NEAREST = 5


@dataclass(frozen=True, slots=True)
class Find:
    """Answer with the tools for `query`."""

    query: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A tool of a port with arguments that its schema allows."""

    port: str
    tool: Tool
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The full name, `port.name`."""
        return f"{self.port}.{self.tool.name}"

    @property
    def effect(self) -> Effect:
        """Whether the tool only reads."""
        return self.tool.effect


Call = Prepared | Find | Outcome
"""What is to be done; an `Outcome` is a result already: there is nothing to run."""


def prepare(name: str, arguments_text: str, catalogue: Catalogue) -> Call:
    """Return what the call means.

    Args:
        name: the function that the model called.
        arguments_text: its arguments exactly as the model produced them.
        catalogue: the tools that there are now.
    """
    try:
        given = _object(arguments_text)
        through_call = fold(name) == fold(CALL)
        while fold(name) == fold(CALL):
            name, given = _inner(given)
        if fold(name) == fold(FIND):
            return Find(_query(given))
        return _prepared(name, given, catalogue, through_call=through_call)
    except ToolError as error:
        return Outcome(ok=False, content=error.message)


def _object(value: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    """Return the object that `value` is or holds as JSON text, however often encoded; nothing at all is `{}`."""
    try:
        while isinstance(value, str):
            value = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError) as error:
        raise ToolError(f"The arguments are not JSON: {error}. Call again with a JSON object.") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ToolError(f"The arguments are {type(value).__name__}, not a JSON object. Call again with a JSON object.")
    return value


def _inner(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return name and remainder of what call_tool was given; a call inside a call stands one level deeper."""
    if "name" not in given:
        given = _object(given.get("arguments"))
    name = given.get("name")
    if not isinstance(name, str) or not name.strip():
        raise ToolError(f'{CALL} needs the name of a tool: {{"name": "...", "arguments": {{...}}}}.')
    return name.strip(), {key: value for key, value in given.items() if key != "name"}


def _query(given: Mapping[str, Any]) -> str:
    arguments = _arguments(given, {})
    asked = arguments.get("query")
    query = asked if isinstance(asked, str) else " ".join(v for v in arguments.values() if isinstance(v, str))
    if not query.strip():
        raise ToolError(f'{FIND} needs what to look for: {{"query": "verb, object and service"}}.')
    return query


def _prepared(name: str, given: dict[str, Any], catalogue: Catalogue, *, through_call: bool) -> Prepared:
    entry = catalogue.get(name)
    if entry is None:
        nearest = catalogue.nearest(name, _NEAREST)
        near = f" The nearest are {', '.join(nearest)}." if nearest else ""
        raise ToolError(f"There is no one tool named {name[:_MAX_SHOWN_CHARS]!r}.{near} Use {FIND} to look for others.")
    schema = entry.tool.schema
    own = not through_call and "arguments" in properties(schema)
    arguments = given if own else _arguments(given, properties(schema))
    if wrong := fault(schema, arguments):
        allowed = shortened(schema, _MAX_SCHEMA_BYTES)
        raise ToolError(f"The arguments of {entry.name} do not fit its schema: {wrong}. The schema: {allowed}")
    return Prepared(entry.port, entry.tool, arguments)


def _arguments(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments from wherever they stand: under `arguments`, flattened, or beside the name.

    Beside a proper `arguments` only names that the schema knows are taken: the rest is chatter.
    """
    proper = _object(given.get("arguments"))
    found: dict[str, Any] = {}
    for key, value in given.items():
        prefix, dot, path = key.partition(".")
        if prefix == "arguments" and dot:
            _put(found, [path] if path in known else path.split("."), value)
        elif key != "arguments" and ("arguments" not in given or key in known):
            found[key] = value
    return found | proper


def _put(target: dict[str, Any], path: list[str], value: Any) -> None:  # noqa: ANN401 - any JSON value
    """Set a flattened value where its path says; what stands in the way is replaced."""
    for part in path[:-1]:
        inner = target.get(part)
        if not isinstance(inner, dict):
            inner = target[part] = {}
        target = inner
    target[path[-1]] = value
