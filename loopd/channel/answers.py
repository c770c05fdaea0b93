"""The answers to requests for data: one `reply` each, for `read` the records before it (SPEC 8)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from loopd.channel.engine import Engine
from loopd.channel.sessions import Peer, Sessions
from loopd.channel.why import explain
from loopd.errors import FrameInvalid, LoopdError, NotSupported
from loopd.home import Home
from loopd.proto import usage
from loopd.proto.frames import (
    Approve,
    ClientFrame,
    Compact,
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
from loopd.proto.records import Record
from loopd.session import reader

_RECORDS_PER_READ = 64


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
            async for record in self._records(frame):
                yield record
        yield Reply(to=frame.type, data=await self._data(frame, peer), ref=frame.ref)

    async def _data(self, frame: ClientFrame, peer: Peer) -> Any:  # noqa: ANN401 - any JSON value
        match frame:
            case Read():
                baseline = await asyncio.to_thread(reader.read_baseline, self._home, frame.session)
                return {"session": frame.session, "baseline": baseline.model_dump(mode="json")}
            case List():
                return await self._sessions.listing()
            case Status():
                return self._facts() | await self._sessions.status() | await self._engine.status()
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
                return self._engine.tools()
            case Fork():
                return {"session": await self._sessions.fork(frame, peer), "parent": frame.session}
            case Delete():
                await self._sessions.delete(frame.session, peer)
                return {"session": frame.session}
            case Compact():
                raise NotSupported(
                    "this release cannot compact a session",
                    hint=f"bxctl fork {check_session_id(frame.session)} --upto LINE goes on from an earlier point",
                )
            case Approve():
                raise FrameInvalid(f"call {frame.call} of session {frame.session[:80]} waits for no approval")
            case _:
                raise FrameInvalid(f"{frame.type} cannot be answered here")

    async def _rows(self, session_id: str) -> list[usage.Row]:
        check_session_id(session_id)
        return usage.rows(await asyncio.to_thread(lambda: list(reader.usages(self._home, session_id))))

    async def _records(self, frame: Read) -> AsyncIterator[RecordFrame]:
        records = reader.read_records(self._home, check_session_id(frame.session), frame.start)
        while True:
            piece, error = await asyncio.to_thread(_piece, records)
            for epoch, line, record in piece:
                yield RecordFrame(
                    session=frame.session,
                    epoch=epoch,
                    line=line,
                    record=record.model_dump(mode="json"),
                    ref=frame.ref,
                )
            if error is not None:
                raise error
            if not piece:
                return


def _piece(
    records: Iterator[tuple[int, int, Record]],
) -> tuple[list[tuple[int, int, Record]], LoopdError | None]:
    """Return the next records, and the error where the log ends badly behind them."""
    piece: list[tuple[int, int, Record]] = []
    try:
        piece.extend(islice(records, _RECORDS_PER_READ))
    except LoopdError as error:
        return piece, error
    return piece, None
