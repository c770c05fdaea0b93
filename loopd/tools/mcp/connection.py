"""One connection to an MCP server, by the official SDK: the handshake, the list of tools, a call (SPEC 6).

Each step has a deadline. What goes wrong is a `ToolError` that names the step.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus
from mcp.client.session import ClientSession, IncomingMessage
from mcp.shared.dispatcher import CallOptions, OnNotify, OnNotifyIntercept, OnRequest
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    CONNECTION_CLOSED,
    METHOD_NOT_FOUND,
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolRequest,
    CallToolRequestParams,
    CallToolResult,
    EmptyResult,
    Implementation,
    ListToolsResult,
    PaginatedRequestParams,
    PingRequest,
    RequestId,
    Tool,
    ToolListChangedNotification,
)
from mcp_types.methods import validate_server_result
from pydantic import ValidationError

from loopd import __version__
from loopd.clock import monotonic_s
from loopd.config import McpTable
from loopd.errors import ToolError
from loopd.tools.children import Children
from loopd.tools.mcp.lists import MAX_TOOLS, Listed, usable
from loopd.tools.mcp.port import Ended
from loopd.tools.mcp.results import outcome
from loopd.tools.mcp.secrets import hidden
from loopd.tools.mcp.stdio import StdioServer
from loopd.tools.mcp.web import WebServer
from loopd.tools.port import Outcome

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

log = logging.getLogger("loopd.mcp")
# The SDK logs what it cannot parse, with the text: that is a tool's output, which no log of ours holds.
for _name in ("client", "mcp", "httpx2", "httpcore2"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

_MAX_PAGES = 200
_SESSION_LOST = "Session terminated"
_SHOWN_CHARS = 300
_ANY_VERSION = "2025-11-25"
_PING_S = 5.0


class _Server(Protocol):
    """What the two transports have in common."""

    polled: bool
    secrets: tuple[str, ...]

    def streams(self) -> "AbstractAsyncContextManager[TransportStreams]": ...

    def last_words(self) -> str: ...


class Connection:
    """A connection that has been initialized.

    Attributes:
        polled: the server is not sure to say when its list has changed.
        ended: set when nothing can be asked any more.
        news: set when the list may have changed, and when the connection has ended.
        why: it ended.
    """

    def __init__(self, name: str, table: McpTable, *, polled: bool) -> None:
        self._name, self._table, self.polled = name, table, polled
        self.ended, self.news = asyncio.Event(), asyncio.Event()
        self.why = "the connection ended"
        self._doubted, self._doubt = asyncio.Event(), ""
        self._session: ClientSession

    @asynccontextmanager
    async def over(self, streams: "TransportStreams") -> AsyncIterator[None]:
        """Shake hands on a pair of streams, and be connected for the time of a block.

        Raises:
            ToolError: the server does not answer in time, refuses, or does not speak the protocol.
        """
        info = Implementation(name="loopd", version=__version__)
        dispatcher = _Dispatcher(streams, dropped=self._dropped, ended=self.end)
        async with ClientSession(dispatcher=dispatcher, message_handler=self._heard, client_info=info) as session:
            self._session = session
            async with _step("initialize", self._table.connect_timeout_s):
                await _shake_hands(session)
            dispatcher.version = session.protocol_version or _ANY_VERSION
            self.polled = self.polled or session.discover_result is not None
            async with asyncio.TaskGroup() as group:
                pinging = group.create_task(self._ping_where_doubted())
                try:
                    yield
                finally:
                    pinging.cancel()

    async def tools(self) -> tuple[Listed, ...]:
        """Return the server's tools; one that is not as it should be is left out, and the log says which and why.

        Raises:
            ToolError: the list could not be had, which is another thing than an empty one.
        """
        found: list[Tool] = []
        async with _step("tools/list", self._table.connect_timeout_s):
            page = await self._page(None)
            found += page.tools
            cursors: set[str] = set()
            while cursor := page.next_cursor:
                if cursor in cursors or len(cursors) == _MAX_PAGES or len(found) > MAX_TOOLS:
                    log.warning("mcp_list_cut server=%s tools=%d pages=%d", self._name, len(found), len(cursors) + 1)
                    break
                cursors.add(cursor)
                page = await self._page(PaginatedRequestParams(cursor=cursor))
                found += page.tools
        return usable(map(_listed, found), self._dropped)

    async def call(self, name: str, arguments: Mapping[str, Any], max_bytes: int) -> Outcome:
        """Run a tool and return at most `max_bytes`. Cancelling it tells the server, and ends at once.

        A server that has not answered by then is pinged, and the connection ends where it does not answer that either.

        Raises:
            Ended: the connection ended meanwhile, so nobody knows what the call did.
            ToolError: the answer is none.
        """
        request = CallToolRequest(params=CallToolRequestParams(name=name, arguments=dict(arguments)))
        try:
            request.model_dump_json()
        except ValueError as error:  # where it is sent it would cost the connection
            raise ToolError(f"these arguments cannot be sent: {error}") from error
        began_s = monotonic_s()
        try:
            return outcome(await self._session.send_request(request, CallToolResult), max_bytes)
        except asyncio.CancelledError:
            self._doubt = f"{name} took longer than {round(monotonic_s() - began_s, 1):g} s"
            self._doubted.set()
            raise
        except MCPError as error:
            if error.message == _SESSION_LOST:
                self.end()
                raise ToolError(f"{self._name} has restarted and did not run it; call again in a moment") from error
            if error.code == CONNECTION_CLOSED:
                raise Ended(error.message) from error
            return Outcome(ok=False, content=error.message)
        except ValidationError as error:
            raise ToolError(f"{self._name} answered with what is no result of a tool: {_first(error)}") from error

    def end(self, why: str = "") -> None:
        """Count the connection as ended; the first reason is the one that is kept."""
        if why and not self.ended.is_set():
            self.why = why
        self.ended.set()
        self.news.set()

    async def _ping_where_doubted(self) -> None:
        """Ping the server whenever a call was given up; one that hangs would hang for ever."""
        while not self.ended.is_set():
            await self._doubted.wait()
            self._doubted.clear()
            doubt = self._doubt
            try:
                async with asyncio.timeout(_PING_S):
                    await self._ping()
            except TimeoutError:
                self.end(f"did not answer a ping after {doubt}")
            except (MCPError, ValidationError) as error:  # an answer too, whatever it says
                if isinstance(error, MCPError) and (error.code == CONNECTION_CLOSED or error.message == _SESSION_LOST):
                    self.end()

    async def _ping(self) -> None:
        """Ask for what costs the server nothing; the protocol's newer era has no ping."""
        if self._session.discover_result is None:
            await self._session.send_request(PingRequest(), EmptyResult)
        else:
            await self._session.send_discover(self._session.protocol_version or _ANY_VERSION)

    async def _page(self, params: PaginatedRequestParams | None) -> ListToolsResult:
        try:
            return await self._session.list_tools(params=params)
        except MCPError as error:
            capabilities = self._session.server_capabilities
            if error.code == METHOD_NOT_FOUND and (capabilities is None or capabilities.tools is None):
                return ListToolsResult(tools=[])
            if error.message == _SESSION_LOST:
                self.end()
            raise

    async def _heard(self, message: IncomingMessage) -> None:
        if isinstance(message, ToolListChangedNotification):
            self.news.set()

    def _dropped(self, name: str, why: str) -> None:
        log.warning("mcp_tool_dropped server=%s tool=%.200r reason=%r", self._name, name, why)


