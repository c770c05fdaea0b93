"""One open session with the clients that watch it and the turn that runs in it (SPEC 8).

What clients see has one source: records come from the log, in line order, and only after they are durable. `_shown`
is the last line that went out live. A client that attaches is sent the log up to `_shown` with back-pressure, read
from disk in pieces; when it has all of them it joins the live stream in the same step of the event loop, so there is
neither gap nor duplicate, and whatever happened meanwhile was part of its history.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from loopd.channel.codec import encode
from loopd.channel.engine import Engine
from loopd.channel.progress import Progress
from loopd.errors import KeyReused, LoopdError, ModelError, TurnBusy
from loopd.proto.frames import (
    Accepted,
    CaughtUp,
    ErrorFrame,
    Opened,
    RecordFrame,
    Say,
    ServerFrame,
    TurnEndFrame,
)
from loopd.proto.records import Record, TurnEnd, TurnEndReason, User
from loopd.session.store import Session

logger = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
_RECORDS_PER_READ = 64


class Subscriber(Protocol):
    """A client's connection, as a session sees it."""

    def send(self, line: bytes) -> None:
        """Send a line of the live stream. Never waits and never raises: a client that does not read is dropped."""
        ...

    async def deliver(self, line: bytes) -> None:
        """Send a line of history and wait until the client has room for more.

        Raises:
            ConnectionError: the client is gone.
        """
        ...


@dataclass(slots=True, eq=False)
class _Turn:
    """The turn in flight. `refs` has the mark of each client that said it, for the frames that answer."""

    key: str
    text: str
    refs: dict[Subscriber, str | None] = field(default_factory=dict)
    task: asyncio.Task[TurnEndFrame] | None = None
    cancelled: bool = False


