"""Policy, approvals and the audit log around the calls of a turn (SPEC 6, 7)."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from loopd.audit import AuditLog
from loopd.config import Config
from loopd.errors import AuditError, SessionIoError
from loopd.proto.frames import ApprovalDecided, ApprovalRequest, RecordFrame, ToolStarted
from loopd.tools.port import Outcome, Tool
from tests.tools.fake import FakePort
from tests.turn.conftest import Bench, MakeBench, call

PATIENCE_S = 30.0
OBJECT: dict[str, Any] = {"type": "object"}


class Work:
    """A port with tools that read and write, and what was run of them."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        tools = [Tool(name, "", OBJECT, effect="write") for name in ("write", "remove")]
        self.port = FakePort("files", *tools, Tool("read", "", OBJECT), Tool("look", "", OBJECT), behaviour=self.run)

    async def run(self, name: str, arguments: dict[str, Any]) -> Outcome:
        self.ran.append(name)
        return Outcome(ok=True, content=f"{name} done")


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.fixture
def at_work(bench: MakeBench, work: Work) -> Callable[..., Any]:
    async def make(*calls: dict[str, Any], policy: dict[str, Any] | None = None, **loop: Any) -> Bench:
        steps = ({"tool_calls": list(calls)}, {"text": "Fine."})
        return await bench(*steps * 3, ports=(work.port,), tools={"policy": policy or {}}, loop=loop)

    return make


MakeWork = Callable[..., Any]


def with_policy(bench: Bench, **policy: Any) -> None:
    """Read another configuration, as at SIGHUP."""
    tables = bench.parts.config.model_dump(exclude={"tools"}) | {"tools": {"policy": policy}}
    bench.parts.config = Config.model_validate(tables)


async def test_a_question_tells_the_tool_what_it_will_be_run_with_its_effect_and_what_asks(at_work: MakeWork) -> None:
    b = await at_work({"name": "write", "arguments": '{"path": "/x", "arguments.text": "h\\u00e9\\ud800"}'})
    b.choices = ["once"]
    assert (await b.say()).reason == "completed"
    assert b.shown(ApprovalRequest) == [
        ApprovalRequest(
            session="s",
            call=1,
            name="files.write",
            arguments='{"path":"/x","text":"hé\ufffd"}',
            effect="write",
            rule='[tools.policy] write = "ask"',
            seconds=300.0,
        )
    ]


async def test_a_call_that_is_allowed_once_runs_and_the_next_one_is_asked_again(at_work: MakeWork, work: Work) -> None:
    b = await at_work(call("files.write", n=1), call("files.write", n=2))
    b.choices = ["once", "deny"]
    await b.say()
    assert work.ran == ["write"]
    first, second = b.tool_results()
    assert (first.ok, first.content, first.approval) == (True, "write done", "allowed once by user 7")
    assert (second.ok, second.approval) == (False, "denied by user 7")
    assert second.content == (
        "Not run: files.write must be allowed by a person, and it was denied by user 7."
        " Do not repeat the call: ask what to do instead, or go on without it."
    )
    assert [frame.call for frame in b.shown(ToolStarted)] == [1]


async def test_an_approval_for_the_session_holds_for_that_tool_only_over_turns(at_work: MakeWork, work: Work) -> None:
    b = await at_work(call("files.write", n=1), call("files.write", n=2), call("files.remove"))
    b.choices = ["session", "once"]
    await b.say()
    assert [request.name for request in b.shown(ApprovalRequest)] == ["files.write", "files.remove"]
    assert [result.approval for result in b.tool_results()] == [
        "allowed for the session by user 7",
        "allowed for the session by user 7",
        "allowed once by user 7",
    ]
    b.choices = ["deny"]
    await b.say(key="k2")
    assert work.ran == ["write", "write", "remove", "write", "write"], "remove is asked again"


async def test_a_session_that_is_opened_anew_asks_again(at_work: MakeWork) -> None:
    b = await at_work(call("files.write"))
    b.choices = ["session"]
    await b.say()
    b.reopen()
    b.choices = ["deny"]
    await b.say(key="k2")
    assert len(b.shown(ApprovalRequest)) == 2


