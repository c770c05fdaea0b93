import asyncio
import json
import os
from itertools import pairwise
from typing import Any

import pytest

from loopd.errors import ReplayViolation, SessionIoError, ToolError
from loopd.proto.frames import Delta, Prefill, RecordFrame
from loopd.proto.records import Assistant, ToolResult, TurnEnd
from loopd.session.store import Session
from loopd.tools.port import Outcome, Tool
from tests.tools.fake import FakePort, tool
from tests.turn.conftest import Bench, MakeBench, call

STEP = ["user", "assistant", "usage", "turn_end"]


async def cancelled_at(bench: Bench, gate: str, **say: str) -> Any:
    """Start a turn, wait until the model waits at `gate`, cancel it, and return its last frame."""
    turn = asyncio.ensure_future(bench.say(**say))
    await asyncio.wait_for(bench.server.gate(gate).reached.wait(), 30)
    turn.cancel()
    return await turn


async def test_a_turn_without_tools_is_one_batch_shown_after_it_is_durable(bench: MakeBench) -> None:
    b = await bench({"text": "Hi there.", "reasoning": "A greeting."})
    end = await b.say("Hello.")
    assert (end.reason, end.recorded, end.text) == ("completed", True, None)
    assert b.kinds() == STEP
    assert [frame.line for frame in b.frames if isinstance(frame, RecordFrame)] == [2, 3, 4, 5]
    assert "".join(frame.text for frame in b.frames if isinstance(frame, Delta)) == "Hi there."
    assert any(isinstance(frame, Prefill) for frame in b.frames)


async def test_a_request_is_the_baseline_and_the_log_and_extends_the_one_before(bench: MakeBench) -> None:
    b = await bench({"tool_calls": [call("nothing")]}, {"text": "No such tool."})
    for number in range(3):
        await b.say(f"Text {number}.", key=f"k{number}")
    bodies = b.server.requests
    assert len(bodies) == 4
    for before, after in pairwise(bodies):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert after["tools"] == before["tools"]
    usages = [record for _, record in b.session.records() if record.type == "usage"]
    assert [usage.loss for usage in usages] == [0, 0, 0, 0]


async def test_a_cancel_in_mid_stream_leaves_nothing_in_the_log_and_gives_the_text_back(bench: MakeBench) -> None:
    b = await bench({"text": "A long answer. " * 9, "gate": "g"})
    before = b.log()
    end = await cancelled_at(b, "g", text="Tell me.")
    assert (end.reason, end.recorded, end.text) == ("cancelled", False, "Tell me.")
    assert b.log() == before
    assert (await b.say("Tell me.")).reason == "completed"


async def test_a_cancel_in_mid_prefill_is_answered_before_the_answer_begins(bench: MakeBench) -> None:
    b = await bench({"text": "Late.", "prefill_gate": "g"})
    assert (await cancelled_at(b, "g")).reason == "cancelled"
    assert b.kinds() == []


async def test_a_cancel_in_mid_tool_gives_every_call_a_result(bench: MakeBench) -> None:
    started = asyncio.Event()

    async def behaviour(name: str, _arguments: dict[str, Any]) -> Outcome:
        if name == "quick":
            return Outcome(ok=True, content="done")
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    port = FakePort("p", tool("quick"), tool("slow"), behaviour=behaviour)
    b = await bench({"tool_calls": [call("p.quick"), call("p.slow")]}, ports=(port,))
    turn = asyncio.ensure_future(b.say())
    await asyncio.wait_for(started.wait(), 30)
    turn.cancel()
    end = await turn
    assert (end.reason, end.recorded) == ("cancelled", True)
    assert b.kinds() == ["user", "assistant", "usage", "tool_result", "tool_result", "turn_end"]
    assert b.results() == ["done", "Not run to its end: the turn was cancelled."]
    assert (await b.say("Go on.", key="k2")).reason == "completed"


async def test_tools_that_only_read_run_side_by_side_and_are_recorded_in_call_order(bench: MakeBench) -> None:
    second_done = asyncio.Event()

    async def behaviour(name: str, _arguments: dict[str, Any]) -> Outcome:
        if name == "first":
            await second_done.wait()
        else:
            second_done.set()
        return Outcome(ok=True, content=name)

    port = FakePort("p", tool("first"), tool("second"), behaviour=behaviour)
    b = await bench({"tool_calls": [call("p.first"), call("p.second")]}, ports=(port,))
    assert (await asyncio.wait_for(b.say(), 30)).reason == "completed"
    assert b.results() == ["first", "second"]


async def test_tools_that_write_run_one_after_another(bench: MakeBench) -> None:
    running: list[str] = []

    async def behaviour(name: str, _arguments: dict[str, Any]) -> Outcome:
        assert running == []
        running.append(name)
        await asyncio.sleep(0)
        running.remove(name)
        return Outcome(ok=True, content=name)

    tools = [Tool(name, "", {"type": "object"}, effect="write") for name in ("first", "second")]
    b = await bench(
        {"tool_calls": [call("p.first"), call("p.second")]},
        ports=(FakePort("p", *tools, behaviour=behaviour),),
        tools={"policy": {"write": "allow"}},
    )
    await b.say()
    assert b.results() == ["first", "second"]


