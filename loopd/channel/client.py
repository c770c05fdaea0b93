"""The client's side of the channel: connect, send, receive, ask (SPEC 8)."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from loopd.channel.codec import LineDecoder, decode_server, encode
from loopd.channel.socketfile import check_path
from loopd.errors import DaemonError, DaemonUnreachable, FrameTooLarge
from loopd.proto.frames import (
    PROTOCOL_VERSION,
    ClientFrame,
    ErrorFrame,
    Hello,
    RecordFrame,
    Reply,
    ServerFrame,
    Welcome,
)

_READ_BYTES = 65_536
_MAX_FRAME_BYTES = 256 * 1024 * 1024
_GREETING_S = 10.0
_SEND_S = 30.0


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
            with contextlib.suppress(ConnectionError):  # what it said before it left is still to be read
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

    async def ask(
        self,
        frame: ClientFrame,
        on_record: Callable[[RecordFrame], None] = lambda _frame: None,
        on_other: Callable[[ServerFrame], None] = lambda _frame: None,
    ) -> Any:  # noqa: ANN401 - any JSON value
        """Send a request and return what its reply holds; the frames before it go to `on_record` and `on_other`.

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
                case RecordFrame():
                    on_record(answer)
                case _:
                    on_other(answer)
        raise DaemonUnreachable("the daemon closed the connection before it answered", hint="bxctl status")

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