async def test_a_tool_that_became_another_one_is_asked_again(at_work: MakeWork, work: Work) -> None:
    b = await at_work(call("files.write"))
    b.choices = ["session", "deny"]
    await b.say()
    work.port.listed = (Tool("write", "Send it away.", OBJECT, effect="write"),)
    await b.say(key="k2")
    assert len(b.shown(ApprovalRequest)) == 2


async def test_a_deny_of_the_policy_asks_nobody_and_is_a_result_that_names_the_rule(
    at_work: MakeWork, work: Work
) -> None:
    b = await at_work(call("files.read"), policy={"deny": ["files.*"]})
    assert (await b.say()).reason == "completed"
    assert (work.ran, b.shown(ApprovalRequest), b.shown(ToolStarted)) == ([], [], [])
    result = b.tool_results()[0]
    assert (result.ok, result.approval) == (False, 'denied by policy: [tools.policy] deny = "files.*"')
    assert result.content == (
        'Not run: the policy of this device denies files.read ([tools.policy] deny = "files.*").'
        " Do not call it again: go on without it."
    )
    denied = b.audited()[0]
    assert (denied["event"], denied["rule"]) == ("tool_denied", '[tools.policy] deny = "files.*"')


async def test_a_deny_that_comes_while_a_call_waits_stands_against_the_approval(at_work: MakeWork, work: Work) -> None:
    b = await at_work(call("files.write"))
    turn = asyncio.ensure_future(b.say())
    await asyncio.wait_for(b.asked.wait(), PATIENCE_S)
    with_policy(b, deny=["files.*"])
    b.approvals.answer(1, "session", uid=7, pid=77)
    await asyncio.wait_for(turn, PATIENCE_S)
    assert work.ran == []
    assert "the policy of this device denies files.write" in b.results()[0]


async def test_a_deny_wins_against_an_approval_for_the_session_at_the_next_call(at_work: MakeWork, work: Work) -> None:
    b = await at_work(call("files.write"))
    b.choices = ["session"]
    await b.say()
    with_policy(b, deny=["files.write"])
    await b.say(key="k2")
    assert work.ran == ["write"]
    assert b.tool_results()[1].approval == 'denied by policy: [tools.policy] deny = "files.write"'


async def test_rules_for_a_session_count_in_that_session(at_work: MakeWork, work: Work) -> None:
    b = await at_work(call("files.write"), policy={"sessions": {"s*": {"allow": ["files.write"]}}})
    await b.say()
    assert work.ran == ["write"]
    assert b.shown(ApprovalRequest) == []


async def test_nobody_there_who_can_approve_is_a_result_at_once(at_work: MakeWork, work: Work) -> None:
    b = await at_work(call("files.write"))
    b.approvers = False
    assert (await b.say()).reason == "completed"
    assert (work.ran, b.shown(ApprovalRequest)) == ([], [])
    result = b.tool_results()[0]
    assert result.approval == "denied: nobody was there who could allow it"
    assert "it was denied: nobody was there who could allow it. Do not repeat the call" in result.content


async def test_no_answer_in_time_is_a_result_and_the_turn_goes_on(at_work: MakeWork, work: Work) -> None:
    b = await at_work(call("files.write"), approval_timeout_s=0.05)
    assert (await b.say()).reason == "completed"
    assert work.ran == []
    assert "nobody answered within 0.05 s" in b.results()[0]
    assert b.shown(ApprovalDecided)[0].decision == "deny"


async def test_a_cancel_while_a_call_waits_denies_it_and_what_follows_was_not_run(
    at_work: MakeWork, work: Work
) -> None:
    b = await at_work(call("files.write"), call("files.remove"))
    turn = asyncio.ensure_future(b.say())
    await asyncio.wait_for(b.asked.wait(), PATIENCE_S)
    turn.cancel()
    end = await turn
    assert (end.reason, end.recorded, work.ran) == ("cancelled", True, [])
    first, second = b.tool_results()
    assert first.approval == "denied: the turn was cancelled"
    assert first.content.startswith("Not run: files.write must be allowed by a person, and it was denied: the turn")
    assert second.content == "Not run: the turn was cancelled."
    approval = b.audited()[0]
    assert (approval["event"], approval["decision"], approval["uid"]) == ("approval", "deny", None)
    assert (await b.say("Go on.", key="k2")).reason == "completed"