@asynccontextmanager
async def connected(name: str, table: McpTable, children: Children) -> AsyncIterator[Connection]:
    """Connect to the server for the time of a block.

    Raises:
        ToolError: it cannot be had, or what happened behind the block's back. In one line, with the end of what the
            server wrote to stderr; no secret is in it.
    """
    server: _Server = WebServer(table) if table.url else StdioServer(name, table, children)
    try:
        async with server.streams() as streams:
            connection = Connection(name, table, polled=server.polled)
            async with connection.over(streams):
                try:
                    yield connection
                finally:
                    connection.end()
    except Exception as error:  # the SDK's tasks may fail in any way, and in groups
        cause = _cause(error)
        said = cause.message if isinstance(cause, ToolError) else f"{type(cause).__name__}: {cause}"
        shown = " ".join(hidden(said, server.secrets).split())[:_SHOWN_CHARS]
        raise ToolError("; ".join(part for part in (shown, server.last_words()) if part)) from error


Connect = Callable[[str, McpTable, Children], AbstractAsyncContextManager[Connection]]
"""The type of `connected`."""


class _Dispatcher(JSONRPCDispatcher[TransportContext]):
    """The SDK's, which also says when it ends, and leaves tools out of a list for which the SDK would refuse all of it.

    Attributes:
        version: of the protocol, as agreed.
    """

    def __init__(
        self, streams: "TransportStreams", *, dropped: Callable[[str, str], None], ended: Callable[[], None]
    ) -> None:
        super().__init__(*streams)
        self.version = _ANY_VERSION
        self._dropped, self._ended = dropped, ended

    async def run(
        self,
        on_request: OnRequest,
        on_notify: OnNotify,
        on_notify_intercept: OnNotifyIntercept | None = None,
        *,
        task_status: TaskStatus[None] = TASK_STATUS_IGNORED,
    ) -> None:
        try:
            await super().run(on_request, on_notify, on_notify_intercept, task_status=task_status)
        finally:
            self._ended()

    async def send_raw_request(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        opts: CallOptions | None = None,
        *,
        _related_request_id: RequestId | None = None,
    ) -> dict[str, Any]:
        raw = await super().send_raw_request(method, params, opts, _related_request_id=_related_request_id)
        if method == "tools/list":
            self._leave_out_bad(raw)
        return raw

    def _leave_out_bad(self, page: dict[str, Any]) -> None:
        """Leave out the tools that are not as they should be; a page that is wrong without them stays as it is."""
        tools = page.get("tools")
        if isinstance(tools, list) and self._fault(page) and not self._fault({**page, "tools": []}):
            page["tools"] = [tool for tool in tools if not self._drops(page, tool)]

    def _fault(self, page: Mapping[str, Any]) -> str:
        """Return why the SDK would refuse a page, '' if it would not."""
        try:
            validate_server_result("tools/list", self.version, page)
            ListToolsResult.model_validate(page, by_name=False)
        except ValidationError as error:
            return _first(error)
        return ""

    def _drops(self, page: Mapping[str, Any], tool: Any) -> bool:  # noqa: ANN401 - any JSON value
        fault = self._fault({**page, "tools": [tool]})
        if fault:
            name = tool.get("name") if isinstance(tool, dict) else None
            self._dropped(str(name), fault)
        return bool(fault)


