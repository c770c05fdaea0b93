"""The sessions that are open in the daemon: opened on demand, closed when idle, bounded in number (SPEC 2.2/10)."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from loopd.channel.codec import encode
from loopd.channel.engine import Engine
from loopd.channel.live import LiveSession, Peer, Spawn, Subscriber
from loopd.channel.refusals import Refusals
from loopd.clock import stamp
from loopd.config import LoopTable
from loopd.errors import (
    LimitReached,
    NotPending,
    NotPermitted,
    SessionNotFound,
    SessionRefused,
    TurnBusy,
)
from loopd.home import Home
from loopd.proto.frames import Approve, ErrorFrame, Fork, Open, Queued
from loopd.proto.ids import check_session_id, new_session_id
from loopd.proto.records import SessionStart
from loopd.session import reader, repair
from loopd.session.store import Session, dir_for

logger = logging.getLogger(__name__)

_CHECK_WAIT_S = 5.0


class Sessions:
    """All sessions of one home.

    Args:
        home: where they are.
        limits: `[loop]`; may be set anew at any time.
        engine: turns, baselines, audit.
        spawn: starts a task of the daemon's task group.
    """

    def __init__(self, home: Home, limits: LoopTable, engine: Engine, spawn: Spawn) -> None:
        self.refusals = Refusals(home)
        self.limits = limits
        self._home, self._engine, self._spawn = home, engine, spawn
        self._open: dict[str, LiveSession] = {}
        self._loading: set[str] = set()
        self._idle: dict[str, asyncio.TimerHandle] = {}  # the longest idle first
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # --- open and close -----------------------------------------------------------------------------------------

    async def open(self, subscriber: Subscriber, frame: Open, peer: Peer) -> tuple[LiveSession, bool]:
        """Return the open session with a place kept for the subscriber, and whether it was made just now.

        Raises:
            SessionNotFound: there is none and `create` is not set.
            SessionRefused: its files are not what was written.
            LimitReached: as many are open as may be, and none is idle.
            LoopdError: what opening, creating or auditing may raise.
        """
        session_id = check_session_id(frame.session) if frame.session is not None else new_session_id()
        async with self._lock(session_id):
            live, created = self._open.get(session_id), False
            if live is None:
                live, created = await self._load(subscriber, session_id, frame, peer)
            else:
                await self._engine.audit("session_opened", session=session_id, uid=peer.uid, pid=peer.pid)
            live.reserve(subscriber)
            if timer := self._idle.pop(session_id, None):
                timer.cancel()
        return live, created

    def find(self, session_id: str) -> LiveSession | None:
        """Return the session if it is open."""
        return self._open.get(session_id)

    async def cancel(self, session_id: str) -> bool:
        """Cancel the turn in flight; tell whether there was one.

        Raises:
            SessionNotFound: there is no such session.
        """
        if live := self._open.get(check_session_id(session_id)):
            return live.cancel()
        await self._exists(session_id)
        return False

    async def approve(self, frame: Approve, peer: Peer) -> None:
        """Answer the approval request of a call.

        Raises:
            NotPending: it waits for no answer.
            SessionNotFound: there is no such session.
        """
        if live := self._open.get(check_session_id(frame.session)):
            live.approve(frame, peer)
            return
        await self._exists(frame.session)
        raise NotPending(f"call {frame.call} waits for no approval: session {frame.session} is not open")

    async def _exists(self, session_id: str) -> None:
        if not await asyncio.to_thread(os.path.lexists, dir_for(self._home, session_id)):
            raise _missing(session_id)

    async def _load(self, subscriber: Subscriber, session_id: str, frame: Open, peer: Peer) -> tuple[LiveSession, bool]:
        who = {"session": session_id, "uid": peer.uid, "pid": peer.pid}
        await self._make_room()
        self._loading.add(session_id)
        created = False
        try:
            if await asyncio.to_thread(os.path.lexists, dir_for(self._home, session_id)):
                await self._engine.audit("session_opened", **who)
                session = await asyncio.to_thread(Session.open, self._home, session_id, limits=self.limits)
            elif frame.session is None or frame.create:

                def say_wait(why: str) -> None:
                    subscriber.send(encode(Queued(session=session_id, place=0, reason=why, ref=frame.ref)))

                baseline = await self._engine.baseline(say_wait)
                await self._engine.audit("session_created", **who)
                session = await asyncio.to_thread(
                    Session.create, self._home, session_id, baseline, owner_uid=peer.uid, limits=self.limits
                )
                created = True
            else:
                raise _missing(session_id)
        except SessionRefused as error:
            self.refusals.note(session_id, error)
            await self._engine.audit("session_refused", **who, why=error.message)
            raise
        finally:
            self._loading.discard(session_id)
        self.refusals.forget(session_id)
        live = LiveSession(session, self._engine, self._reopen, self._spawn, self._on_idle)
        self._open[session_id] = live
        return live, created

    def _reopen(self, session: Session) -> Session:
        session.close()
        return Session.open(self._home, session.id, limits=self.limits)

    async def _make_room(self) -> None:
        while len(self._open) + len(self._loading) >= self.limits.max_open_sessions:
            if not self._idle:
                raise LimitReached(
                    f"{self.limits.max_open_sessions} sessions are open and each is in use (max_open_sessions)",
                    hint="leave one of them, or raise max_open_sessions in [loop]",
                )
            longest = next(iter(self._idle))
            self._idle.pop(longest).cancel()
            await self._close_if_idle(longest)

    def _on_idle(self, live: LiveSession) -> None:
        if self._open.get(live.id) is not live:
            return
        if timer := self._idle.pop(live.id, None):
            timer.cancel()
        loop = asyncio.get_running_loop()
        self._idle[live.id] = loop.call_later(
            self.limits.close_idle_s, lambda: self._spawn(self._close_if_idle(live.id))
        )

    async def _close_if_idle(self, session_id: str) -> None:
        async with self._lock(session_id):
            live = self._open.get(session_id)
            if live is not None and live.idle:
                await self._close(live)

    async def _close(self, live: LiveSession) -> None:
        if timer := self._idle.pop(live.id, None):
            timer.cancel()
        try:
            await asyncio.to_thread(live.session.close)
        except OSError:  # whatever the disk says now, all that was acknowledged was synced
            logger.exception("close_failed session=%s", live.id)
        finally:
            del self._open[live.id]  # only now may somebody else open it

    def _lock(self, session_id: str) -> asyncio.Lock:
        lock = self._locks.get(session_id)
        if lock is None:
            lock = self._locks[session_id] = asyncio.Lock()
        return lock

    async def cancel_turns(self, *, patience_s: float) -> None:
        """Cancel every turn and wait for their ends. One that does not end in time is cancelled once more."""
        turns = {live.task for live in self._open.values() if live.cancel() and live.task}
        if turns:
            _, late = await asyncio.wait(turns, timeout=patience_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=patience_s / 4)

    async def close(self) -> None:
        """Close every log; no client and no turn may be left."""
        for live in list(self._open.values()):
            await self._close(live)

    # --- about sessions -----------------------------------------------------------------------------------------

    async def listing(self) -> dict[str, Any]:
        """Return a row for each session, the last changed first; no body is read."""
        rows = []
        for summary in await asyncio.to_thread(reader.summaries, self._home):
            live = self._open.get(summary.id)
            rows.append(
                {
                    "session": summary.id,
                    "title": summary.title,
                    "epoch": summary.epoch,
                    "size_bytes": summary.size_bytes,
                    "modified": stamp(summary.modified),
                    "refused": summary.refused or self.refusals.known(summary.id),
                    "open": live is not None,
                    "running": live is not None and live.running,
                    "asking": live is not None and live.asking,
                    "clients": live.clients if live else 0,
                }
            )
        return {"sessions": rows}

    async def status(self) -> dict[str, Any]:
        """Return what is open, what is refused, and the space."""
        refused = await self.refusals.current(wait_s=_CHECK_WAIT_S)
        free = self._home.free_bytes()
        return {
            "sessions": {
                "total": await asyncio.to_thread(_count, self._home.sessions),
                "open": len(self._open),
                "running": sum(live.running for live in self._open.values()),
                "max_open": self.limits.max_open_sessions,
                "checked": self.refusals.checked,
            },
            "refused": [{"session": session_id, "reason": reason} for session_id, reason in refused.items()],
            "disk": {
                "home": str(self._home.path),
                "free_bytes": free,
                "min_free_bytes": self.limits.min_free_bytes,
                "low": free < self.limits.min_free_bytes,
            },
        }

    async def fork(self, frame: Fork, peer: Peer) -> str:
        """Make a session from another's first lines and return its id; it belongs to whoever asked.

        Raises:
            LoopdError: what `repair.fork`, the engine or the audit log may raise.
        """
        source, target = check_session_id(frame.session), check_session_id(frame.to or new_session_id())
        baseline = await self._engine.baseline(lambda _why: None) if frame.new_baseline else None
        await self._engine.audit(
            "session_forked", session=source, to=target, upto=frame.upto, uid=peer.uid, pid=peer.pid
        )
        async with self._lock(target):
            await asyncio.to_thread(
                repair.fork, self._home, source, target, upto=frame.upto, owner_uid=peer.uid, baseline=baseline
            )
        return target

    async def delete(self, session_id: str, peer: Peer) -> None:
        """Remove a session for good; the clients that watch it are told.

        Raises:
            NotPermitted: the client is neither its owner nor root.
            TurnBusy: a turn is in flight.
            SessionNotFound: there is none.
        """
        owner = await asyncio.to_thread(self._owner, check_session_id(session_id))
        if peer.uid not in {0, owner}:
            raise NotPermitted(f"session {session_id} belongs to user {owner}, and this is user {peer.uid}")
        async with self._lock(session_id):
            live = self._open.get(session_id)
            if live is not None:
                if live.running:
                    raise TurnBusy(
                        f"session {session_id} has a turn or a compaction in flight",
                        hint=f"first bxctl cancel {session_id}",
                    )
                gone = ErrorFrame(
                    session=session_id, code=SessionNotFound.code, message=f"session {session_id} was deleted"
                )
                live.dismiss(gone)
                await self._close(live)
            await self._engine.audit("session_deleted", session=session_id, uid=peer.uid, pid=peer.pid)
            await asyncio.to_thread(reader.delete, self._home, session_id)
            await self._engine.forget(session_id)
        self.refusals.forget(session_id)

    def _owner(self, session_id: str) -> int:
        """Return who made the session; where its first line cannot be read, whose its files are."""
        directory = dir_for(self._home, session_id)
        try:
            first = next(reader.read_records(self._home, session_id), None)
        except (SessionRefused, SessionNotFound):
            first = None
        if first is not None and isinstance(first[1], SessionStart):
            return first[1].owner_uid
        try:
            return directory.lstat().st_uid
        except FileNotFoundError as error:
            raise _missing(session_id) from error


def _missing(session_id: str) -> SessionNotFound:
    return SessionNotFound(session_id, f"there is no session {session_id}", hint="bxctl sessions lists the ids")


def _count(directory: Path) -> int:
    return sum(not path.name.startswith(".") for path in directory.iterdir())