async def test_call_numbers_go_on_over_turns_whatever_ids_the_model_gives(bench: MakeBench) -> None:
    step = {"tool_calls": [call("nothing")]}
    b = await bench(step, {"text": "a"}, step, {"text": "b"})
    await b.say(key="k1")
    await b.say(key="k2")
    results = [record for _, record in b.session.records() if isinstance(record, ToolResult)]
    assert [result.call for result in results] == [1, 2]
    assert results[0].id == results[1].id == "call_0"


@pytest.mark.parametrize(
    ("limits", "steps", "reason", "named"),
    [
        ({"max_steps": 2}, [{"tool_calls": [call("a")]}, {"tool_calls": [call("b")]}], "step_limit", "max_steps = 2"),
        ({"max_tool_calls": 1}, [{"tool_calls": [call("a"), call("b")]}], "tool_limit", "max_tool_calls = 1"),
        ({"max_same_call": 3}, [{"tool_calls": [call("a")]}] * 220, "repeated_call", "max_same_call = 3"),
        (
            {"max_completion_tokens": 4},
            [{"text": "one two three four five six"}],
            "length",
            "max_completion_tokens = 4",
        ),
    ],
)
async def test_a_limit_ends_the_turn_with_its_name_and_value_and_the_next_turn_goes_on(
    bench: MakeBench, limits: dict[str, int], steps: list[dict[str, Any]], reason: str, named: str
) -> None:
    b = await bench(*steps, script={"default": {"text": "ok"}}, loop=limits)
    end = await b.say()
    assert (end.reason, end.recorded) == (reason, True)
    assert named in end.message
    last = list(b.session.records())[-1][1]
    assert isinstance(last, TurnEnd)
    assert last.reason == reason
    assert b.session.open_turn is None
    b.server.script = b.server.script.model_copy(update={"steps": ()})
    assert (await b.say(key="k2")).reason == "completed"


async def test_the_same_failing_call_220_times_is_220_results_where_the_limits_allow_it(bench: MakeBench) -> None:
    async def broken(_name: str, _arguments: dict[str, Any]) -> Outcome:
        raise ToolError("the door is locked")

    port = FakePort("p", tool("open"), behaviour=broken)
    limits = {"max_same_call": 1000, "max_steps": 1000, "max_tool_calls": 1000}
    b = await bench(
        *[{"tool_calls": [call("p.open")]}] * 220, ports=(port,), script={"context_tokens": 100_000}, loop=limits
    )
    assert (await b.say()).reason == "completed"
    assert b.results() == ["the door is locked"] * 220
    usages = [record for _, record in b.session.records() if record.type == "usage"]
    assert {usage.loss for usage in usages} == {0}
    assert b.parts.mends.describe()["scripted"]["calls"] == 220


async def test_the_wall_time_ends_a_turn_in_mid_stream_unrecorded(bench: MakeBench) -> None:
    b = await bench({"text": "never ends", "gate": "g"}, loop={"turn_timeout_s": 0.2})
    end = await b.say("Tell me.")
    assert (end.reason, end.recorded, end.text) == ("deadline", False, "Tell me.")
    assert "turn_timeout_s = 0.2" in end.message
    assert b.kinds() == []


async def test_the_wall_time_ends_a_turn_in_mid_tool_with_a_result_for_the_call(bench: MakeBench) -> None:
    async def behaviour(_name: str, _arguments: dict[str, Any]) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError

    port = FakePort("p", tool("slow"), behaviour=behaviour)
    b = await bench({"tool_calls": [call("p.slow")]}, ports=(port,), loop={"turn_timeout_s": 0.3})
    end = await b.say()
    assert (end.reason, end.recorded) == ("deadline", True)
    assert b.kinds()[-2:] == ["tool_result", "turn_end"]


async def test_a_step_that_would_not_fit_is_refused_before_it_is_sent_with_the_numbers(bench: MakeBench) -> None:
    b = await bench(script={"context_tokens": 700})
    assert (await b.say("Short.", key="k1")).reason == "completed"
    sent = len(b.server.requests)
    end = await b.say("word " * 400, key="k2")
    assert (end.reason, end.code, end.recorded) == ("context_full", "context_full", False)
    assert "700" in end.message
    assert len(b.server.requests) == sent
    assert (await b.say("Short again.", key="k3")).reason == "completed"


async def test_a_model_error_gives_the_text_back_and_leaves_the_log_as_it_was(bench: MakeBench) -> None:
    b = await bench({"error": {"status": 500, "type": "server_error", "message": "boom"}})
    end = await b.say("Hello.")
    assert (end.reason, end.code, end.recorded, end.text) == ("model_error", "model_rejected", False, "Hello.")
    assert "boom" in end.message
    assert b.kinds() == []


async def test_a_model_error_after_a_tool_ends_the_turn_on_disk(bench: MakeBench) -> None:
    b = await bench({"tool_calls": [call("nothing")]}, {"error": {"status": 500}})
    end = await b.say()
    assert (end.reason, end.recorded) == ("model_error", True)
    assert b.kinds() == ["user", "assistant", "usage", "tool_result", "turn_end"]


