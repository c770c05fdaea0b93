"""After every end of a turn the next one is answered, whatever the chat template insists on (SPEC 5, 4.3).

The real server renders, tokenises and answers with each template; what the model is to have said where it should
call tools or fail is put in before the request is sent, so that every kind of end comes at its worst place: behind
a tool result.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loopd.audit import AuditLog
from loopd.clock import monotonic_s
from loopd.config import Config
from loopd.errors import ModelProtocolError
from loopd.home import Home
from loopd.model.client import Completion, CompletionRequest, Event, ModelClient, ProducedCall
from loopd.model.keeper import StateKeeper
from loopd.model.slots import SlotPool
from loopd.model.watch import ModelWatch
from loopd.proto.frames import ServerFrame, TurnEndFrame
from loopd.proto.records import Assistant, TurnEndReason, User
from loopd.proto.usage import Reported, usage_record
from loopd.session import reader
from loopd.session.replay import tool_call
from loopd.session.store import Session
from loopd.tools.children import Children
from loopd.tools.registry import Registry
from loopd.turn import loop
from loopd.turn.approvals import Approvals
from loopd.turn.engine import Engine
from loopd.turn.parts import Parts
from tests.model.test_templates import TEMPLATES
from tests.model.tiny_gguf import make_tiny_gguf
from tests.servers import model_file, start_model_server
from tests.tools.fake import FakePort, planned, tool

NAMES = ("chatml", "drops-reasoning", "dated", "alternating", "no-system")
ARGUMENTS = '{"name": "p.work", "arguments": {"n": %d}}'

Answer = Callable[[], Awaitable[Completion]]


def says(text: str, *calls: int, finish_reason: str | None = None, reasoning: str = "") -> Answer:
    """An answer with a call of the working tool for each number."""

    async def answer() -> Completion:
        made = tuple(ProducedCall(f"call{at}", "call_tool", ARGUMENTS % number) for at, number in enumerate(calls))
        reason: Any = finish_reason or ("tool_calls" if made else "stop")
        return Completion(text, reasoning, made, reason, Reported())

    return answer


class Prompted(ModelClient):
    """A client of the real server whose next answers may be put in."""

    answers: list[Answer]

    async def complete(self, request: CompletionRequest, on_event: Callable[[Event], None]) -> Completion:
        if not self.answers:
            return await super().complete(request, on_event)
        prompt = await self.render(request.messages, request.tools, options=request.template_options)
        assert prompt, "also a request whose answer is put in is one that the template takes"
        return await self.answers.pop(0)()


@dataclass
class Talk:
    """One session whose turns the real server answers unless told otherwise."""

    parts: Parts
    client: Prompted
    session: Session
    frames: list[ServerFrame] = field(default_factory=list)
    turns: int = 0

    async def say(self, *answers: Answer, text: str = "And now?") -> TurnEndFrame:
        self.turns += 1
        self.client.answers = [*answers]
        nobody = Approvals(lambda: False)
        end = await Engine(self.parts).run_turn(self.session, text, f"k{self.turns}", self.frames.append, nobody)
        assert self.client.answers == []
        return end

    def limits(self, **values: Any) -> None:
        """Set `[loop]` anew; defaults where nothing is given."""
        self.parts.config = Config.model_validate({"loop": values})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    make_tiny_gguf(model_file(), path, answer=("It", "Ġworks", "."))
    return path


@pytest.fixture(params=NAMES)
def url(request: pytest.FixtureRequest, tiny: Path, tmp_path: Path) -> Iterator[str]:
    template = str(TEMPLATES / f"{request.param}.jinja")
    with start_model_server(tmp_path / "m.sock", gguf=tiny, template=template) as served:
        yield served


@pytest.fixture
async def talk(url: str, tmp_path: Path) -> AsyncIterator[Talk]:
    async with talking(url, tmp_path) as talking_to:
        yield talking_to


@asynccontextmanager
async def talking(url: str, tmp_path: Path) -> AsyncIterator[Talk]:
    home, config = Home(tmp_path / "home"), Config()
    home.make()
    async with AsyncExitStack() as stack:
        client = Prompted.from_config(config.model, url)
        assert isinstance(client, Prompted)
        client.answers = []
        stack.push_async_callback(client.close)
        pool = SlotPool(None, client)
        keeper = StateKeeper(home.slots, client, pool, table=lambda: config.model)
        audit_log = AuditLog.open(home.audit)
        stack.callback(audit_log.close)
        registry = Registry(planned(FakePort("p", tool("work"))), config.tools)
        stack.callback(registry.close)
        children = Children(lambda: config.tools, home.path / "run" / "tools")
        watch = ModelWatch(home, client, pool, keeper)
        parts = Parts(home, config, client, pool, keeper, watch, registry, audit_log, children)
        baseline = await Engine(parts).baseline(lambda _why: None)
        session = Session.create(home, "s", baseline, owner_uid=0, limits=config.loop)
        stack.callback(session.close)
        yield Talk(parts, client, session)


async def end_by_deadline(talk: Talk) -> TurnEndFrame:
    with pytest.MonkeyPatch.context() as patch:

        async def late() -> Completion:
            patch.setattr(loop, "monotonic_s", lambda: monotonic_s() + 10_000)
            return await says("", 1)()

        return await talk.say(late)


async def end_by_context(talk: Talk) -> TurnEndFrame:
    room = talk.parts.watch.context_tokens

    async def fill_up() -> Completion:
        talk.parts.watch.context_tokens = 16
        return await says("", 1)()

    try:
        return await talk.say(fill_up)
    finally:
        talk.parts.watch.context_tokens = room


async def end_by_cancel(talk: Talk) -> TurnEndFrame:
    reached = asyncio.Event()

    async def never() -> Completion:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    turn = asyncio.ensure_future(talk.say(says("", 1), never))
    await asyncio.wait_for(reached.wait(), 30)
    turn.cancel()
    return await turn


async def end_by_error(talk: Talk) -> TurnEndFrame:
    async def fail() -> Completion:
        raise ModelProtocolError("it broke off")

    return await talk.say(says("", 1), fail)


async def end_by_crash(talk: Talk) -> TurnEndReason:
    """Leave a turn as a crash in its tool call would."""
    session, at = talk.session, "2026-12-01T14:00:00.000000Z"
    request = session.request("Hello?")
    call = tool_call("call0", "call_tool", ARGUMENTS % 1, session.baseline.arguments)
    usage = usage_record(
        Reported(),
        at=at,
        expected=None,
        loss=None,
        cause=None,
        slot=0,
        request_bytes=request.request_bytes,
        request_sha256=request.request_sha256,
    )
    said = Assistant(at=at, text="", tool_calls=(call,), finish_reason="tool_calls", origin="model")
    session.append(User(at=at, text="Hello?", key="crash"), said, usage)
    await Engine(talk.parts).recover(session, talk.frames.append)
    (last,) = (record for _, record in session.records(session.lines))
    assert last.type == "turn_end"
    return last.reason


async def test_every_end_of_a_turn_stays_answerable(talk: Talk) -> None:
    async def goes_on(reason: TurnEndReason, wanted: TurnEndReason) -> None:
        assert reason == wanted
        talk.limits()
        end = await talk.say()
        assert (end.reason, end.message) == ("completed", ""), wanted

    await goes_on((await talk.say()).reason, "completed")
    await goes_on((await talk.say(says("", 1), says("Done."))).reason, "completed")
    await goes_on((await talk.say(says("", 1, 2), says("Let me see.", 3), says("Done."))).reason, "completed")
    await goes_on((await talk.say(says("Cut in", finish_reason="length"))).reason, "length")
    await goes_on((await talk.say(says("", 1), says("", finish_reason="length"))).reason, "length")
    await goes_on((await talk.say(says("", 1, finish_reason="length"))).reason, "length")
    talk.limits(max_steps=2)
    await goes_on((await talk.say(says("", 1), says("", 2))).reason, "step_limit")
    talk.limits(max_tool_calls=1)
    await goes_on((await talk.say(says("Two.", 1, 2))).reason, "tool_limit")
    talk.limits(max_same_call=2)
    await goes_on((await talk.say(says("", 1), says("", 1))).reason, "repeated_call")
    await goes_on((await end_by_deadline(talk)).reason, "deadline")
    await goes_on((await end_by_context(talk)).reason, "context_full")
    await goes_on((await end_by_cancel(talk)).reason, "cancelled")
    await goes_on((await end_by_error(talk)).reason, "model_error")
    await goes_on(await end_by_crash(talk), "interrupted")
    await Engine(talk.parts).compact(talk.session, talk.frames.append, uid=0, pid=0)
    await goes_on("completed", "completed")
    assert {usage.loss for _, _, usage in reader.usages(talk.parts.home, "s") if usage.loss is not None} == {0}
    assert reader.verify(talk.parts.home, "s").faults == ()


@pytest.mark.parametrize("name", ["drops-reasoning"])
async def test_reasoning_that_the_template_takes_back_is_a_loss_that_is_named(name: str, tmp_path: Path) -> None:
    answer = ("<think>", "\nhmm\n", "</think>", "\n\n", "It works.")
    make_tiny_gguf(model_file(), tmp_path / "tiny.gguf", answer=answer, pieces=answer)
    template = str(TEMPLATES / f"{name}.jinja")
    with start_model_server(tmp_path / "m.sock", gguf=tmp_path / "tiny.gguf", template=template) as url:
        async with talking(url, tmp_path) as talk:
            ends = [(await talk.say()).reason for _ in range(3)]
            usages = [usage for _, _, usage in reader.usages(talk.parts.home, "s")]
    assert ends == ["completed"] * 3
    first, *later = usages
    assert (first.loss, first.completion_tokens) == (0, len(answer) + 1)
    for usage in later:
        assert usage.cause is not None
        assert usage.cause.name == "history_rewritten"
        assert 0 < (usage.loss or 0) <= len(answer) + 1
