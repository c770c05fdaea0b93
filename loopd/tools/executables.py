"""The port `executables`: programs in a directory, each with a manifest beside it (SPEC 6).

`weather` has its manifest in `weather.toml`, `backup.sh` in `backup.sh.toml`. A call starts the program with the
arguments as a JSON object on its input; what it prints is the result, and an exit status other than 0 says that it
failed, for the reason that stands at the end of its errors. New, changed and removed files are noticed while the daemon
runs. Whoever could write to one of the files could run what they like as the user of the tools: files that anybody but
root or loopd's own user may change are left out, as is a manifest with a fault, each with its reason; the others work.
"""

import asyncio
import json
import logging
import os
import signal
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loopd.config import Effect, Seconds, found_and_allowed
from loopd.errors import ToolError
from loopd.proto.canonical import canonical
from loopd.tools.children import Child, Children
from loopd.tools.port import Outcome, PortState, Tool
from loopd.tools.text import Capture
from loopd.tools.validation import fault

log = logging.getLogger("loopd.tools.executables")

_LOOK_EVERY_S = 2.0
_MAX_MANIFESTS = 1000
_MAX_MANIFEST_BYTES = 65_536
_MAX_ERROR_BYTES = 4096
_READ_BYTES = 65_536
_SHOWN_FAULTS = 3
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_Print = tuple[tuple[str, int, int, int, int], ...]


