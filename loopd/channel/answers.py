"""The answers to requests for data: one `reply` each, for `read` the records before it (SPEC 8)."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

from loopd.channel.engine import Engine
from loopd.channel.live import Peer
from loopd.channel.sessions import Sessions
from loopd.channel.why import explain
from loopd.errors import FrameInvalid, SessionRefused
from loopd.home import Home
from loopd.proto import usage
from loopd.proto.frames import (
    ClientFrame,
    Delete,
    Fork,
    List,
    Read,
    RecordFrame,
    Reply,
    ServerFrame,
    Status,
    Tools,
    UsageOf,
    Why,
)
from loopd.proto.ids import check_session_id
from loopd.proto.records import SessionStart
from loopd.session import files, reader
from loopd.session.store import dir_for

_RECORDS_PER_READ = 64
_ENGINE_S = 5.0


class Answers:
    """Answers what needs no open session.

    Args:
        home: where the sessions are.
        sessions: the daemon's sessions.
        engine: model facts and tools.
        facts: what `status` says about the daemon itself.
    """

    def __init__(self, home: Home, sessions: Sessions, engine: Engine, facts: Callable[[], dict[str, Any]]) -> None:
        self._home, self._sessions, self._engine, self._facts = home, sessions, engine, facts

    async def to(self, frame: ClientFrame, peer: Peer) -> AsyncIterator[ServerFrame]:
        """Yield the frames that answer `frame`.

        Raises:
            LoopdError: the request failed; for `read` behind the records that are good.
        """
        if isinstance(frame, Read):
            async for answer in self._read(frame):
                yield answer
        else:
            yield Reply(to=frame.type, data=await self._data(frame, peer), ref=frame.ref)

    async def _data(self, frame: ClientFrame, peer: Peer) -> Any:  # noqa: ANN401 - any JSON value
        match frame:
            case List():
                return await self._sessions.listing()
            case Status():
                return self._facts() | await self._sessions.status() | await self._engine_status()
            case UsageOf():
                rows = await self._rows(frame.session)
                return {
                    "session": frame.session,
                    "requests": [row.as_json() for row in rows],
                    "total": asdict(usage.total(rows)),
                }
            case Why():
                return {"session": frame.session, "requests": explain(await self._rows(frame.session))}
            case Tools():
                return await self._engine.tools(frame.query, frame.session)
            case Fork() | Delete():
                return await self._change(frame, peer)
            case _:
                raise FrameInvalid(f"{frame.type} cannot be answered here")

    async def _engine_status(self) -> dict[str, Any]:
        """Return the engine's facts; a model server that does not answer must not keep `status` from answering."""
        try:
            async with asyncio.timeout(_ENGINE_S):
                return await self._engine.status()
        except TimeoutError:
            return {"model": {"state": "unknown", "reason": f"no answer within {_ENGINE_S:g} s"}}

    async def _change(self, frame: Fork | Delete, peer: Peer) -> dict[str, Any]:
        if isinstance(frame, Fork):
            return {"session": await self._sessions.fork(frame, peer), "parent": frame.session}
        await self._sessions.delete(frame.session, peer)
        return {"session": frame.session}

    async def _rows(self, session_id: str) -> list[usage.Row]:
        check_session_id(session_id)
        return usage.rows(await asyncio.to_thread(lambda: list(reader.usages(self._home, session_id))))

    async def _read(self, frame: Read) -> AsyncIterator[ServerFrame]:
        """Yield the records, then the baseline; of a refused session what is good, then why it is refused."""
        session_id = check_session_id(frame.session)
        first = frame.start
        for epoch in await asyncio.to_thread(self._epochs, session_id, frame.epoch):
            async for answer in self._read_epoch(session_id, epoch, first, frame.ref):
                yield answer
            first = 1
        start = await asyncio.to_thread(_session_start, self._home, session_id, epoch)
        baseline = await asyncio.to_thread(files.read_baseline, session_id, dir_for(self._home, session_id), start)
        data = {"session": session_id, "epoch": epoch, "baseline": baseline.model_dump(mode="json")}
        yield Reply(to=frame.type, data=data, ref=frame.ref)

    def _epochs(self, session_id: str, wanted: int | str) -> list[int]:
        there = reader.epochs(self._home, session_id)
        if wanted == "all":
            return there
        return [wanted] if isinstance(wanted, int) else there[-1:]

    async def _read_epoch(self, session_id: str, epoch: int, first: int, ref: str | None) -> AsyncIterator[RecordFrame]:
        """Yield an epoch's records from line `first` on.

        Raises:
            SessionRefused: behind the records that are good, why the others are not.
        """
        fault: SessionRefused | None = None
        if self._sessions.find(session_id) is None:
            fault = await asyncio.to_thread(reader.fault_of, self._home, session_id, epoch)
        records = reader.read_records(self._home, session_id, first, epoch, unclosed=fault is not None)
        while piece := await asyncio.to_thread(lambda: list(islice(records, _RECORDS_PER_READ))):
            for line, record in piece:
                value = record.model_dump(mode="json")
                yield RecordFrame(session=session_id, epoch=epoch, line=line, record=value, ref=ref)
        if fault is not None:
            raise fault


def _session_start(home: Home, session_id: str, epoch: int) -> SessionStart:
    """Return line 1 of an epoch.

    Raises:
        FrameInvalid: there is none; it is being written, or the log is empty.
    """
    first = next(reader.read_records(home, session_id, epoch=epoch), None)
    if first is None or not isinstance(first[1], SessionStart):
        raise FrameInvalid(f"session {session_id} has no records")
    return first[1]
