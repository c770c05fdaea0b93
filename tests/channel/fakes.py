"""A fake engine that writes real records, and a bare client that sees every frame."""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loopd.channel.codec import LineDecoder, decode_server, encode
from loopd.channel.engine import Emit
from loopd.channel.server import ChannelServer
from loopd.clock import now
from loopd.config import Config
from loopd.home import Home
from loopd.proto.frames import (
    PROTOCOL_VERSION,
    ApprovalRequest,
    ClientFrame,
    Compacting,
    Delta,
    Hello,
    Open,
    Prefill,
    RecordFrame,
    Reply,
    ServerFrame,
    TurnEndFrame,
    UsageFrame,
)
from loopd.proto.model_identity import ModelIdentity, TemplateIdentity
from loopd.proto.records import Assistant, Record, Summary, TurnEnd, TurnEndReason, Usage, User
from loopd.session.baseline import Baseline
from loopd.session.store import Session
from loopd.turn.approvals import Answer, Approvals

PATIENCE_S = 20.0
QUESTION = "Write a summary."
QUESTION_FRAME = ApprovalRequest(
    session="s",
    call=1,
    name="files.write",
    arguments='{"path":"/notes"}',
    effect="write",
    rule='[tools.policy] write = "ask"',
    seconds=300.0,
)
BASELINE = Baseline(
    system_prompt="Be brief.",
    tools=({"type": "function", "function": {"name": "find_tool", "parameters": {"type": "object"}}},),
    model=ModelIdentity(alias="fake", sha256=None, size=1),
    template=TemplateIdentity(name="chatml", sha256="sha256:" + "0" * 64, options={}),
)


def usage_record(session: Session, text: str | None, expected: int = 0) -> Usage:
    request = session.request(text)
    return Usage(
        at=now(),
        prompt_tokens=expected + 10,
        completion_tokens=5,
        cached_tokens=expected,
        expected=expected,
        loss=0,
        cause=None,
        prefill_ms=10.0,
        decode_ms=20.0,
        first_token_ms=11.0,
        slot=0,
        request_bytes=request.request_bytes,
        request_sha256=request.request_sha256,
    )


def step(session: Session, text: str, key: str, answer: str) -> list[Record]:
    """The records of one finished request that begins a turn."""
    before = session.last_usage
    expected = (before.prompt_tokens or 0) + (before.completion_tokens or 0) - 1 if before else 0
    return [
        User(at=now(), text=text, key=key),
        Assistant(at=now(), text=answer, finish_reason="stop", origin="model"),
        usage_record(session, text, expected),
    ]


class FakeEngine:
    """Answers each text with its upper case; holds a turn in mid-step where the test has put a gate."""

    def __init__(self) -> None:
        self.audited: list[dict[str, Any]] = []
        self.ran: list[str] = []
        self.forgotten: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.waiting = asyncio.Semaphore(0)
        self.ended = asyncio.Semaphore(0)
        self.questions: dict[str, float] = {}
        self.answers: list[Answer] = []
        self.refusal: Exception | None = None
        self.failure: Exception | None = None

    def hold(self, text: str) -> asyncio.Event:
        """Hold the turn of this text after its first delta, until the event is set."""
        self.gates[text] = asyncio.Event()
        return self.gates[text]

    async def is_held(self) -> None:
        """Wait until a turn has come to its gate, or asks."""
        async with asyncio.timeout(PATIENCE_S):
            await self.waiting.acquire()

    async def turn_has_ended(self) -> None:
        """Wait until one more turn has come to its end, whatever that is."""
        async with asyncio.timeout(PATIENCE_S):
            await self.ended.acquire()

    async def baseline(self, _on_wait: Callable[[str], None]) -> Baseline:
        return BASELINE

    async def admit(self, session: Session) -> None:
        if self.refusal:
            raise self.refusal

    def ask(self, text: str, *, seconds: float = 300.0) -> None:
        """Let the turn of this text ask whether a tool may run, before it answers."""
        self.questions[text] = seconds

    async def run_turn(self, session: Session, text: str, key: str, emit: Emit, approvals: Approvals) -> TurnEndFrame:
        try:
            self.ran.append(text)
            if seconds := self.questions.get(text):
                self.waiting.release()
                question = QUESTION_FRAME.model_copy(update={"call": len(self.answers) + 1, "seconds": seconds})
                self.answers.append(await approvals.ask(question, emit))
            return await self._turn(session, text, key, emit)
        finally:
            self.ended.release()

    async def _turn(self, session: Session, text: str, key: str, emit: Emit) -> TurnEndFrame:
        if self.failure:
            raise self.failure
        answer = text.upper()
        emit(Prefill(session=session.id, cached=0, processed=5, total=10))
        emit(Delta(session=session.id, text=answer[:2]))
        if gate := self.gates.get(text):
            self.waiting.release()
            await gate.wait()
        emit(Delta(session=session.id, text=answer[2:]))
        await self._append(session, emit, *step(session, text, key, answer), TurnEnd(at=now(), reason="completed"))
        return self._end(session, key, "completed")

    async def _append(self, session: Session, emit: Emit, *records: Record) -> None:
        first = session.lines + 1
        await asyncio.to_thread(session.append, *records)
        for line, record in enumerate(records, first):
            value = record.model_dump(mode="json")
            emit(RecordFrame(session=session.id, epoch=session.epoch, line=line, record=value))
            if isinstance(record, Usage):
                emit(
                    UsageFrame(
                        session=session.id,
                        prompt_tokens=record.prompt_tokens,
                        cached_tokens=record.cached_tokens,
                        evaluated=10,
                        loss=record.loss,
                        cause=None,
                        seconds=0.2,
                    )
                )

    def _end(self, session: Session, key: str, reason: TurnEndReason) -> TurnEndFrame:
        return TurnEndFrame(session=session.id, key=key, reason=reason, recorded=True)

    async def recover(self, session: Session, emit: Emit) -> None:
        await self._append(session, emit, TurnEnd(at=now(), reason="interrupted"))

    async def estimate(self, session: Session) -> dict[str, Any]:
        if self.failure:
            raise self.failure
        return {
            "session": session.id,
            "epoch": session.epoch,
            "prompt_tokens": 5000,
            "evaluated_tokens": 70,
            "summary_tokens": 512,
            "next_prompt_tokens": 800,
            "context_tokens": 8192,
            "left_out_messages": 0,
            "seconds": 6.2,
        }

    async def compact(self, session: Session, emit: Emit, *, uid: int, pid: int) -> dict[str, Any]:
        if self.failure:
            raise self.failure
        emit(Compacting(session=session.id, epoch=session.epoch + 1))
        if gate := self.gates.get(QUESTION):
            self.waiting.release()
            await gate.wait()
        summary = Summary(request=QUESTION, text="They said something.")
        await asyncio.to_thread(session.begin_epoch, summary, usage_record(session, QUESTION))
        value = session.start.model_dump(mode="json")
        emit(RecordFrame(session=session.id, epoch=session.epoch, line=1, record=value))
        return {
            "session": session.id,
            "epoch": session.epoch,
            "summary": summary.text,
            "cut": False,
            "left_out_messages": 0,
            "seconds": 1.5,
        }

    async def forget(self, session_id: str) -> None:
        self.forgotten.append(session_id)

    async def audit(self, event: str, **facts: Any) -> None:
        self.audited.append({"event": event, **facts})

    async def status(self) -> dict[str, Any]:
        return {"model": {"alias": "fake", "state": "ready"}}

    async def tools(self, query: str, session_id: str) -> list[dict[str, Any]]:
        clock = {"name": "clock", "description": "Tell the time.", "effect": "read", "calls": 0, "failed": 0}
        clock |= {"decision": "allow", "rule": '[tools.policy] read = "allow"'}
        clock |= {"last_failure": None, "failed_at": None} | ({"rank": 1} if query else {})
        return [{"port": "builtin", "state": "up", "reason": "", "tools": [clock]}]


