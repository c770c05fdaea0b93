"""One client's connection: the greeting, then each of its frames in turn, and the lines that go to it (SPEC 8).

Frames are handled one after another; a turn runs in a task of its own, so none of them waits for a model. Replies and
history go out with back-pressure. The live stream never waits: a client that leaves more than `client_buffer_bytes`
unread is told `slow_consumer` behind what it has not read, and dropped.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from loopd.channel.answers import Answers
from loopd.channel.codec import LineDecoder, decode_client, encode, ref_of
from loopd.channel.live import LiveSession, Peer
from loopd.channel.sessions import Sessions
from loopd.config import ChannelTable
from loopd.errors import (
    ChannelError,
    FrameInvalid,
    FrameTooLarge,
    LoopdError,
    NotPermitted,
    SlowConsumer,
    VersionMismatch,
)
from loopd.proto.frames import (
    PROTOCOL_VERSION,
    Approve,
    Cancel,
    ClientFrame,
    Close,
    Compact,
    ErrorFrame,
    Hello,
    Open,
    Reply,
    Say,
    ServerFrame,
    Welcome,
)
from loopd.proto.ids import check_session_id

logger = logging.getLogger(__name__)

_READ_BYTES = 65_536
_HIGH_WATER_BYTES = 262_144
_LINGER_S = 2.0


class Connection:
    """A client, from its first byte to its last. It is a `Subscriber` of the sessions it opened.

    Args:
        reader, writer: the accepted stream.
        peer: who is there.
        table: `[channel]`.
        sessions: the daemon's sessions.
        answers: what answers the requests for data.
        release: loopd's version, for the welcome.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        peer: Peer,
        table: ChannelTable,
        sessions: Sessions,
        answers: Answers,
        release: str,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._transport = writer.transport
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self._peer, self._table, self._sessions, self._answers = peer, table, sessions, answers
        self._release = release
        self._watched: set[LiveSession] = set()
        self.can_approve = False

    async def run(self) -> None:
        """Serve the client until it leaves, breaks the protocol before its greeting, or is dropped."""
        lines = self._lines()
        try:
            if await self._greet(lines):
                async for line in lines:
                    await self._handle(line)
        except ConnectionError:
            pass  # it left; nothing of the daemon depends on it
        finally:
            self.close()
            await lines.aclose()

    def close(self) -> None:
        """Let go of the sessions and send out what is buffered, for at most two seconds."""
        for live in self._watched:
            live.detach(self)
        self._watched.clear()
        if not self._transport.is_closing():
            self._transport.close()
            asyncio.get_running_loop().call_later(_LINGER_S, self._transport.abort)

    def abort(self) -> None:
        """End the connection at once."""
        self._transport.abort()

    def refuse(self, error: LoopdError) -> None:
        """Tell the client why it is not served and close."""
        self._transport.write(encode(_error(error)))
        self.close()

    def send(self, line: bytes) -> None:
        """Send a line of the live stream (`Subscriber`)."""
        if self._transport.is_closing():
            return
        unread = self._transport.get_write_buffer_size()
        if unread > self._table.client_buffer_bytes:
            logger.warning("slow_consumer uid=%d pid=%d unread_bytes=%d", self._peer.uid, self._peer.pid, unread)
            self.refuse(SlowConsumer(f"{unread} bytes were not read in time", hint="connect again and read on"))
            return
        self._transport.write(line)

    async def deliver(self, line: bytes) -> None:
        """Send a line and wait for room (`Subscriber`)."""
        if self._transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._transport.write(line)
        await self._writer.drain()

    # --- frames -------------------------------------------------------------------------------------------------

    async def _lines(self) -> AsyncGenerator[bytes | FrameTooLarge, None]:
        decoder = LineDecoder(self._table.max_frame_bytes)
        while data := await self._reader.read(_READ_BYTES):
            for line in decoder.feed(data):
                yield line

    async def _greet(self, lines: AsyncIterator[bytes | FrameTooLarge]) -> bool:
        try:
            async with asyncio.timeout(self._table.hello_timeout_s):
                first = await anext(lines, None)
            if first is None:
                return False
            if isinstance(first, FrameTooLarge):
                raise first
            hello = decode_client(first)
            if not isinstance(hello, Hello):
                raise FrameInvalid(f"the first frame must be hello, found {hello.type}")
            if hello.version != PROTOCOL_VERSION:
                raise VersionMismatch(
                    f"the client speaks version {hello.version} of the protocol, loopd {self._release} speaks"
                    f" {PROTOCOL_VERSION}",
                    hint="use the bxctl that came with this loopd",
                )
        except TimeoutError:
            self.refuse(FrameInvalid(f"no hello within {self._table.hello_timeout_s:g} s"))
            return False
        except ChannelError as error:
            self.refuse(error)
            return False
        self.can_approve = hello.can_approve
        welcome = Welcome(version=PROTOCOL_VERSION, release=self._release, uid=self._peer.uid, ref=hello.ref)
        await self.deliver(encode(welcome))
        return True

    async def _handle(self, line: bytes | FrameTooLarge) -> None:
        """Answer one frame. Whatever goes wrong with it is an `error` frame; the connection lives on."""
        frame: ClientFrame | None = None
        try:
            if isinstance(line, FrameTooLarge):
                raise line
            frame = decode_client(line)
            await self._act(frame)
        except LoopdError as error:
            ref = frame.ref if frame else ref_of(line) if isinstance(line, bytes) else None
            await self._deliver(_error(error, session=getattr(frame, "session", None), ref=ref))
        except ConnectionError:
            raise
        except Exception:
            logger.exception("frame_failed type=%s", frame.type if frame else None)
            internal = LoopdError("an internal error; the daemon's log has its trace")
            await self._deliver(
                _error(internal, session=getattr(frame, "session", None), ref=frame.ref if frame else None)
            )

    async def _act(self, frame: ClientFrame) -> None:
        match frame:
            case Hello():
                raise FrameInvalid("hello was said already")
            case Open():
                await self._open(frame)
            case Say():
                await self._watching(frame.session).say(self, frame)
            case Compact():
                await self._watching(frame.session).compact(self, frame, self._peer)
            case Cancel():
                cancelled = await self._sessions.cancel(frame.session)
                await self._deliver(Reply(to="cancel", data={"cancelled": cancelled}, ref=frame.ref))
            case Approve():
                if not self.can_approve:
                    raise NotPermitted("this client has not said can_approve in its hello")
                await self._sessions.approve(frame, self._peer)
                data = {"call": frame.call, "decision": frame.decision}
                await self._deliver(Reply(to="approve", data=data, ref=frame.ref))
            case Close():
                live = self._watching(frame.session)
                self._watched.discard(live)
                live.detach(self)
                await self._deliver(Reply(to="close", data=None, ref=frame.ref))
            case _:
                async for answer in self._answers.to(frame, self._peer):
                    await self._deliver(answer)

    async def _open(self, frame: Open) -> None:
        live, created = await self._sessions.open(self, frame, self._peer)
        self._watched.add(live)
        try:
            await live.attach(self, frame.start, epoch=frame.epoch, created=created, ref=frame.ref)
        except LoopdError:
            self._watched.discard(live)
            live.detach(self)
            raise

    def _watching(self, session_id: str) -> LiveSession:
        live = self._sessions.find(check_session_id(session_id))
        if live is None or live not in self._watched:
            raise FrameInvalid(f"session {session_id} is not open on this connection", hint="send open first")
        return live

    async def _deliver(self, frame: ServerFrame) -> None:
        await self.deliver(encode(frame))


def _error(error: LoopdError, *, session: str | None = None, ref: str | None = None) -> ErrorFrame:
    return ErrorFrame(session=session, code=error.code, message=error.message, hint=error.hint, ref=ref)
