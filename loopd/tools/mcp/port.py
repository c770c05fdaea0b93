"""The port of one MCP server: kept up in the background, its tools known before it is up (SPEC 6).

A server is connected to, its tools are listed, and then it is followed: listed again when it says that the list has
changed, and connected to again when the connection ends. The pause before the next try grows, up to a minute, for as
long as no connection holds for a minute: a server that crashes in a loop costs little.
"""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenacity import AsyncRetrying, RetryCallState, retry_if_result, wait_exponential_jitter

from loopd.clock import monotonic_s
from loopd.config import McpTable
from loopd.errors import ToolError
from loopd.tools.children import Children
from loopd.tools.mcp.lists import Listed, ListFile, offered, server_key, usable
from loopd.tools.port import Outcome, PortState, Tool

if TYPE_CHECKING:
    from loopd.tools.mcp.connection import Connect, Connection

log = logging.getLogger("loopd.mcp")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_STEADY_S = 60.0
_POLL_S = 60.0
_LISTING_PAUSE_S = 0.5
_REASON_S = 2.0


class Ended(ToolError):
    """The connection ended during a call."""


class McpPort:
    """The port of `[tools.mcp.NAME]`.

    Args:
        name: the server's.
        table: its settings.
        lists: the directory of the files that keep lists (`<home>/tool-lists`).
        children: starts the process of a server over stdio.
        max_bytes: of a result.
    """

    def __init__(self, name: str, table: McpTable, *, lists: Path, children: Children, max_bytes: int) -> None:
        self.name = name
        self.state: PortState = "down"
        self.reason = "not started yet"
        self._table, self._children, self._max_bytes = table, children, max_bytes
        self._file = ListFile(lists / f"{name}.json", server_key(table))
        self._listed: tuple[Listed, ...] | None = None
        self._tools: tuple[Tool, ...] = ()
        self._connection: Connection | None = None
        self._explained = asyncio.Event()
        self._said = ""
        self._offer(usable(self._file.load(), lambda _name, _why: None))

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools of the list that was had last, be it by a former daemon."""
        return self._tools

    async def run(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Run a tool. Cancelling it tells the server, and ends at once whatever the server does.

        Raises:
            ToolError: the server is down, went down meanwhile, or gave no answer that is one.
        """
        if self._connection is None:
            raise ToolError(f"{self.name} is down now ({self.reason})")
        try:
            return await self._connection.call(name, arguments, self._max_bytes)
        except Ended as error:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REASON_S):
                    await self._explained.wait()
            why = self.reason or error.message
            raise ToolError(
                f"{self.name} ended in mid-call ({why}); whether the call took effect is unknown"
            ) from error

    async def keep(self) -> None:
        """Keep the server up until cancelled, which ends it."""
        self.reason = "connecting" if self._table.url else "starting: no answer to initialize yet"
        connect = await asyncio.to_thread(_library)
        again = AsyncRetrying(
            retry=retry_if_result(not_),
            wait=wait_exponential_jitter(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S, jitter=_FIRST_PAUSE_S),
            before_sleep=self._say_when,
        )
        while True:
            await again(self._hold_apart, connect)

    async def _hold_apart(self, connect: "Connect") -> bool:
        """Hold one connection in a task of its own.

        The SDK's task groups cancel the task that they are in when something fails, and take a cancel from outside
        that comes at the same moment for their own: here it would be lost, and the daemon would wait for ever.
        """
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._hold(connect))
            await asyncio.wait([task])
        return task.result()

    async def _hold(self, connect: "Connect") -> bool:
        """Hold one connection to its end, and return whether it held for long."""
        steady_s = float("inf")
        try:
            async with connect(self.name, self._table, self._children) as connection:
                if not self._said:
                    self.reason = "connected: no answer to tools/list yet"
                await self._take(await connection.tools())
                steady_s = monotonic_s() + _STEADY_S
                with self._serving(connection):
                    await self._follow(connection)
        except ToolError as error:
            self._explain(error.message)
        return monotonic_s() >= steady_s

    async def _follow(self, connection: "Connection") -> None:
        """List again whenever the list may have changed. A list that cannot be had changes nothing, and is tried again.

        Raises:
            ToolError: the connection has ended.
        """
        late = False
        while not connection.ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S if late or connection.polled else None):
                    await connection.news.wait()
            connection.news.clear()
            if not connection.ended.is_set():
                late = not await self._listed_again(connection)
                with suppress(TimeoutError):  # a server that says so without end is listed twice a second
                    async with asyncio.timeout(_LISTING_PAUSE_S):
                        await connection.ended.wait()
        raise ToolError(connection.why)

    async def _listed_again(self, connection: "Connection") -> bool:
        try:
            await self._take(await connection.tools())
        except ToolError as error:
            log.warning("mcp_not_listed server=%s reason=%r", self.name, error.message)
            return False
        return True

    async def _take(self, listed: tuple[Listed, ...]) -> None:
        """Offer a list, and keep it on disk; a disk that does not take it costs only the next start."""
        if listed == self._listed:
            return
        self._offer(listed)
        log.info("mcp_listed server=%s tools=%d", self.name, len(listed))
        try:
            await asyncio.to_thread(self._file.save, listed)
        except (OSError, ValueError) as error:
            log.warning("mcp_list_not_kept server=%s reason=%r", self.name, str(error))

    def _offer(self, listed: tuple[Listed, ...]) -> None:
        self._listed, self._tools = listed, offered(listed, self._table)

    @contextmanager
    def _serving(self, connection: "Connection") -> Iterator[None]:
        self._explained.clear()
        self._connection, self.state, self.reason = connection, "up", ""
        log.info("mcp_up server=%s", self.name)
        try:
            yield
        finally:
            self._connection, self.state, self.reason = None, "down", connection.why

    def _explain(self, reason: str) -> None:
        """Say why the server is down: once in the log for each reason."""
        if reason != self._said:
            log.warning("mcp_down server=%s reason=%r", self.name, reason)
        self.reason = self._said = reason
        self._explained.set()

    def _say_when(self, state: RetryCallState) -> None:
        log.debug("mcp_next_try server=%s seconds=%.2f", self.name, state.upcoming_sleep)


def _library() -> "Connect":
    """Import the SDK, which takes a second: in a thread, so that the daemon goes on meanwhile."""
    from loopd.tools.mcp.connection import connected  # noqa: PLC0415

    return connected