class RawClient:
    """A client without manners: sends any bytes, sees every frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = LineDecoder(64 * 1024 * 1024)
        self._frames: list[ServerFrame] = []

    async def send(self, *frames: ClientFrame) -> None:
        for frame in frames:
            self.writer.write(encode(frame))
        await self.writer.drain()

    async def send_bytes(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def next(self) -> ServerFrame | None:
        """Return the next frame; None where the daemon has closed the connection."""
        async with asyncio.timeout(PATIENCE_S):
            while not self._frames:
                data = await self.reader.read(65_536)
                if not data:
                    return None
                for line in self._decoder.feed(data):
                    assert isinstance(line, bytes)
                    self._frames.append(decode_server(line))
        return self._frames.pop(0)

    async def until(self, kind: str) -> list[ServerFrame]:
        """Return the frames up to and with the first of this type."""
        seen: list[ServerFrame] = []
        while True:
            frame = await self.next()
            assert frame is not None, f"closed before {kind}: {seen}"
            seen.append(frame)
            if frame.type == kind:
                return seen

    async def ask(self, frame: ClientFrame) -> Any:
        """Send a request for data and return what the reply holds."""
        await self.send(frame)
        reply = (await self.until("reply"))[-1]
        assert isinstance(reply, Reply)
        return reply.data

    async def open(self, session: str, start: int = 1) -> list[ServerFrame]:
        await self.send(Open(session=session, create=True, start=start))
        return await self.until("caught_up")

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Daemon:
    """A served channel in the test's own event loop."""

    def __init__(self, home: Home, config: Config, engine: FakeEngine, server: ChannelServer) -> None:
        self.home, self.config, self.engine, self.server = home, config, engine, server

    @property
    def path(self) -> Path:
        return self.server.path

    @asynccontextmanager
    async def bare(self) -> AsyncIterator[RawClient]:
        """A connection without a greeting."""
        client = RawClient(*await asyncio.open_unix_connection(self.path))
        try:
            yield client
        finally:
            await client.close()

    @asynccontextmanager
    async def client(self, *, can_approve: bool = False) -> AsyncIterator[RawClient]:
        """A connection after its greeting."""
        async with self.bare() as client:
            await client.send(Hello(version=PROTOCOL_VERSION, can_approve=can_approve))
            await client.until("welcome")
            yield client


@asynccontextmanager
async def serving(home: Home, config: Config, engine: FakeEngine) -> AsyncIterator[Daemon]:
    """Serve a home for the time of a block."""
    async with ChannelServer(home, config, engine, release="1.2.3") as server:
        yield Daemon(home, config, engine, server)


def new_home(root: Path) -> Home:
    home = Home(root / "home")
    home.make()
    return home


def short_directory(request_finalizer: Callable[[Callable[[], object]], None]) -> Path:
    """A directory whose path leaves room for a socket's name, wherever pytest puts its own."""
    directory = tempfile.TemporaryDirectory(prefix="lc-", dir=os.environ.get("XDG_RUNTIME_DIR"))
    request_finalizer(directory.cleanup)
    return Path(directory.name)