class Manifest(BaseModel):
    """What stands in a manifest; `name` is the program's, up to its first dot, where it is not given."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: Annotated[str, Field(min_length=1, max_length=4096, description="what it does, in a sentence")]
    effect: Annotated[Effect, Field(description="'read' or 'write'")]
    arguments: Annotated[dict[str, Any], Field(alias="schema")] = _NO_ARGUMENTS
    example: dict[str, Any] = {}
    timeout_s: Seconds | None = None

    def tool(self) -> Tool:
        """Return it as the port lists it."""
        schema = {"type": "object", **self.arguments}
        return Tool(self.name, self.description, schema, self.effect, self.example, self.timeout_s)


@dataclass(frozen=True, slots=True)
class Listing:
    """What a directory holds.

    Attributes:
        programs: path and tool by the tool's name, in the order of the manifests' names.
        faults: what is left out: file, key, what was found and what is allowed, a line each.
        without: programs that have no manifest.
    """

    programs: Mapping[str, tuple[Path, Tool]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    without: tuple[Path, ...] = ()


class Executables:
    """The port.

    Args:
        directory: `[tools] executables`.
        children: starts the programs.
        max_bytes: of a result, `[loop] max_result_bytes`.
    """

    name = "executables"

    def __init__(self, directory: Path, children: Children, max_bytes: int) -> None:
        self._directory, self._children, self._max_bytes = directory, children, max_bytes
        self._listing, self._down = Listing(), ""
        self._seen: _Print | None = None
        self.look()

    @property
    def state(self) -> PortState:
        """It is down while the directory cannot be used."""
        return "down" if self._down else "up"

    @property
    def reason(self) -> str:
        """Why it is down, or what is left out while it is up."""
        faults = self._listing.faults
        more = f" (and {len(faults) - _SHOWN_FAULTS} more)" if len(faults) > _SHOWN_FAULTS else ""
        return self._down or "; ".join(faults[:_SHOWN_FAULTS]) + more

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools of the sound manifests; while it is down, those it had."""
        return tuple(tool for _, tool in self._listing.programs.values())

    async def run(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Run a program to its end. Cancelling ends it with all that it started.

        Raises:
            ToolError: it is not there any more, or could not be started or run to its end.
        """
        await asyncio.to_thread(self.look)
        if name not in self._listing.programs or self._down:
            raise ToolError(f"{self.name}.{name} is not there any more" + (f": {self.reason}" if self.reason else ""))
        path, _ = self._listing.programs[name]
        async with await self._children.start([str(path)]) as child:
            return await _result(child, name, json.dumps(arguments).encode() + b"\n", self._max_bytes)

    async def keep(self) -> None:
        """Notice changes until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read the directory again if anything in it has changed. Blocking: it reads files."""
        try:
            seen = _print(self._directory)
            if seen != self._seen:
                self._take(read(self._directory))
            self._seen, self._down = seen, ""
        except ToolError as error:
            if self._down != error.message:
                log.warning("down reason=%r", error.message)
            self._seen, self._down = None, error.message

    def _take(self, listing: Listing) -> None:
        for text in listing.faults:
            if text not in self._listing.faults:
                log.warning("left_out reason=%r", text)
        self._listing = listing


async def _result(child: Child, name: str, arguments: bytes, max_bytes: int) -> Outcome:
    """Feed the program and return what it gave; at most `max_bytes` of its output are held."""
    output = Capture(max_bytes)
    _, _, errors = await asyncio.gather(_feed(child, arguments), _take(child.stdout, output), _tail(child.stderr))
    status = await child.wait()
    text = output.finish()
    if status == 0:
        return Outcome(ok=True, content=text.text or "(no output)", cut=text.cut, lossy=text.lossy)
    why = f"exit status {status}" if status > 0 else f"ended by signal {_signal(-status)}"
    parts = (f"{name} failed: {why}", errors.strip(), text.text.strip())
    return Outcome(ok=False, content="\n".join(part for part in parts if part), cut=text.cut, lossy=text.lossy)


async def _feed(child: Child, data: bytes) -> None:
    """Write the input; a program need not read it."""
    try:
        child.stdin.write(data)
        await child.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        return
    finally:
        child.stdin.close()


async def _take(output: asyncio.StreamReader, capture: Capture) -> None:
    while data := await output.read(_READ_BYTES):
        capture.feed(data)


async def _tail(output: asyncio.StreamReader) -> str:
    """Return the end of what comes, at most 4 KiB, as clean text."""
    kept = bytearray()
    while data := await output.read(_READ_BYTES):
        kept += data
        del kept[:-_MAX_ERROR_BYTES]
    capture = Capture(4 * _MAX_ERROR_BYTES)  # a byte that is not UTF-8 becomes three
    capture.feed(bytes(kept))
    return capture.finish().text


def _signal(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


# --- the directory --------------------------------------------------------------------------------------------------


def read(directory: Path) -> Listing:
    """Read all manifests.

    Raises:
        ToolError: the directory cannot be used, and why.
    """
    programs: dict[str, tuple[Path, Tool]] = {}
    faults: list[str] = []
    manifests = _manifests(directory)
    if len(manifests) > _MAX_MANIFESTS:
        faults.append(f"{directory}: found {len(manifests)} manifests, allowed: {_MAX_MANIFESTS}")
    for path in manifests[:_MAX_MANIFESTS]:
        try:
            program, tool = _program(path)
            if tool.name in programs:
                raise ToolError(f"{path}: name: found {tool.name!r}, allowed: a name that no other manifest has")
            programs[tool.name] = program, tool
        except ToolError as error:
            faults.append(error.message)
    return Listing(programs, tuple(faults), _without(directory, manifests))


def _without(directory: Path, manifests: list[Path]) -> tuple[Path, ...]:
    """Return the programs that no manifest belongs to."""
    known = {*manifests, *(path.with_suffix("") for path in manifests)}
    with _usable(directory):
        others = [path for path in sorted(directory.iterdir()) if path not in known and path.name[0] != "."]
    return tuple(path for path in others if path.is_file() and os.access(path, os.X_OK))


def _manifests(directory: Path) -> list[Path]:
    with _usable(directory):
        return sorted(path for path in directory.iterdir() if path.suffix == ".toml" and path.name[0] != ".")


def _print(directory: Path) -> _Print:
    """Return what changes when anything in the directory does.

    Raises:
        ToolError: it cannot be used.
    """
    facts = []
    with _usable(directory):
        for path in directory.iterdir():
            with suppress(FileNotFoundError):  # gone meanwhile, or a link to nothing
                status = path.stat()
                facts.append((path.name, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino))
    return tuple(sorted(facts))


@contextmanager
def _usable(directory: Path) -> Iterator[None]:
    try:
        if unsafe := _unsafe(directory):
            raise ToolError(unsafe)
        yield
    except OSError as error:
        raise ToolError(f"{directory}: cannot be read: {error.strerror}") from error


def _program(manifest: Path) -> tuple[Path, Tool]:
    """Return a manifest's program and tool.

    Raises:
        ToolError: file, key, what was found and what is allowed.
    """
    program = manifest.with_suffix("")
    try:
        if not manifest.is_file():
            raise ToolError(f"{manifest}: found no file, allowed: a file")
        if unsafe := _unsafe(manifest):
            raise ToolError(unsafe)
        tool = _manifest(manifest, program.name.partition(".")[0]).tool()
        if wrong := _wrong(tool):
            raise ToolError(f"{manifest}: {wrong}")
        if not program.is_file():
            raise ToolError(f"{manifest}: found no program {program.name} beside it, allowed: a file of that name")
        if unsafe := _unsafe(program):
            raise ToolError(unsafe)
        mode = program.stat().st_mode
    except OSError as error:
        raise ToolError(f"{error.filename or manifest}: cannot be read: {error.strerror}") from error
    if not mode & 0o111:
        raise ToolError(f"{program}: mode: found {_octal(mode)}, allowed: an executable one (chmod +x)")
    return program, tool


def _manifest(path: Path, name: str) -> Manifest:
    if (size := path.stat().st_size) > _MAX_MANIFEST_BYTES:
        raise ToolError(f"{path}: found {size:,} bytes, allowed: {_MAX_MANIFEST_BYTES:,}")
    try:
        values = tomllib.loads(path.read_bytes().decode("utf-8"))
        return Manifest.model_validate({"name": name, **values})
    except UnicodeDecodeError as error:
        raise ToolError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except ValidationError as error:
        raise ToolError(f"{path}: {_explain(error)}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ToolError(f"{path}: not TOML: {error}") from error


def _explain(error: ValidationError) -> str:
    """Return the first fault as `key: found …, allowed: …`; an unknown key goes before the one that it may be for."""
    faults = error.errors(include_url=False)
    first = next((each for each in faults if each["type"] == "extra_forbidden"), faults[0])
    key = ".".join(str(part) for part in first["loc"])
    fields = {known.alias or name: known for name, known in Manifest.model_fields.items()}
    if first["type"] == "extra_forbidden":
        missing = "".join(f"; {each['loc'][0]} is missing" for each in faults if each["type"] == "missing")
        return f"{key}: unknown key, allowed: {', '.join(sorted(fields))}{missing}"
    if first["type"] == "missing":
        return f"{key}: found nothing, allowed: {fields[key].description}"
    return f"{key}: {found_and_allowed(first)}"


def _wrong(tool: Tool) -> str:
    """Return what is wrong with schema and example beyond their being tables; "" if nothing is."""
    from jsonschema.exceptions import SchemaError  # noqa: PLC0415 - they take a third of the daemon's start
    from jsonschema.validators import validator_for  # noqa: PLC0415

    for key, value in (("schema", tool.schema), ("example", tool.example)):
        try:
            canonical(value)
        except (TypeError, ValueError) as error:
            return f"{key}: found a value that JSON has not ({error}), allowed: what JSON has"
    if tool.schema["type"] != "object":
        return f"schema.type: found {tool.schema['type']!r}, allowed: 'object'"
    try:
        validator_for(tool.schema).check_schema(tool.schema)
    except SchemaError as error:
        return f"schema{error.json_path.removeprefix('$')}: found {error.instance!r}, allowed: JSON Schema"
    if tool.example and (why := fault(tool.schema, tool.example)):
        return f"example: found {tool.example!r}, allowed: what fits the schema ({why})"
    return ""


def _unsafe(path: Path) -> str:
    """Return why somebody else could change the file, "" if nobody could.

    Raises:
        OSError: it cannot be looked at.
    """
    status, own = path.stat(), os.geteuid()
    if status.st_uid not in {0, own}:
        return f"{path}: owner: found user {status.st_uid}, allowed: root or user {own}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path}: mode: found {_octal(status.st_mode)}, allowed: writable by its owner alone (chmod go-w)"
    return ""


def _octal(mode: int) -> str:
    return f"{stat.S_IMODE(mode):04o}"
