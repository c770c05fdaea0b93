"""The streamable HTTP transport: the SDK's, with bounds on sizes and times (SPEC 6).

https://modelcontextprotocol.io/specification/2025-11-25/basic/transports#streamable-http
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectSendStream
from mcp.client.streamable_http import MCP_SESSION_ID, streamable_http_client
from mcp.shared.message import SessionMessage

from loopd.config import McpTable
from loopd.tools.mcp.secrets import read_secrets
from loopd.tools.mcp.stdio import MAX_MESSAGE_BYTES, QUEUED_MESSAGES

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams, WriteStream

_SILENCE_S = 3600.0
_FAREWELL_S = 1.0


class WebServer:
    """One connection to a server that somebody else runs.

    Args:
        table: `[tools.mcp.NAME]` with a URL.

    Attributes:
        polled: nobody may tell when such a server has gone or its list has changed, so it is asked from time to time.
        secrets: values that must not be shown.
    """

    polled = True

    def __init__(self, table: McpTable) -> None:
        self._table = table
        self._session = ""
        self._refused = ""
        self.secrets: tuple[str, ...] = ()

    @asynccontextmanager
    async def streams(self) -> AsyncIterator["TransportStreams"]:
        """Yield what the SDK's session talks to; nothing is sent yet.

        Raises:
            ToolError: a secret cannot be read.
        """
        headers = await asyncio.to_thread(read_secrets, self._table.header_files)
        self.secrets = tuple(headers.values())
        # Every step and call has its own deadline; a stream on which the server speaks may be silent for long.
        timeout = httpx2.Timeout(self._table.connect_timeout_s, read=_SILENCE_S)
        async with httpx2.AsyncClient(
            headers={"accept-encoding": "identity", **headers},
            timeout=timeout,
            event_hooks={"response": [self._answered]},
        ) as client:
            try:
                async with (
                    streamable_http_client(
                        self._table.url,
                        http_client=client,
                        terminate_on_close=False,
                        max_sse_event_size=MAX_MESSAGE_BYTES,
                    ) as (incoming, sending),
                    _queued(sending) as outgoing,
                ):
                    yield incoming, outgoing
            finally:
                await self._farewell(client)

    def last_words(self) -> str:
        """Return how it refused, if it did, and where it is, without what may be secret in its URL."""
        url = httpx2.URL(self._table.url).copy_with(userinfo=b"", query=None, fragment=None)
        return "; ".join(part for part in (self._refused, str(url)) if part)

    async def _answered(self, response: httpx2.Response) -> None:
        """Remember what the server said beside the body, which is bounded here if it is no stream of events."""
        if response.request.method == "POST":
            self._refused = f"HTTP {response.status_code} {response.reason_phrase}" if response.is_error else ""
        self._session = response.headers.get(MCP_SESSION_ID, self._session)
        if "text/event-stream" not in response.headers.get("content-type", ""):
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Bounded(response.stream)

    async def _farewell(self, client: httpx2.AsyncClient) -> None:
        """Tell the server that its session has ended; one that does not answer is left alone."""
        if self._session:
            with suppress(httpx2.HTTPError), anyio.move_on_after(_FAREWELL_S, shield=True):
                await client.delete(self._table.url, headers={MCP_SESSION_ID: self._session})


@asynccontextmanager
async def _queued(
    sending: "WriteStream[SessionMessage]",
) -> AsyncIterator[MemoryObjectSendStream[SessionMessage]]:
    """Yield a stream that takes messages at once, and sends them one by one."""
    outgoing, queue = anyio.create_memory_object_stream[SessionMessage](QUEUED_MESSAGES)

    async def send() -> None:
        async for message in queue:
            await sending.send(message)

    async with outgoing, queue, asyncio.TaskGroup() as group:
        task = group.create_task(send())
        try:
            yield outgoing
        finally:
            task.cancel()


class _Bounded(httpx2.AsyncByteStream):
    """A body of which no more than one message's size is read."""

    def __init__(self, stream: httpx2.AsyncByteStream) -> None:
        self._stream = stream

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size_bytes = 0
        async for chunk in self._stream:
            size_bytes += len(chunk)
            if size_bytes > MAX_MESSAGE_BYTES:
                raise httpx2.StreamError(f"the answer is longer than {MAX_MESSAGE_BYTES} bytes")
            yield chunk

    async def aclose(self) -> None:
        await self._stream.aclose()
