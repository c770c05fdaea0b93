"""A conversation as a client has it: one session, over as many connections as it takes (SPEC 8, 9)."""

import contextlib
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_exponential

from loopd.channel.client import ChannelClient
from loopd.errors import DaemonUnreachable
from loopd.proto.frames import (
    Approve,
    Cancel,
    CaughtUp,
    Choice,
    ClientFrame,
    ErrorFrame,
    Open,
    Opened,
    RecordFrame,
    Say,
    ServerFrame,
    TurnEndFrame,
    Welcome,
)

RECONNECT_S = 30.0


class Conversation:
    """One session as a client sees it, over as many connections as it takes.

    What was said is kept until its turn has ended. When the connection is lost, it connects again for up to
    `reconnect_s`, asks for the records that it has not seen, and says what is kept once more under the same key:
    the daemon runs it, joins it or sends its end again, whichever is right (SPEC 8).

    Args:
        path: the channel's socket.
        session: None for a new one.
        start: where history begins at the first connection; 0 for none.
        can_approve: approval requests are shown to a person; `approve` answers them.
        reconnect_s: how long to try after a loss.
        on_lost: called when the connection is lost, before the first try.
    """

    def __init__(
        self,
        path: Path,
        session: str | None,
        *,
        start: int = 0,
        can_approve: bool = False,
        reconnect_s: float = RECONNECT_S,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.session = session or ""
        self.on_lost = on_lost
        self._path, self._reconnect_s, self._can_approve = path, reconnect_s, can_approve
        self._open = Open(session=session, create=session is not None, start=start, ref="open")
        self._said: Say | None = None
        self._epoch: int | None = None
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
            self.on_lost()
            welcome = await self._connect_again()

    async def say(self, text: str, key: str) -> None:
        """Say something; its turn is over when `turn_end` comes with this key, or `error` with it as its `ref`."""
        self._said = Say(session=self.session, text=text, key=key, ref=key)
        await self._send(self._said)

    def approve(self, call: int, decision: Choice) -> None:
        """Answer an approval request; `approval_decided` follows, with this answer or a quicker one."""
        if self._client is not None:
            self._client.post(Approve(session=self.session, call=call, decision=decision))

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
                self._epoch = frame.epoch if self._epoch is None else self._epoch
                self._go_on_from(self._epoch, self._next_line)
            case RecordFrame() if self._epoch is None or frame.epoch >= self._epoch:
                known = self._next_line if frame.epoch == self._epoch else 1
                self._go_on_from(frame.epoch, max(known, frame.line + 1))
            case CaughtUp():
                self._go_on_from(self._epoch, max(self._next_line, frame.line + 1))
            case TurnEndFrame() if self._said and frame.key == self._said.key:
                self._said = None
            case ErrorFrame() if self._said and frame.ref == self._said.key:
                self._said = None
            case _:
                pass

    def _go_on_from(self, epoch: int | None, line: int) -> None:
        """Remember from where on history is to be asked for at the next connection."""
        self._epoch, self._next_line = epoch, line
        self._open = Open(session=self.session, start=line, epoch=epoch, ref="open")

    async def _connect(self) -> Welcome:
        self._client, welcome = await ChannelClient.connect(self._path, can_approve=self._can_approve)
        await self._send(self._open)
        return welcome

    async def _connect_again(self) -> Welcome:
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
