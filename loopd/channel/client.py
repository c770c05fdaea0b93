"""The client's side of the channel: connect, ask, and a conversation that survives a lost connection (SPEC 8, 9)."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from loopd.channel.codec import LineDecoder, decode_server, encode
from loopd.channel.socketfile import check_path
from loopd.errors import DaemonError, DaemonUnreachable, FrameTooLarge
from loopd.proto.frames import (
    PROTOCOL_VERSION,
    Cancel,
    CaughtUp,
    ClientFrame,
    ErrorFrame,
    Hello,
    Open,
    Opened,
    RecordFrame,
    Reply,
    Say,
    ServerFrame,
    TurnEndFrame,
    Welcome,
)

_READ_BYTES = 65_536
_MAX_FRAME_BYTES = 256 * 1024 * 1024
_GREETING_S = 10.0
_SEND_S = 30.0
RECONNECT_S = 30.0


class ChannelClient:
    """A connection after its greeting. Made by `connect`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = LineDecoder(_MAX_FRAME_BYTES)
        self._frames: list[ServerFrame] = []

    @classmethod
    async def connect(cls, path: Path, *, can_approve: bool = False) -> tuple["ChannelClient", Welcome]:
        """Connect and greet.

        Raises:
            ConfigError: no socket can have this path.
            DaemonUnreachable: nobody answers there, or this user may not connect.
            DaemonError: the daemon refused the greeting (version, number of clients).
        """
        check_path(path)
        try:
            async with asyncio.timeout(_GREETING_S):
                client = cls(*await asyncio.open_unix_connection(path))
                return client, await client._greet(can_approve=can_approve)
        except TimeoutError as error:
            raise DaemonUnreachable(
                f"the daemon on {path} does not answer within {_GREETING_S:g} s", hint="is it stopped or overloaded?"
            ) from error
        except PermissionError as error:
            raise DaemonUnreachable(
                f"this user may not connect to {path}", hint="ask for membership of the socket's group: ls -l shows it"
            ) from error
        except OSError as error:
            raise DaemonUnreachable(
                f"no daemon listens on {path}: {error.strerror or error}", hint="start it: loopd serve"
            ) from error

    async def _greet(self, *, can_approve: bool) -> Welcome:
        try:
            await self.send(Hello(version=PROTOCOL_VERSION, can_approve=can_approve))
            async for frame in self.frames():
                if isinstance(frame, Welcome):
                    return frame
                if isinstance(frame, ErrorFrame):
                    raise DaemonError(frame.code, frame.message, hint=frame.hint)
        except BaseException:
            await self.close()
            raise
        raise ConnectionResetError("it closed the connection")

    async def send(self, frame: ClientFrame) -> None:
        """Send a frame.

        Raises:
            ConnectionError: the daemon is gone, or has not read for 30 s.
        """
        self.post(frame)
        try:
            async with asyncio.timeout(_SEND_S):
                await self._writer.drain()
        except TimeoutError as error:
            raise ConnectionAbortedError("the daemon does not read") from error

    def post(self, frame: ClientFrame) -> None:
        """Send a small frame without waiting; if the daemon is gone, `frames` ends."""
        self._writer.write(encode(frame))

    async def frames(self) -> AsyncGenerator[ServerFrame, None]:
        """Yield the daemon's frames, in order, until it closes the connection. May be begun again where it was left.

        Raises:
            FrameInvalid: a line that is no frame of this protocol.
        """
        while True:
            while self._frames:
                yield self._frames.pop(0)
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError:
                return
            if not data:
                return
            for line in self._decoder.feed(data):
                if isinstance(line, FrameTooLarge):
                    raise line
                self._frames.append(decode_server(line))

    async def ask(self, frame: ClientFrame, on_record: Callable[[RecordFrame], None] | None = None) -> Any:  # noqa: ANN401 - any JSON value
        """Send a request for data and return what its reply holds; the records before it go to `on_record`.

        Raises:
            DaemonError: the daemon's error.
            DaemonUnreachable: the daemon is gone.
        """
        with contextlib.suppress(ConnectionError):  # what it said before it left is still to be read
            await self.send(frame)
        async for answer in self.frames():
            match answer:
                case Reply():
                    return answer.data
                case ErrorFrame():
                    raise DaemonError(answer.code, answer.message, hint=answer.hint)
                case RecordFrame() if on_record:
                    on_record(answer)
                case _:
                    pass
        raise DaemonUnreachable("the daemon closed the connection before it answered", hint="bxctl status")

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class Conversation:
    """One session as a client sees it, over as many connections as it takes.

    What was said is kept until its turn has ended. When the connection is lost, it connects again for up to
    `reconnect_s`, asks for the records that it has not seen, and says what is kept once more under the same key:
    the daemon runs it, joins it or sends its end again, whichever is right (SPEC 8).

    Args:
        path: the channel's socket.
        session: None for a new one.
        start: where history begins at the first connection; 0 for none.
        reconnect_s: how long to try after a loss.
        on_lost: called when the connection is lost, before the first try.
    """

    def __init__(
        self,
        path: Path,
        session: str | None,
        *,
        start: int = 0,
        reconnect_s: float = RECONNECT_S,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = session or ""
        self._path, self._reconnect_s, self._on_lost = path, reconnect_s, on_lost
        self._open = Open(session=session, create=session is not None, start=start, ref="open")
        self._said: Say | None = None
        self._next_line = 1
        self._client: ChannelClient | None = None

    async def frames(self) -> AsyncGenerator[ServerFrame, None]:
        """Connect, open the session, and yield every frame of every connection, `welcome` first each time.

        Raises:
            DaemonUnreachable: nobody answers: at once at the first connection, after `reconnect_s` later.
            DaemonError: the greeting was refused.
        """
        welcome = await self._connect()
        while True:
            assert self._client is not None
            yield welcome
            async for frame in self._client.frames():
                self._note(frame)
                yield frame
            await self._client.close()
            self._on_lost()
            welcome = await self._connect_again()

    async def say(self, text: str, key: str) -> None:
        """Say something; its turn is over when `turn_end` comes with this key, or `error` with it as its `ref`."""
        self._said = Say(session=self.session, text=text, key=key, ref=key)
        await self._send(self._said)

    def cancel(self) -> None:
        """Cancel the turn in flight."""
        if self._client is not None:
            self._client.post(Cancel(session=self.session))

    async def history(self, start: int) -> None:
        """Ask for the records from line `start` on; `opened`, they and `caught_up` follow."""
        await self._send(Open(session=self.session, start=start, ref="open"))

    async def aclose(self) -> None:
        """Leave. A turn in flight goes on."""
        if self._client is not None:
            await self._client.close()

    async def _send(self, frame: ClientFrame) -> None:
        assert self._client is not None
        with contextlib.suppress(ConnectionError):  # `frames` sees the loss too and says again what was said
            await self._client.send(frame)

    def _note(self, frame: ServerFrame) -> None:
        match frame:
            case Opened():
                self.session = frame.session
            case RecordFrame() | CaughtUp():
                self._next_line = max(self._next_line, frame.line + 1)
            case TurnEndFrame() if self._said and frame.key == self._said.key:
                self._said = None
            case ErrorFrame() if self._said and frame.ref == self._said.key:
                self._said = None
            case _:
                pass

    async def _connect(self) -> Welcome:
        self._client, welcome = await ChannelClient.connect(self._path)
        await self._send(self._open)
        return welcome

    async def _connect_again(self) -> Welcome:
        if self.session:
            self._open = Open(session=self.session, start=self._next_line, ref="open")
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(DaemonUnreachable),
            stop=stop_after_delay(self._reconnect_s),
            wait=wait_exponential(multiplier=0.1, max=2),
            reraise=True,
        ):
            with attempt:
                welcome = await self._connect()
        if self._said is not None:
            await self._send(self._said)
        return welcome
