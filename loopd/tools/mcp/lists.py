"""The list of an MCP server's tools, and the file that keeps it (SPEC 6).

`<home>/tool-lists/<server>.json` answers find_tool before the server is up, and while it is down. It is a cache: it may
be deleted at any time, and one that is torn, altered or of another server under the same name is not there.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from loopd.config import Effect, McpTable
from loopd.proto.canonical import canonical, sha256
from loopd.tools.port import Tool

MAX_TOOLS = 10_000
_MAX_NAME_CHARS = 200
_MAX_TOOL_CHARS = 262_144


class Listed(BaseModel):
    """One tool as its server describes it. `read_only` is the server's own word for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    description: str = ""
    input_schema: dict[str, Any]
    read_only: bool = False

    def fault(self) -> str:
        """Return why this tool cannot be offered, '' if it can."""
        if not self.name or len(self.name) > _MAX_NAME_CHARS or not self.name.isprintable():
            return f"its name is not 1 to {_MAX_NAME_CHARS} printable characters"
        if len(self.description) + len(str(self.input_schema)) > _MAX_TOOL_CHARS:
            return f"its description and schema are longer than {_MAX_TOOL_CHARS} characters"
        return ""


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    server: str
    tools: tuple[Listed, ...]


class ListFile:
    """The file of one server. Everything here blocks.

    Args:
        path: the file.
        server: what the list was got from; a file that names another server is not used.
    """

    def __init__(self, path: Path, server: str) -> None:
        self._path, self._server = path, server
        self._saved: tuple[Listed, ...] | None = None

    def load(self) -> tuple[Listed, ...]:
        """Return the tools that the server last had, none where that is not known."""
        with contextlib.suppress(OSError, ValidationError):
            kept = _Kept.model_validate_json(self._path.read_bytes())
            if kept.server == self._server:
                self._saved = kept.tools
                return kept.tools
        return ()

    def save(self, tools: tuple[Listed, ...]) -> None:
        """Put the list in the place of the one before, whole or not at all; one that has not changed is not written.

        Raises:
            OSError: the disk.
        """
        if tools == self._saved:
            return
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = _Kept(server=self._server, tools=tools).model_dump_json().encode()
        with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=f".{self._path.stem}-", delete=False) as file:
            place = Path(file.name)
            try:
                file.write(data)
                file.flush()
                place.replace(self._path)
            except OSError:
                place.unlink(missing_ok=True)
                raise
        self._saved = tools


def server_key(table: McpTable) -> str:
    """Return what tells one server from another that is configured under the same name later."""
    return sha256(canonical([table.command, table.url, table.directory]))


def usable(listed: Iterable[Listed], dropped: Callable[[str, str], None]) -> tuple[Listed, ...]:
    """Return the tools that can be offered, each name once.

    Args:
        listed: the list; of two tools with one name the first counts.
        dropped: is told name and reason of each that is left out.
    """
    kept: dict[str, Listed] = {}
    for tool in listed:
        fault = "its name is there twice" if tool.name in kept else tool.fault()
        fault = fault or (f"only the first {MAX_TOOLS} are taken" if len(kept) >= MAX_TOOLS else "")
        if fault:
            dropped(tool.name, fault)
        else:
            kept[tool.name] = tool
    return tuple(kept.values())


def offered(listed: Iterable[Listed], table: McpTable) -> tuple[Tool, ...]:
    """Return the tools as their port lists them: with the effect that is configured, and the deadline of a call."""
    return tuple(
        Tool(
            name=tool.name,
            description=tool.description,
            schema=tool.input_schema,
            effect=_effect(tool, table.effects),
            timeout_s=table.call_timeout_s,
        )
        for tool in listed
    )


def _effect(tool: Listed, effects: Mapping[str, Effect]) -> Effect:
    """Return the effect of the first glob that names the tool, else what the server says of it, else write."""
    configured = (effect for glob, effect in effects.items() if fnmatchcase(tool.name, glob))
    return next(configured, "read" if tool.read_only else "write")