async def _shake_hands(session: ClientSession) -> None:
    """Initialize; a server of the protocol's newer era, which knows no such request, is asked in the way of that era.

    The old way comes first: there are servers that take anything before `initialize` amiss.
    """
    try:
        await session.initialize()
    except MCPError as error:
        if error.code not in {METHOD_NOT_FOUND, UNSUPPORTED_PROTOCOL_VERSION}:
            raise
        await session.discover()


@asynccontextmanager
async def _step(name: str, timeout_s: float) -> AsyncIterator[None]:
    """Bound the time of a step, and say in its name what goes wrong in it."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise ToolError(f"no answer to {name} within {timeout_s:g} s") from error
    except MCPError as error:
        raise ToolError(f"{name}: {error.message}") from error
    except ValidationError as error:
        raise ToolError(f"{name}: the answer is not as the protocol says: {_first(error)}") from error
    except RuntimeError as error:
        raise ToolError(f"{name}: {error}") from error


def _listed(tool: Tool) -> Listed:
    hints = tool.annotations
    return Listed(
        name=tool.name,
        description=tool.description or tool.title or (hints.title if hints else None) or "",
        input_schema=tool.input_schema,
        read_only=bool(hints and hints.read_only_hint),
    )


def _first(error: ValidationError) -> str:
    """Return the first fault of many, without the value that was found: it may be long."""
    fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"


def _cause(error: Exception) -> Exception:
    """Return what a group of exceptions is about: our own word where there is one, else the first that went wrong."""
    if not isinstance(error, ExceptionGroup):
        return error
    causes = [_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, ToolError)), causes[0])
