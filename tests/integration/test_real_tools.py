"""The small real model calls tools by itself once its history shows how; every request extends the one before."""

import json
from typing import Any

import pytest

from loopd.clock import now
from loopd.config import LoopTable
from loopd.home import Home
from loopd.proto.records import Assistant, Record, ToolResult, TurnEnd, User
from loopd.proto.usage import Reported, usage_record
from loopd.session.replay import tool_call
from loopd.session.store import Session
from tests.integration.appliance import Appliance, running

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

CLOCK = json.dumps({"name": "builtin.clock", "arguments": {}})
DEVICE = json.dumps({"name": "builtin.device", "arguments": {}})
TIME = "Tuesday 2026-12-01 14:05:00 UTC (UTC+0000)"
LOAD = "load 0.10 0.12 0.09; memory free 3,100 MB of 4,000 MB"
WORKED: tuple[tuple[str, tuple[tuple[str, str], ...], str], ...] = (
    ("What time is it?", ((CLOCK, TIME),), "It is 14:05."),
    ("How busy is this device?", ((DEVICE, LOAD),), "It is idle."),
    ("What time is it, and how busy is the device?", ((CLOCK, TIME), (DEVICE, LOAD)), "It is 14:05, and it is idle."),
    ("What time is it?", ((CLOCK, TIME),), "It is 14:05."),
)


def work(device: Appliance, session_id: str) -> None:
    """Append the worked turns to a session that the daemon has made, as the daemon would have."""
    session = Session.open(Home(device.home), session_id, limits=LoopTable())

    def step(text: str | None, *answer: Record) -> None:
        request = session.request(text)
        usage = usage_record(
            Reported(),
            at=now(),
            expected=None,
            loss=None,
            cause=None,
            slot=0,
            request_bytes=request.request_bytes,
            request_sha256=request.request_sha256,
        )
        user = [User(at=now(), text=text, key=f"worked-{session.lines}")] if text else []
        session.append(*user, answer[0], usage, *answer[1:])

    for text, calls, answer in WORKED:
        made = tuple(tool_call(f"id{n}", "call_tool", arguments) for n, (arguments, _) in enumerate(calls))
        step(text, Assistant(at=now(), text="", tool_calls=made, finish_reason="tool_calls", origin="model"))
        for call, (_, content) in zip(made, calls, strict=True):
            session.append(
                ToolResult(at=now(), call=session.next_call, id=call.id, name=call.name, ok=True, content=content)
            )
        end = TurnEnd(at=now(), reason="completed")
        step(None, Assistant(at=now(), text=answer, finish_reason="stop", origin="model"), end)
    session.close()


def test_calls_that_the_real_model_makes_by_itself_lose_no_cached_token(device: Appliance) -> None:
    device.configure(loop={"max_completion_tokens": 64})
    with running(device):
        device.chat("w", "Hello.")
        device.stop()
        work(device, "w")
        device.start()
        frames: list[dict[str, Any]] = []
        for text in ("What time is it?", "How busy is this device?", "What time is it, and how busy is the device?"):
            frames += device.chat("w", text)
        table = device.json("usage", "w")
    calls = [frame for frame in frames if frame["type"] == "tool_started"]
    assert calls, "the model called no tool"
    by_itself = [row for row in table["requests"] if row["prompt_tokens"] is not None]
    assert len(by_itself) > 1 + 3
    assert [row["loss"] for row in by_itself] == [0] * len(by_itself)
    counted = [row for row in by_itself if row["counted"]]
    assert counted
    assert [row["evaluated"] for row in counted] == [row["floor"] for row in counted]