async def test_waiting_for_an_answer_takes_none_of_the_turns_time_and_no_slot(
    at_work: MakeWork, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = await at_work(call("files.write"), turn_timeout_s=60.0)
    turn = asyncio.ensure_future(b.say())
    await asyncio.wait_for(b.asked.wait(), PATIENCE_S)
    assert [slot["busy"] for slot in b.parts.keeper.slots()] == [False]
    real = asyncio.get_running_loop().time
    monkeypatch.setattr("loopd.turn.loop.monotonic_s", lambda: real() + 3600)
    b.approvals.answer(1, "once", uid=7, pid=77)
    assert (await asyncio.wait_for(turn, PATIENCE_S)).reason == "completed"
    assert work.ran == ["write"]


async def test_what_asks_is_asked_in_call_order_and_what_reads_still_runs_side_by_side(
    at_work: MakeWork, work: Work
) -> None:
    both = asyncio.Barrier(2)

    async def together(name: str, arguments: dict[str, Any]) -> Outcome:
        await asyncio.wait_for(both.wait(), PATIENCE_S)
        return await work.run(name, arguments)

    work.port.behaviour = together
    b = await at_work(call("files.read"), call("files.look"), policy={"ask": ["files.*"]})
    b.choices = ["once", "once"]
    await b.say()
    assert [request.name for request in b.shown(ApprovalRequest)] == ["files.read", "files.look"]
    assert b.results() == ["read done", "look done"]


async def test_of_calls_that_write_each_is_asked_when_the_one_before_is_recorded(at_work: MakeWork) -> None:
    b = await at_work(call("files.write"), call("files.read"), call("files.remove"))
    b.choices = ["once", "once"]
    await b.say()
    order = [
        frame.type if isinstance(frame, ApprovalRequest) else f"result {frame.record['call']}"
        for frame in b.frames
        if isinstance(frame, ApprovalRequest)
        or (isinstance(frame, RecordFrame) and frame.record["type"] == "tool_result")
    ]
    assert order == ["approval_request", "result 1", "result 2", "approval_request", "result 3"]


async def test_the_audit_log_has_who_what_and_how_long_and_then_the_intent_before_the_tool_runs(
    at_work: MakeWork, work: Work
) -> None:
    b = await at_work(call("files.write", path="/x"), call("files.read", path="/y"))
    at_the_run: list[list[str]] = []

    async def look(name: str, arguments: dict[str, Any]) -> Outcome:
        at_the_run.append([record["event"] for record in b.audited()])
        return Outcome(ok=True, content="")

    work.port.behaviour = look
    b.choices = ["session"]
    await b.say()
    assert at_the_run == [["approval", "tool_call"], ["approval", "tool_call", "tool_end", "tool_call"]]
    approval, intent, end, plain, _ = b.audited()
    text = '{"path":"/x"}'
    what = {
        "session": "s",
        "call": 1,
        "tool": "files.write",
        "effect": "write",
        "arguments": text,
        "arguments_sha256": "sha256:" + hashlib.sha256(text.encode()).hexdigest(),
    }
    assert approval.items() >= (what | {"decision": "session", "uid": 7, "pid": 77, "reason": "by user 7"}).items()
    assert approval["rule"] == '[tools.policy] write = "ask"'
    assert intent.items() >= (what | {"rule": "allowed for the session by user 7"}).items()
    assert (end["event"], end["ok"]) == ("tool_end", True)
    assert (plain["effect"], plain["rule"]) == ("read", '[tools.policy] read = "allow"')


async def test_long_arguments_are_bounded_where_they_are_shown_and_audited(at_work: MakeWork) -> None:
    b = await at_work(call("files.write", text="x" * 100_000))
    b.choices = ["once"]
    await b.say()
    shown = b.shown(ApprovalRequest)[0].arguments
    assert len(shown) <= 4096
    assert "bytes left out" in shown
    assert all(len(record["arguments"]) <= 512 for record in b.audited() if "arguments" in record)


@pytest.mark.parametrize("event", ["approval", "tool_call"])
async def test_what_cannot_be_audited_is_not_run(
    at_work: MakeWork, work: Work, monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    real = AuditLog.append

    def full(self: AuditLog, name: str, **facts: Any) -> None:
        if name == event:
            raise AuditError("cannot write the audit log: No space left on device")
        real(self, name, **facts)

    monkeypatch.setattr(AuditLog, "append", full)
    b = await at_work(call("files.write"))
    b.choices = ["session"]
    assert (await b.say()).reason == "completed"
    assert work.ran == []
    result = b.tool_results()[0]
    assert result.content == "Not run: cannot write the audit log: No space left on device."
    assert result.approval == "allowed for the session by user 7"
    monkeypatch.undo()
    b.choices = ["deny"]
    await b.say(key="k2")
    assert work.ran == (["write"] if event == "tool_call" else []), "an approval that is not audited does not hold"


async def test_the_calls_of_each_model_are_counted_by_how_they_were_written(at_work: MakeWork) -> None:
    b = await at_work(call("files.read"), {"name": "read", "arguments": "{}"}, call("files.nothing"))
    await b.say()
    counted = (await b.engine.status())["tool_calls"]
    assert counted == {
        "scripted": {
            "calls": 3,
            "mended": 1,
            "mended_how": {"inner_name": 1, "short_name": 1},
            "refused": 1,
            "refused_why": {"unknown_tool": 1},
        }
    }


# --- after a crash ------------------------------------------------------------------------------------------------


def pull_the_plug(bench: Bench) -> Callable[[], None]:
    """Let nothing more be written to the session; return what brings the power back."""
    append = bench.session.append

    def off(*_records: object) -> None:
        raise SessionIoError("s", bench.parts.home.path, "write", OSError(5, "pulled plug"))

    bench.session.append = off  # type: ignore[method-assign]  # the plug is pulled

    def on() -> None:
        bench.session.append = append  # type: ignore[method-assign]  # and the power is back

    return on


async def crash_in(bench: Bench, reached: asyncio.Event) -> None:
    """End a turn where it is, without any record of that, and recover."""
    turn = asyncio.ensure_future(bench.say())
    await asyncio.wait_for(reached.wait(), PATIENCE_S)
    on = pull_the_plug(bench)
    turn.cancel()
    await turn
    on()
    await bench.engine.recover(bench.session, bench.frames.append)


async def test_a_crash_while_a_call_waits_for_approval_leaves_a_result_that_says_it_never_began(
    at_work: MakeWork, work: Work
) -> None:
    b = await at_work(call("files.write"), call("files.remove"))
    await crash_in(b, b.asked)
    assert work.ran == []
    assert b.results() == ["Not run: loopd stopped before this call began. It had no effect."] * 2
    assert (await b.say("Go on.", key="k2")).reason == "completed"


async def test_a_crash_in_mid_tool_leaves_exactly_one_unknown_outcome_and_runs_nothing_again(
    at_work: MakeWork, work: Work
) -> None:
    started = asyncio.Event()

    async def endless(name: str, arguments: dict[str, Any]) -> Outcome:
        work.ran.append(name)
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    work.port.behaviour = endless
    b = await at_work(call("files.write"), call("files.remove"))
    b.choices = ["once"]
    await crash_in(b, started)
    unknown, never = b.results()
    assert unknown.startswith("The outcome of this call is unknown: loopd stopped while it ran")
    assert never.startswith("Not run")
    assert work.ran == ["write"]
    assert (await b.say("Go on.", key="k2")).reason == "completed"
    assert work.ran == ["write"]


async def test_where_the_audit_log_does_not_reach_back_to_the_beginning_every_outcome_is_unknown(
    at_work: MakeWork,
) -> None:
    b = await at_work(call("files.write"))
    for path in b.parts.home.audit.iterdir():
        path.unlink()
    await crash_in(b, b.asked)
    assert b.results()[0].startswith("The outcome of this call is unknown")