@pytest.mark.parametrize("arguments", ['{"a":', "", "null", "[1]", '""', "not json", '{"a": NaN}', '{"a": 1e999}'])
async def test_arguments_that_are_no_object_give_a_result_and_a_history_that_the_server_takes(
    bench: MakeBench, arguments: str
) -> None:
    b = await bench({"tool_calls": [{"name": "call_tool", "arguments": arguments}]}, {"text": "I see."})
    assert (await b.say()).reason == "completed"
    assert (await b.say(key="k2")).reason == "completed"
    for body in b.server.requests:
        for message in body["messages"]:
            for sent in message.get("tool_calls", ()):
                assert isinstance(json.loads(sent["function"]["arguments"]), dict)


async def test_a_call_whose_intent_cannot_be_audited_is_not_run(bench: MakeBench) -> None:
    ran: list[str] = []

    async def behaviour(name: str, _arguments: dict[str, Any]) -> Outcome:
        ran.append(name)
        return Outcome(ok=True, content="")

    b = await bench({"tool_calls": [call("p.t")]}, ports=(FakePort("p", tool("t"), behaviour=behaviour),))
    b.parts.audit_log, b.parts.audit_fault = None, "the disk is full"
    assert (await b.say()).reason == "completed"
    assert ran == []
    assert "Not run" in b.results()[0]


async def test_a_request_that_would_not_extend_the_last_one_is_not_sent(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = await bench()
    await b.say(key="k1")

    def violated(_self: Session, _text: str | None) -> Any:
        raise ReplayViolation("the history was rewritten")

    monkeypatch.setattr(Session, "request", violated)
    end = await b.say("Again.", key="k2")
    assert (end.code, end.recorded, len(b.server.requests)) == ("replay_violation", False, 1)


async def test_a_disk_that_refuses_the_batch_is_a_typed_end_and_the_session_goes_on(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = await bench()
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        if b'"type":"user"' in data:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    end = await b.say("Hello.")
    assert (end.reason, end.code, end.recorded, end.text) == ("interrupted", "session_io", False, "Hello.")
    monkeypatch.undo()
    assert (await b.say("Hello.")).reason == "completed"


async def test_a_turn_that_a_crash_left_open_is_ended_and_nothing_runs_again(bench: MakeBench) -> None:
    b = await bench({"tool_calls": [call("p.t"), call("p.t", again=1)]}, ports=(FakePort("p", tool("t")),))

    def crash(*_: object) -> None:
        raise SessionIoError("s", b.parts.home.path, "write", OSError(5, "pulled plug"))

    append = b.session.append
    b.session.append = lambda *records: crash() if records[0].type == "tool_result" else append(*records)  # type: ignore[method-assign]  # the plug is pulled at the first result
    await b.say()
    b.session.append = append  # type: ignore[method-assign]  # and the power is back
    assert b.kinds() == ["user", "assistant", "usage"]
    await b.engine.recover(b.session, b.frames.append)
    assert b.kinds() == ["user", "assistant", "usage", "tool_result", "tool_result", "turn_end"]
    assert all("unknown" in result for result in b.results())
    assert len(b.server.requests) == 1
    assert (await b.say("Go on.", key="k2")).reason == "completed"


async def test_a_template_that_refuses_a_user_message_after_a_result_gets_a_closing_record(bench: MakeBench) -> None:
    b = await bench({"tool_calls": [call("a")]}, {"error": {"status": 500}})
    check = await b.parts.watch.current()
    forms = check.forms.model_copy(update={"user_after_tool": False})
    b.parts.watch._check = check.model_copy(update={"forms": forms})
    assert (await b.say()).reason == "model_error"
    closing = list(b.session.records())[-2][1]
    assert isinstance(closing, Assistant)
    assert (closing.origin, b.kinds()[-2:]) == ("loopd", ["assistant", "turn_end"])


async def test_the_same_inputs_give_the_same_records_but_for_times(bench: MakeBench) -> None:
    b = await bench({"tool_calls": [call("nothing")], "text": "Let me see."}, {"text": "No."})
    await b.say()
    first = _without_times(b)
    b.session.close()
    b.server.requests.clear()
    b.server.restart()
    b.session = Session.create(b.parts.home, "again", b.session.baseline, owner_uid=0, limits=b.parts.config.loop)
    await b.say()
    assert _without_times(b) == first
    b.session.close()


def _without_times(bench: Bench) -> list[dict[str, Any]]:
    records = [record.model_dump() for _, record in bench.session.records()]
    return [
        {key: value for key, value in record.items() if key != "at" and not key.endswith("_ms")} for record in records
    ]


async def test_text_that_a_log_cannot_hold_is_made_sound(bench: MakeBench) -> None:
    b = await bench({"text": "a\x00b"})
    end = await b.say("nul \x00 here", key="k")
    assert (end.reason, end.recorded) == ("completed", True)
    assert b"\\u0000" not in b.log()