class LiveSession:
    """A session while it is open in the daemon.

    Args:
        session: the open store.
        engine: runs the turns.
        reopen: closes a store that became read-only and opens it anew; blocks.
        spawn: starts a task of the daemon's task group.
        on_idle: called when neither a client nor a turn is left.
    """

    def __init__(
        self,
        session: Session,
        engine: Engine,
        reopen: Callable[[Session], Session],
        spawn: Spawn,
        on_idle: Callable[["LiveSession"], None],
    ) -> None:
        self.session = session
        self._engine, self._reopen, self._spawn, self._on_idle = engine, reopen, spawn, on_idle
        self._subscribers: dict[Subscriber, bool] = {}  # whether it has joined the live stream
        self._turn: _Turn | None = None
        self._progress = Progress()
        self._shown = session.lines
        self._deciding = asyncio.Lock()

    @property
    def id(self) -> str:
        """The session's id."""
        return self.session.id

    @property
    def clients(self) -> int:
        """How many clients are attached."""
        return len(self._subscribers)

    @property
    def running(self) -> bool:
        """Whether a turn is in flight."""
        return self._turn is not None

    @property
    def idle(self) -> bool:
        """Whether it may be closed: no client, no turn."""
        return not self._subscribers and self._turn is None

    @property
    def task(self) -> asyncio.Task[TurnEndFrame] | None:
        """The task of the turn in flight."""
        return self._turn.task if self._turn else None

    # --- watching -----------------------------------------------------------------------------------------------

    def reserve(self, subscriber: Subscriber) -> None:
        """Count the client as attached, so that the session stays open; `attach` follows."""
        self._subscribers[subscriber] = False

    async def attach(self, subscriber: Subscriber, start: int, *, created: bool, ref: str | None) -> None:
        """Send `opened`, the records from line `start` on (0: none), `caught_up`, the step so far; then live.

        Raises:
            ConnectionError: the client is gone.
            SessionError: the log cannot be read.
        """
        await subscriber.deliver(
            encode(
                Opened(
                    session=self.id,
                    epoch=self.session.epoch,
                    lines=self._shown,
                    created=created,
                    running=self.running,
                    ref=ref,
                )
            )
        )
        line = start or self._shown + 1
        while line <= self._shown:
            for number, record in await self._read(line):
                if number <= self._shown:
                    await subscriber.deliver(encode(self._record_frame(number, record)))
                    line = number + 1
        if subscriber not in self._subscribers:
            return
        subscriber.send(encode(CaughtUp(session=self.id, line=self._shown, ref=ref)))
        for frame in self._progress.frames(self.id):
            subscriber.send(encode(frame))
        self._subscribers[subscriber] = True

    def detach(self, subscriber: Subscriber) -> None:
        """Forget a client. The turn goes on: a client that leaves changes nothing."""
        if self._subscribers.pop(subscriber, None) is not None and self.idle:
            self._on_idle(self)
        if self._turn:
            self._turn.refs.pop(subscriber, None)

    def dismiss(self, error: ErrorFrame) -> None:
        """Detach every client and tell it why."""
        line = encode(error)
        for subscriber in list(self._subscribers):
            subscriber.send(line)
            self.detach(subscriber)

    # --- turns --------------------------------------------------------------------------------------------------

    async def say(self, subscriber: Subscriber, frame: Say) -> None:
        """Begin a turn, or answer for the key as SPEC 8 says. Returns when that is decided, not when the turn ends.

        Raises:
            TurnBusy: another turn is in flight.
            KeyReused: the key belongs to another text.
            LoopdError: the engine does not admit it (disk_low), or the log cannot be read or written.
        """
        async with self._deciding:
            recorded = await self._decide(subscriber, frame)
        if recorded:
            await self._send_again(subscriber, frame)

    def cancel(self) -> bool:
        """Cancel the turn in flight; tell whether there is one."""
        if self._turn is None or self._turn.task is None:
            return False
        if not self._turn.cancelled:
            self._turn.cancelled = True
            self._turn.task.cancel()
        return True

    async def _decide(self, subscriber: Subscriber, frame: Say) -> bool:
        """Start or join the turn of this key; tell whether it is recorded already and must be sent again."""
        if self._turn is not None:
            self._join(self._turn, subscriber, frame)
            return False
        if self.session.read_only:
            self.session = await asyncio.to_thread(self._reopen, self.session)
            await self._show_rest()
        if self.session.open_turn is not None:
            await self._engine.recover(self.session, self._emit)
            await self._show_rest()
        if frame.key in self.session.keys:
            return True
        await self._engine.admit(self.session)
        turn = self._turn = _Turn(frame.key, frame.text, {subscriber: frame.ref})
        self._emit(Accepted(session=self.id, key=turn.key, text=turn.text))
        turn.task = self._spawn(self._run(turn))
        turn.task.add_done_callback(lambda task: self._end(turn, task))
        return False

    def _join(self, turn: _Turn, subscriber: Subscriber, frame: Say) -> None:
        if turn.key != frame.key:
            raise TurnBusy(
                f"session {self.id} has a turn in flight", hint=f"wait for its end, or bxctl cancel {self.id}"
            )
        if turn.text != frame.text:
            raise self._reused(frame.key)
        turn.refs[subscriber] = frame.ref
        subscriber.send(encode(Accepted(session=self.id, key=turn.key, text=turn.text, ref=frame.ref)))

    async def _run(self, turn: _Turn) -> TurnEndFrame:
        try:
            try:
                return await self._engine.run_turn(self.session, turn.text, turn.key, self._emit)
            finally:
                await self._show_rest()
        except LoopdError as error:
            reason: TurnEndReason = "model_error" if isinstance(error, ModelError) else "interrupted"
            return self._turn_end(turn, reason, code=error.code, message=error.message, hint=error.hint)
        except Exception:
            logger.exception("turn_failed session=%s", self.id)
            return self._turn_end(
                turn, "interrupted", code="internal", message="an internal error; the daemon's log has its trace"
            )

    def _end(self, turn: _Turn, task: asyncio.Task[TurnEndFrame]) -> None:
        end = self._turn_end(turn, "cancelled") if task.cancelled() else task.result()
        self._emit(end)
        self._turn, self._progress = None, Progress()
        if self.idle:
            self._on_idle(self)

    def _turn_end(
        self, turn: _Turn, reason: TurnEndReason, *, code: str | None = None, message: str = "", hint: str = ""
    ) -> TurnEndFrame:
        recorded = turn.key in self.session.keys
        return TurnEndFrame(
            session=self.id,
            key=turn.key,
            reason=reason,
            recorded=recorded,
            text=None if recorded else turn.text,
            code=code,
            message=message,
            hint=hint,
        )

    async def _send_again(self, subscriber: Subscriber, frame: Say) -> None:
        """Send the records of the turn that has this key, and its end."""
        line = self.session.keys[frame.key]
        while True:
            for number, record in await self._read(line):
                if isinstance(record, User) and record.text != frame.text:
                    raise self._reused(frame.key)
                await subscriber.deliver(encode(self._record_frame(number, record)))
                if isinstance(record, TurnEnd):
                    end = TurnEndFrame(
                        session=self.id, key=frame.key, reason=record.reason, recorded=True, ref=frame.ref
                    )
                    await subscriber.deliver(encode(end))
                    return
                line = number + 1

    def _reused(self, key: str) -> KeyReused:
        return KeyReused(f"the key {key} belongs to another text in session {self.id}", hint="give a fresh --key")

    # --- the log ------------------------------------------------------------------------------------------------

    def _emit(self, frame: ServerFrame) -> None:
        if isinstance(frame, RecordFrame):
            self._shown = frame.line
        self._progress.note(frame)
        refs = self._turn.refs if self._turn and isinstance(frame, Accepted | TurnEndFrame) else {}
        line = encode(frame)
        for subscriber, joined in list(self._subscribers.items()):
            if joined:
                ref = refs.get(subscriber)
                subscriber.send(encode(frame.model_copy(update={"ref": ref})) if ref else line)

    async def _show_rest(self) -> None:
        """Emit what is durable and was not shown, e.g. because the turn was cancelled behind its append."""
        while self._shown < self.session.lines:
            for number, record in await self._read(self._shown + 1):
                self._emit(self._record_frame(number, record))

    async def _read(self, line: int) -> list[tuple[int, Record]]:
        session = self.session
        return await asyncio.to_thread(lambda: list(islice(session.records(line), _RECORDS_PER_READ)))

    def _record_frame(self, number: int, record: Record) -> RecordFrame:
        return RecordFrame(
            session=self.id, epoch=self.session.epoch, line=number, record=record.model_dump(mode="json")
        )
