"""A turn loop over the scripted model, in this process: every part but the model is the real one."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from loopd.audit import AuditLog
from loopd.config import Config
from loopd.home import Home
from loopd.model.client import ModelClient
from loopd.model.keeper import StateKeeper
from loopd.model.script import Script
from loopd.model.scripted import ScriptedServer
from loopd.model.slots import SlotPool
from loopd.model.watch import ModelWatch
from loopd.proto.frames import ApprovalRequest, Choice, ServerFrame, TurnEndFrame
from loopd.proto.records import ToolResult
from loopd.session.store import Session
from loopd.tools.children import Children
from loopd.tools.port import ToolPort
from loopd.tools.registry import Registry
from loopd.turn.approvals import Approvals
from loopd.turn.engine import Engine
from loopd.turn.parts import Parts
from tests.tools.fake import planned

Shown = TypeVar("Shown", bound=ServerFrame)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A call of a real tool, as a model would make it."""
    return {"name": "call_tool", "arguments": json.dumps({"name": name, "arguments": arguments})}


@dataclass
class Bench:
    """One session and what its turns need."""

    server: ScriptedServer
    parts: Parts
    session: Session
    frames: list[ServerFrame] = field(default_factory=list)
    approvers: bool = True
    choices: list[Choice] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        """Forget what was allowed for the session, as when the daemon has closed it."""
        self.approvals = Approvals(lambda: self.approvers)

    def emit(self, frame: ServerFrame) -> None:
        """Take a frame; a question is answered with the next of the choices, where there is one."""
        self.frames.append(frame)
        if isinstance(frame, ApprovalRequest):
            self.asked.set()
            if self.choices:
                self.approvals.answer(frame.call, self.choices.pop(0), uid=7, pid=77)

    @property
    def engine(self) -> Engine:
        return Engine(self.parts)

    async def say(self, text: str = "Hello.", key: str = "k1") -> TurnEndFrame:
        return await self.engine.run_turn(self.session, text, key, self.emit, self.approvals)

    def kinds(self) -> list[str]:
        """The types of the records, without the first line."""
        return [record.type for _, record in self.session.records(2)]

    def results(self) -> list[str]:
        return [result.content for result in self.tool_results()]

    def tool_results(self) -> list[ToolResult]:
        return [record for _, record in self.session.records() if isinstance(record, ToolResult)]

    def shown(self, kind: type[Shown]) -> list[Shown]:
        """The frames of a type so far."""
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def audited(self) -> list[dict[str, Any]]:
        """The audit records about the session's calls."""
        lines = [line for path in sorted(self.parts.home.audit.iterdir()) for line in path.read_bytes().splitlines()]
        return [record for line in lines if "call" in (record := json.loads(line))]

    def log(self) -> bytes:
        return (self.parts.home.sessions / self.session.id / "0.jsonl").read_bytes()


class MakeBench:
    """Makes benches: a script, ports and tables in, a session out."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        self._directory, self._stack = directory, stack

    async def __call__(
        self,
        *steps: dict[str, Any],
        ports: tuple[ToolPort, ...] = (),
        script: dict[str, Any] | None = None,
        **tables: dict[str, Any],
    ) -> Bench:
        return await self._stack.enter_async_context(_bench(self._directory, steps, ports, script or {}, tables))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[MakeBench]:
    async with AsyncExitStack() as stack:
        yield MakeBench(tmp_path, stack)


@asynccontextmanager
async def _bench(
    directory: Path,
    steps: tuple[dict[str, Any], ...],
    ports: tuple[ToolPort, ...],
    script: dict[str, Any],
    tables: dict[str, dict[str, Any]],
) -> AsyncIterator[Bench]:
    config = Config.model_validate(tables)
    home = Home(directory / "home")
    home.make()
    script = {"steps": list(steps), "default": {"text": "Fine."}, **script}
    async with AsyncExitStack() as stack:
        url = f"unix:{directory / 'm.sock'}"
        server = await stack.enter_async_context(ScriptedServer(Script.model_validate(script), url))
        client = ModelClient.from_config(config.model, url)
        stack.push_async_callback(client.close)
        pool = SlotPool(None, client)
        keeper = StateKeeper(home.slots, client, pool, table=lambda: config.model)
        audit_log = AuditLog.open(home.audit)
        stack.callback(audit_log.close)
        registry = Registry(planned(*ports), config.tools)
        stack.callback(registry.close)
        children = Children(lambda: config.tools, home.path / "run" / "tools")
        watch = ModelWatch(home, client, pool, keeper)
        parts = Parts(home, config, client, pool, keeper, watch, registry, audit_log, children)
        baseline = await Engine(parts).baseline(print)
        audit_log.append("session_created", session="s")
        session = Session.create(home, "s", baseline, owner_uid=0, limits=config.loop)
        stack.callback(session.close)
        yield Bench(server, parts, session)
