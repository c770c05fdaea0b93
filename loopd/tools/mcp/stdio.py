"""The stdio transport: an MCP server as a child process, newline-delimited JSON-RPC on its stdin and stdout (SPEC 6).

Tolerant where servers are careless: lines that are no message are skipped, bytes that are not UTF-8 and lone
surrogates are replaced, a message that is too long or broken fails the one call that it answers. A line that is eight
times too long and has no end yet ends the connection. What the server writes to stderr is read all the time, and its
end kept: "connection closed" alone gives no reason.

https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#stdio
"""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, JSONRPCMessage, jsonrpc_message_adapter
from pydantic import ValidationError

from loopd.config import McpTable
from loopd.errors import ToolError
from loopd.tools.children import Child, Children
from loopd.tools.mcp.secrets import hidden, read_secrets

log = logging.getLogger("loopd.mcp")

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
MAX_LINE_BYTES = 8 * MAX_MESSAGE_BYTES
QUEUED_MESSAGES = 64
"""What may wait to be sent: a call that is cancelled says so without waiting for a server that does not listen."""
_CHUNK_BYTES = 65_536
_EDGE_BYTES = 512
_GAP = b"\0"
_TAIL_BYTES = 4096
_SHOWN_CHARS, _SHOWN_LINES = 300, 3
_NO_JSON_CHARS = 100
_LAST_WORDS_S = 1.0
_FAREWELL_S = 0.5
# The id as the two SDKs place it: at the very beginning of an answer, or at its very end.
_ID_FIRST = re.compile(rb'^\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d+)\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*(\d+)\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]


class StdioServer:
    """One run of one server.

    Args:
        name: the port's.
        table: `[tools.mcp.NAME]` with a command.
        children: starts the process.

    Attributes:
        polled: a server whose list changes says so.
        secrets: values that must not be shown.
    """

    polled = False

    def __init__(self, name: str, table: McpTable, children: Children) -> None:
        self._name, self._table, self._children = name, table, children
        self.secrets: tuple[str, ...] = ()
        self._exit = self._flooded = ""
        self._tail = bytearray()
        self._skipped, self._no_json, self._spoken = 0, b"", False

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[Streams]:
        """Start the process and yield what the SDK's session talks to; behind it the whole process tree is gone.

        Raises:
            ToolError: a secret cannot be read, or the process cannot be started.
        """
        secret = await asyncio.to_thread(read_secrets, self._table.env_files)
        self.secrets = tuple(secret.values())
        child = await self._children.start(
            self._table.command, env={**self._table.env, **secret}, directory=self._table.directory
        )
        try:
            async with self._talking(child) as streams:
                yield streams
        finally:
            await _farewell(child)

    def last_words(self) -> str:
        """Return in one line what cut it off or how it ended by itself, and what else tells why.

        That is the end of what it wrote to stderr, and the first that it wrote to stdout if no message ever came.
        """
        lines = [line.strip() for line in self._tail.decode("utf-8", "replace").splitlines()]
        telling = [line for line in lines if any(map(str.isalnum, line))]
        shown = self._showable(" | ".join(telling[-_SHOWN_LINES:]))[-_SHOWN_CHARS:]
        no_json = "" if self._spoken else self._showable(self._no_json.decode("utf-8", "replace"))[:_NO_JSON_CHARS]
        parts = (
            self._flooded,
            self._exit,
            f"it writes what is no JSON: {no_json}" if no_json else "",
            f"stderr: {shown}" if shown else "",
        )
        return "; ".join(part for part in parts if part)

    def _showable(self, text: str) -> str:
        return "".join(char if char.isprintable() else " " for char in hidden(text, self.secrets)).strip()

    @asynccontextmanager
    async def _talking(self, child: Child) -> AsyncIterator[Streams]:
        heard, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, sent = anyio.create_memory_object_stream[SessionMessage](QUEUED_MESSAGES)
        async with heard, incoming, outgoing, sent, asyncio.TaskGroup() as group:
            listening = group.create_task(self._listen(child, heard))
            tasks = [
                listening,
                group.create_task(self._speak(child, sent, heard)),
                group.create_task(self._keep_tail(child)),
            ]
            try:
                yield incoming, outgoing
            finally:
                if listening.done() and not self._flooded:
                    await self._hear_last_words(child, tasks[-1])
                for task in tasks:
                    task.cancel()

    async def _listen(self, child: Child, heard: MemoryObjectSendStream[SessionMessage | Exception]) -> None:
        """Pass on every message; the end of stdout is the end of the connection, and so is a line without end."""
        lines = Lines(MAX_MESSAGE_BYTES)
        async with heard:
            with suppress(ConnectionError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                while data := await child.stdout.read(_CHUNK_BYTES):
                    for line in lines.feed(data):
                        if (message := parsed(line)) is not None:
                            self._spoken = True
                            await heard.send(SessionMessage(message))
                        elif line.strip():
                            self._skip(line)
                    if lines.begun_bytes > MAX_LINE_BYTES:
                        self._flooded = (
                            f"it wrote more than {MAX_LINE_BYTES} bytes without the end of a line; "
                            f"a message may have {MAX_MESSAGE_BYTES}"
                        )
                        return

    async def _speak(
        self,
        child: Child,
        sent: MemoryObjectReceiveStream[SessionMessage],
        heard: MemoryObjectSendStream[SessionMessage | Exception],
    ) -> None:
        """Write every message; a server that closed its stdin can be told nothing more, so the connection ends."""
        with suppress(ConnectionError):
            async for item in sent:
                text = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                child.stdin.write(text.encode() + b"\n")
                await child.stdin.drain()
        await heard.aclose()

    async def _keep_tail(self, child: Child) -> None:
        with suppress(ConnectionError):
            while data := await child.stderr.read(_CHUNK_BYTES):
                self._tail += data
                del self._tail[:-_TAIL_BYTES]

    async def _hear_last_words(self, child: Child, tail: asyncio.Task[None]) -> None:
        """Give a process that closed its stdout a moment to end and to have said why."""
        with suppress(TimeoutError, ToolError):
            async with asyncio.timeout(_LAST_WORDS_S):
                status = await child.wait()
                self._exit = f"signal {-status}" if status < 0 else f"exit status {status}"
                await asyncio.wait([tail])

    def _skip(self, line: bytes | bytearray) -> None:
        """Say once that there is text on stdout, and not what: it may be anything."""
        if not self._skipped:
            self._no_json = bytes(line[:_TAIL_BYTES])
            log.info("mcp_no_message server=%s bytes=%d", self._name, len(line))
        self._skipped += 1


async def _farewell(child: Child) -> None:
    """End the process as the specification asks: its stdin is closed first, so that it may end by itself."""
    try:
        child.stdin.close()
        with suppress(TimeoutError, ToolError):
            async with asyncio.timeout(_FAREWELL_S):
                await child.wait()
    finally:
        await child.close()


class Lines:
    """Splits bytes into lines. Of one longer than `max_bytes` head and tail are kept, and a NUL that is in no JSON.

    Attributes:
        begun_bytes: how long the line is that has no end yet.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._line = bytearray()
        self._head = b""
        self.begun_bytes = 0

    def feed(self, data: bytes) -> list[bytes | bytearray]:
        """Take the next bytes and return the lines that they end."""
        *ended, rest = data.split(b"\n")
        found: list[bytes | bytearray] = []
        for part in ended:
            self._take(part)
            found.append(self._head + self._line if self._head else self._line)
            self._line, self._head, self.begun_bytes = bytearray(), b"", 0
        self._take(rest)
        return found

    def _take(self, part: bytes) -> None:
        self._line += part
        self.begun_bytes += len(part)
        if self._head:
            del self._line[:-_EDGE_BYTES]
        elif len(self._line) > self._max_bytes:
            self._head = bytes(self._line[:_EDGE_BYTES]) + _GAP
            del self._line[:-_EDGE_BYTES]


def parsed(line: bytes | bytearray) -> JSONRPCMessage | None:
    """Return the message of a line. None if it is none; one that answers a request and is broken becomes an error."""
    with suppress(ValidationError):
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    with suppress(ValueError, RecursionError):
        value = _cleaned(json.loads(line.decode("utf-8", "replace")))
        with suppress(ValidationError):
            return jsonrpc_message_adapter.validate_python(value, by_name=False)
        if isinstance(value, dict) and {"jsonrpc", "result", "error"} & value.keys():
            return _broken(value.get("id"), "the answer is no JSON-RPC message")
        return None
    found = _ID_FIRST.search(line[:_EDGE_BYTES]) or _ID_LAST.search(line[-_EDGE_BYTES:])
    return _broken(int(found[1]), "the answer is broken, or longer than a message may be") if found else None


def _broken(request_id: Any, why: str) -> JSONRPCError | None:  # noqa: ANN401 - any JSON value
    if not isinstance(request_id, int):
        return None
    return JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=PARSE_ERROR, message=why))


def _cleaned(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value with lone surrogates replaced, in keys too."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if isinstance(value, list):
        return [_cleaned(part) for part in value]
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(part) for key, part in value.items()}
    return value
