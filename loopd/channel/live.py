"""One open session with the clients that watch it and the turn that runs in it (SPEC 8).

What clients see has one source: records come from the log, in line order, and only after they are durable. `_shown`
is the place, epoch and line, of the last record that went out live. A client that attaches is sent the log up to
`_shown` with back-pressure, read from disk in pieces; when it has all of them it joins the live stream in the same
step of the event loop, so there is neither gap nor duplicate, and whatever happened meanwhile was part of its history.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

from loopd.channel.codec import encode
from loopd.channel.engine import Engine
from loopd.channel.progress import Progress
from loopd.errors import KeyReused, LoopdError, ModelError, NotPermitted, TurnBusy
from loopd.proto.frames import (
    Accepted,
    ApprovalRequest,
    Approve,
    CaughtUp,
    Compact,
    ErrorFrame,
    Opened,
    RecordFrame,
    Reply,
    Say,
    ServerFrame,
    TurnEndFrame,
)
from loopd.proto.records import Record, TurnEnd, TurnEndReason, User
from loopd.session.store import Session
from loopd.turn.approvals import Approvals

logger = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]
_RECORDS_PER_READ = 64
_INTERNAL = "an internal error; the daemon's log has its trace"


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection, as the kernel says (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


class _Place(NamedTuple):
    """Where a record stands; places are in the order in which records were written."""

    epoch: int
    line: int

    def next(self) -> "_Place":
        """The place behind this one."""
        return _Place(self.epoch, self.line + 1)


class Subscriber(Protocol):
    """A client's connection, as a session sees it."""

    @property
    def can_approve(self) -> bool:
        """Whether it shows approval requests to a person."""
        ...

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
        self._compaction: asyncio.Task[ServerFrame] | None = None
        self._progress = Progress()
        self._approvals = Approvals(lambda: any(subscriber.can_approve for subscriber in self._subscribers))
        self._shown = _Place(session.epoch, session.lines)
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
        """Whether a turn or a compaction is in flight."""
        return self._turn is not None or self._compaction is not None

    @property
    def asking(self) -> bool:
        """Whether a call waits for somebody to allow it."""
        return bool(self._approvals.pending())

    @property
    def idle(self) -> bool:
        """Whether it may be closed: no client, and nothing in flight."""
        return not self._subscribers and not self.running

    @property
    def task(self) -> asyncio.Task[Any] | None:
        """The task of what is in flight."""
        return self._turn.task if self._turn else self._compaction

    # --- watching -----------------------------------------------------------------------------------------------

    def reserve(self, subscriber: Subscriber) -> None:
        """Count the client as attached, so that the session stays open; `attach` follows."""
        self._subscribers[subscriber] = False

    async def attach(
        self, subscriber: Subscriber, start: int, *, epoch: int | None = None, created: bool, ref: str | None
    ) -> None:
        """Send `opened`, the records from line `start` on (0: none), `caught_up`, the step so far; then live.

        Of the step so far, what waits for an approval goes to a client that can approve.

        Args:
            subscriber: whose place was reserved.
            start: a line of `epoch`; the records of later epochs follow.
            epoch: None for the newest.
            created: the session was made for this client.
            ref: its mark.

        Raises:
            ConnectionError: the client is gone.
            SessionError: the log cannot be read.
        """
        await subscriber.deliver(
            encode(
                Opened(
                    session=self.id,
                    epoch=self._shown.epoch,
                    lines=self._shown.line,
                    created=created,
                    running=self.running,
                    ref=ref,
                )
            )
        )
        newest = self._shown.epoch
        here = _Place(newest if epoch is None else min(epoch, newest), start) if start else self._shown.next()
        while here <= self._shown:
            for place, record in await self._read(here):
                if place > self._shown:
                    break
                await subscriber.deliver(encode(self._record_frame(place, record)))
                here = place.next()
        if subscriber not in self._subscribers:
            return
        subscriber.send(encode(CaughtUp(session=self.id, line=self._shown.line, ref=ref)))
        questions = self._approvals.pending() if subscriber.can_approve else []
        for frame in (*self._progress.frames(self.id), *questions):
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

    async def compact(self, subscriber: Subscriber, frame: Compact, peer: Peer) -> None:
        """Begin to compact, or say what it would cost. The reply comes at the end; returns when it is begun.

        Raises:
            NotPermitted: the client is neither the session's owner nor root.
            TurnBusy: a turn or a compaction is in flight.
            LoopdError: the engine does not admit it, or the log cannot be read or written.
        """
        owner = self.session.start.owner_uid
        if peer.uid not in {0, owner}:
            raise NotPermitted(f"session {self.id} belongs to user {owner}, and this is user {peer.uid}")
        async with self._deciding:
            if self.running:
                raise self._busy()
            await self._mend()
            await self._engine.admit(self.session)
            if not frame.estimate:
                task = self._compaction = self._spawn(self._run_compaction(frame, peer))
                task.add_done_callback(lambda task: self._end_compaction(subscriber, frame, task))
                return
        cost = await self._engine.estimate(self.session)
        await subscriber.deliver(encode(Reply(to="compact", data=cost, ref=frame.ref)))

    async def _run_compaction(self, frame: Compact, peer: Peer) -> ServerFrame:
        try:
            try:
                done = await self._engine.compact(self.session, self._emit, uid=peer.uid, pid=peer.pid)
                return Reply(to="compact", data=done, ref=frame.ref)
            finally:
                await self._show_rest()
        except LoopdError as error:
            return ErrorFrame(session=self.id, code=error.code, message=error.message, hint=error.hint, ref=frame.ref)
        except Exception:
            logger.exception("compaction_failed session=%s", self.id)
            return ErrorFrame(session=self.id, code="internal", message=_INTERNAL, ref=frame.ref)

    def _end_compaction(self, subscriber: Subscriber, frame: Compact, task: asyncio.Task[ServerFrame]) -> None:
        cancelled = f"the compaction of session {self.id} was cancelled; nothing was changed"
        end = ErrorFrame(session=self.id, code="cancelled", message=cancelled, ref=frame.ref)
        subscriber.send(encode(end if task.cancelled() else task.result()))
        self._compaction, self._progress = None, Progress()
        if self.idle:
            self._on_idle(self)

    def approve(self, frame: Approve, peer: Peer) -> None:
        """Take a client's answer to an approval request; the first one counts.

        Raises:
            NotPending: the call waits for no answer.
        """
        self._approvals.answer(frame.call, frame.decision, uid=peer.uid, pid=peer.pid)

    def cancel(self) -> bool:
        """Cancel what is in flight; tell whether there is something."""
        if self._compaction is not None:
            return self._compaction.cancel()
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
        if self._compaction is not None:
            raise self._busy()
        await self._mend()
        if frame.key in self.session.keys:
            return True
        await self._engine.admit(self.session)
        turn = self._turn = _Turn(frame.key, frame.text, {subscriber: frame.ref})
        self._emit(Accepted(session=self.id, key=turn.key, text=turn.text))
        turn.task = self._spawn(self._run(turn))
        turn.task.add_done_callback(lambda task: self._end(turn, task))
        return False

    async def _mend(self) -> None:
        """Open a log anew that an error made read-only, and end a turn that a crash left without its end."""
        if self.session.read_only:
            self.session = await asyncio.to_thread(self._reopen, self.session)
            await self._show_rest()
        if self.session.open_turn is not None:
            await self._engine.recover(self.session, self._emit)
            await self._show_rest()

    def _busy(self) -> TurnBusy:
        if self.asking:
            waits = f"session {self.id} has a turn in flight, which waits for an approval"
            return TurnBusy(waits, hint=f"bxctl approve {self.id} shows what it asks; bxctl cancel {self.id} ends it")
        what = "a turn in flight" if self._turn else "a compaction in flight"
        return TurnBusy(f"session {self.id} has {what}", hint=f"wait for its end, or bxctl cancel {self.id}")

    def _join(self, turn: _Turn, subscriber: Subscriber, frame: Say) -> None:
        if turn.key != frame.key:
            raise self._busy()
        if turn.text != frame.text:
            raise self._reused(frame.key)
        turn.refs[subscriber] = frame.ref
        subscriber.send(encode(Accepted(session=self.id, key=turn.key, text=turn.text, ref=frame.ref)))

    async def _run(self, turn: _Turn) -> TurnEndFrame:
        try:
            try:
                return await self._engine.run_turn(self.session, turn.text, turn.key, self._emit, self._approvals)
            finally:
                await self._show_rest()
        except LoopdError as error:
            reason: TurnEndReason = "model_error" if isinstance(error, ModelError) else "interrupted"
            return self._turn_end(turn, reason, code=error.code, message=error.message, hint=error.hint)
        except Exception:
            logger.exception("turn_failed session=%s", self.id)
            return self._turn_end(turn, "interrupted", code="internal", message=_INTERNAL)

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
        async for place, record in self._recorded_turn(frame.key):
            if isinstance(record, User) and record.text != frame.text:
                raise self._reused(frame.key)
            await subscriber.deliver(encode(self._record_frame(place, record)))
            if isinstance(record, TurnEnd):
                end = TurnEndFrame(session=self.id, key=frame.key, reason=record.reason, recorded=True, ref=frame.ref)
                await subscriber.deliver(encode(end))
                return

    async def _recorded_turn(self, key: str) -> AsyncIterator[tuple[_Place, Record]]:
        """Yield the records from this key's user record on, at least to the end of its turn.

        Raises:
            KeyReused: its turn is of an epoch that only the session has that this one was forked from.
        """
        session = self.session
        here = _Place(session.epoch, session.keys[key])
        if not here.line:
            turn = await asyncio.to_thread(session.earlier_turn, key)
            for epoch, line, record in turn:
                yield _Place(epoch, line), record
            if not turn:
                raise KeyReused(
                    f"the key {key} belongs to a turn from before session {self.id} was forked",
                    hint="give a fresh --key",
                )
            return
        while True:
            for place, record in await self._read(here):
                yield place, record
                here = place.next()

    def _reused(self, key: str) -> KeyReused:
        return KeyReused(f"the key {key} belongs to another text in session {self.id}", hint="give a fresh --key")

    # --- the log ------------------------------------------------------------------------------------------------

    def _emit(self, frame: ServerFrame) -> None:
        if isinstance(frame, RecordFrame):
            self._shown = _Place(frame.epoch, frame.line)
        self._progress.note(frame)
        refs = self._turn.refs if self._turn and isinstance(frame, Accepted | TurnEndFrame) else {}
        line = encode(frame)
        for subscriber, joined in list(self._subscribers.items()):
            if joined and (subscriber.can_approve or not isinstance(frame, ApprovalRequest)):
                ref = refs.get(subscriber)
                subscriber.send(encode(frame.model_copy(update={"ref": ref})) if ref else line)

    async def _show_rest(self) -> None:
        """Emit what is durable and was not shown, e.g. because the turn was cancelled behind its append."""
        while self._shown < (self.session.epoch, self.session.lines):
            for place, record in await self._read(self._shown.next()):
                self._emit(self._record_frame(place, record))

    async def _read(self, here: _Place) -> list[tuple[_Place, Record]]:
        """Return some records from a place on; behind the last one of an epoch the next epoch's."""
        return await asyncio.to_thread(_some_records, self.session, here)

    def _record_frame(self, place: _Place, record: Record) -> RecordFrame:
        return RecordFrame(session=self.id, epoch=place.epoch, line=place.line, record=record.model_dump(mode="json"))


def _some_records(session: Session, here: _Place) -> list[tuple[_Place, Record]]:
    while True:
        records = islice(session.records(here.line, epoch=here.epoch), _RECORDS_PER_READ)
        found = [(_Place(here.epoch, line), record) for line, record in records]
        if found or here.epoch >= session.epoch:
            return found
        here = _Place(here.epoch + 1, 1)
