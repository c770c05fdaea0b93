"""The port `files`: what the model finds, and each call in a thread of its own pool (see the package's docstring)."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from loopd.tools.files.listing import list_directory
from loopd.tools.files.reading import DEFAULT_LINES, read
from loopd.tools.files.roots import MAX_PATH_CHARS, Roots, named
from loopd.tools.files.searching import search
from loopd.tools.files.work import PAGE_BYTES, Work
from loopd.tools.files.writing import write
from loopd.tools.port import Outcome, PortState, Tool

_THREADS = 4
_END_S = 2.0
_LEAST_PAGE_BYTES = 128
_HEAD_BYTES = 600
_MAX_NAME_CHARS = 200

_Tool = Callable[[Work, dict[str, Any]], str]
_TOOLS: dict[str, _Tool] = {"read": read, "list": list_directory, "search": search, "write": write}


class Files:
    """The port `files`.

    Args:
        roots: below which everything happens.
        max_result_bytes: of a result; an answer that is longer would lose its middle.
    """

    name = "files"
    state: PortState = "up"
    reason = ""

    def __init__(self, roots: Roots, max_result_bytes: int) -> None:
        self._roots = roots
        self._page_bytes = min(PAGE_BYTES, max(_LEAST_PAGE_BYTES, max_result_bytes - _HEAD_BYTES))
        self._tools = definitions(roots)
        # Not the event loop's own threads: in those the session logs are written.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="files")
        self._writing = asyncio.Lock()

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools; `write` is one where there is a root to write below."""
        return self._tools

    async def run(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Run one of the tools; cancelled, it has ended when this raises, unless its disk does not answer.

        Raises:
            ToolError: what could not be done, for the model.
        """
        if name != "write":
            return await self._in_thread(_TOOLS[name], arguments)
        async with self._writing:
            return await self._in_thread(write, arguments)

    async def _in_thread(self, tool: _Tool, arguments: dict[str, Any]) -> Outcome:
        work = Work(self._roots, self._page_bytes)
        running = self._threads.submit(tool, work, arguments)
        future = asyncio.wrap_future(running)
        try:
            return Outcome(ok=True, content=await asyncio.shield(future))
        except asyncio.CancelledError:
            work.stop.set()
            running.cancel()
            await asyncio.wait({future}, timeout=_END_S)
            raise
        finally:
            future.add_done_callback(_seen)

    async def keep(self) -> None:
        """Keep the threads until cancelled."""
        try:
            await asyncio.Event().wait()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _seen(future: asyncio.Future[str]) -> None:
    """Take notice of how work ended for which nobody waits any more."""
    if not future.cancelled():
        future.exception()


def definitions(roots: Roots) -> tuple[Tool, ...]:
    """Return the tools for these roots; what they are called and do is worded for find_tool."""
    start = next(iter(roots)).path
    relative = ", or relative to it" if roots.only else ""
    path = {"type": "string", "maxLength": MAX_PATH_CHARS, "description": f"absolute, below {roots}{relative}"}
    tools = [
        Tool(
            "read",
            f"Read a text file below {roots} and show its lines. Opens and prints the contents of a file or document, "
            "a page at a time, or the last lines of a log file.",
            _object(
                "path",
                path=path,
                offset=_integer("first line, from 1; -20 shows the last 20 lines"),
                limit=_integer(f"how many lines, {DEFAULT_LINES} if not said", 1),
            ),
            example={"path": f"{start}/notes.txt"},
        ),
        Tool(
            "list",
            f"List the files and folders in a directory below {roots}. Shows what is in a folder: names, kinds, sizes.",
            _object(path=path, offset=_integer("first entry, from 1", 1)),
            example={"path": start},
        ),
        Tool(
            "search",
            f"Search files below {roots} by name, or for text in them. Finds documents in all folders (find, grep): "
            "the lines that hold a word or phrase, with their numbers.",
            _object(
                path=path,
                name=_string("part of the file's name, or a pattern such as *.txt"),
                text=_string("text as it stands in the files; case does not count"),
            ),
            example={"text": "invoice", "name": "*.txt"},
        ),
    ]
    if roots.writable:
        writable = [root.path for root in roots if root.writable]
        below = named(writable)
        tools.append(
            Tool(
                "write",
                f"Write text to a file below {below}. Creates and saves a new file, replaces the whole content of one, "
                "or appends to its end.",
                _object(
                    "path",
                    "content",
                    path={**path, "description": f"absolute, below {below}{relative}"},
                    content={"type": "string", "description": "the whole new content, or what is appended"},
                    append=_flag("add to the end of the file"),
                    directories=_flag("make directories that are missing"),
                ),
                effect="write",
                example={"path": f"{writable[0]}/notes.txt", "content": "Milk, bread."},
            )
        )
    return tuple(tools)


def _object(*required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _string(description: str) -> dict[str, Any]:
    return {"type": "string", "maxLength": _MAX_NAME_CHARS, "description": description}


def _integer(description: str, minimum: int = -1_000_000_000) -> dict[str, Any]:
    return {"type": "integer", "minimum": minimum, "maximum": 1_000_000_000, "description": description}


def _flag(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}
