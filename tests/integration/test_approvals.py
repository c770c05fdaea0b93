"""Approvals, policy and crashes through the whole path: clients, daemon, scripted model, runner, program."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from loopd.audit import verify
from loopd.clock import monotonic_s
from loopd.proto.frames import (
    PROTOCOL_VERSION,
    ApprovalDecided,
    ApprovalRequest,
    Approve,
    Cancel,
    ErrorFrame,
    Hello,
    RecordFrame,
    Reply,
    Say,
    ServerFrame,
)
from tests.channel.fakes import RawClient
from tests.integration.appliance import Appliance, running
from tests.servers import start_scripted_server
from tests.tools.test_executables import put, shell

NOTE = {"name": "call_tool", "arguments": json.dumps({"name": "executables.note", "arguments": {"text": "milk"}})}
HANG = {"name": "call_tool", "arguments": json.dumps({"name": "executables.hang", "arguments": {}})}
ONCE = Approve(session="s", call=1, decision="once")


@contextmanager
def at_work(root: Path, *calls: dict[str, Any], **loop: Any) -> Iterator[Appliance]:
    """A daemon whose model makes the calls in each turn; `note` and `hang` write a line to a file."""
    hang = f"echo begun >> {root}/notes; : > {root}/fifo; exec tail -f /dev/null"
    put(root / "tools", "note", shell(f"cat >> {root}/notes; echo kept"), effect="write")
    put(root / "tools", "hang", shell(hang), effect="write")
    script = {"steps": [{"tool_calls": list(calls or (NOTE,))}, {"text": "Done."}] * 5}
    with start_scripted_server(root / "m.sock", script) as url:
        device = Appliance(root, url, tools={"executables": str(root / "tools")}, loop=loop)
        with running(device):
            yield device


@asynccontextmanager
async def attached(device: Appliance, *, can_approve: bool = True) -> AsyncIterator[RawClient]:
    """A client on session `s`, made if it does not exist."""
    client = RawClient(*await asyncio.open_unix_connection(device.socket))
    try:
        await client.send(Hello(version=PROTOCOL_VERSION, can_approve=can_approve))
        await client.open("s", 0)
        yield client
    finally:
        await client.close()


async def say(client: RawClient, key: str = "k1") -> None:
    await client.send(Say(session="s", text="Note it.", key=key))


async def asked(client: RawClient) -> ApprovalRequest:
    request = (await client.until("approval_request"))[-1]
    assert isinstance(request, ApprovalRequest)
    return request


def decided(frames: list[ServerFrame]) -> tuple[str, str]:
    return next((frame.decision, frame.reason) for frame in frames if isinstance(frame, ApprovalDecided))


def result(frames: list[ServerFrame]) -> dict[str, Any]:
    """The one tool result of a turn."""
    records = (frame.record for frame in frames if isinstance(frame, RecordFrame))
    [found] = [record for record in records if record["type"] == "tool_result"]
    return found


def notes(root: Path) -> list[str]:
    path = root / "notes"
    return path.read_text().splitlines() if path.exists() else []


def results(device: Appliance) -> list[dict[str, Any]]:
    """All tool results in the session's log."""
    lines = (device.home / "sessions" / "s" / "0.jsonl").read_bytes().splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == "tool_result"]


def audited(device: Appliance) -> list[dict[str, Any]]:
    assert verify(device.home / "audit").faults == ()
    files = sorted((device.home / "audit").iterdir(), key=lambda path: int(path.stem))
    records = [json.loads(line) for path in files for line in path.read_bytes().splitlines()]
    return [record for record in records if "call" in record]


def reload(device: Appliance, **policy: Any) -> None:
    """Change the policy of the running daemon."""
    before = device.log().count("config_reloaded")
    device.configure(tools={"executables": f"{device.home.parent}/tools", "policy": policy})
    assert device.daemon is not None
    device.daemon.send_signal(signal.SIGHUP)
    while device.log().count("config_reloaded") == before:
        device.json("status")


async def test_one_of_two_clients_answers_both_see_it_and_it_is_audited_before_the_tool_runs(tmp_path: Path) -> None:
    with at_work(tmp_path) as device:
        async with attached(device) as one, attached(device) as two:
            await say(one)
            request = await asked(two)
            assert (request.name, request.arguments, request.effect) == ("executables.note", '{"text":"milk"}', "write")
            assert await asked(one) == request
            assert notes(tmp_path) == []
            await two.send(ONCE)
            for client in (one, two):
                frames = await client.until("turn_end")
                assert decided(frames) == ("once", f"by user {os.getuid()}")
                assert result(frames)["approval"] == f"allowed once by user {os.getuid()}"
        assert notes(tmp_path) == ['{"text": "milk"}']
        approval, intent, end = audited(device)
    assert [record["event"] for record in (approval, intent, end)] == ["approval", "tool_call", "tool_end"]
    assert (approval["decision"], approval["uid"], approval["pid"]) == ("once", os.getuid(), os.getpid())
    assert (intent["tool"], intent["arguments"]) == ("executables.note", '{"text":"milk"}')


async def test_a_client_that_drops_is_asked_again_when_it_is_back(tmp_path: Path) -> None:
    with at_work(tmp_path) as device:
        async with attached(device) as client:
            await say(client)
            first = await asked(client)
        async with attached(device) as client:
            again = await asked(client)
            assert again == first.model_copy(update={"seconds": again.seconds})
            await client.send(ONCE)
            assert result(await client.until("turn_end"))["ok"]
    assert notes(tmp_path) == ['{"text": "milk"}']


async def test_two_answers_at_the_same_moment_are_one_answer_and_one_error(tmp_path: Path) -> None:
    async def answer(client: RawClient, decision: Any) -> str:
        await client.send(ONCE.model_copy(update={"decision": decision}))
        while not isinstance(frame := await client.next(), Reply | ErrorFrame):
            assert frame is not None
        return frame.code if isinstance(frame, ErrorFrame) else "taken"

    with at_work(tmp_path) as device:
        async with attached(device) as one, attached(device) as two:
            await say(one)
            await asked(one)
            await asked(two)
            answers = await asyncio.gather(answer(one, "once"), answer(two, "deny"))
            assert sorted(answers) == ["not_pending", "taken"]
            winner = one if answers[0] == "taken" else two
            assert result(await winner.until("turn_end"))["ok"] == (winner is one)
    assert (len(notes(tmp_path)) == 1) == (answers[0] == "taken")


def test_a_script_that_nobody_watches_is_denied_and_goes_on(tmp_path: Path) -> None:
    with at_work(tmp_path) as device:
        frames = device.chat("s", "Note it.")
        assert frames[-1]["reason"] == "completed"
        assert not any(frame["type"] == "approval_request" for frame in frames)
        [denied] = results(device)
        assert (denied["ok"], denied["approval"]) == (False, "denied: nobody was there who could allow it")
        assert notes(tmp_path) == []
        device.chat("s", "Note it.", options=["--approve", "once"])
    assert notes(tmp_path) == ['{"text": "milk"}']


@pytest.mark.parametrize("how", ["time", "cancel"])
async def test_without_an_answer_the_tool_does_not_run(tmp_path: Path, how: str) -> None:
    with at_work(tmp_path, approval_timeout_s=0.3 if how == "time" else 300.0) as device:
        async with attached(device) as client:
            await say(client)
            await asked(client)
            if how == "cancel":
                await client.send(Cancel(session="s"))
            frames = await client.until("turn_end")
    assert decided(frames)[0] == "deny"
    reason = {"time": "nobody answered within 0.3 s (approval_timeout_s)", "cancel": "the turn was cancelled"}[how]
    assert result(frames)["approval"] == f"denied: {reason}"
    assert "Not run: executables.note must be allowed by a person" in result(frames)["content"]
    assert notes(tmp_path) == []


async def test_a_stop_while_a_call_waits_ends_within_five_seconds_and_denies_it(tmp_path: Path) -> None:
    with at_work(tmp_path) as device:
        async with attached(device) as client:
            await say(client)
            await asked(client)
            began_s = monotonic_s()
            assert device.stop() == 0
            assert monotonic_s() - began_s < 5
        assert notes(tmp_path) == []
        assert [record["approval"] for record in results(device)] == ["denied: the turn was cancelled"]
        assert [(record["event"], record["decision"]) for record in audited(device)] == [("approval", "deny")]


async def test_a_deny_that_is_read_anew_reaches_a_running_session_against_its_approval(tmp_path: Path) -> None:
    with at_work(tmp_path) as device:
        async with attached(device) as client:
            await say(client, "k1")
            await asked(client)
            await client.send(ONCE.model_copy(update={"decision": "session"}))
            assert result(await client.until("turn_end"))["ok"]
            await say(client, "k2")
            assert result(await client.until("turn_end"))["approval"].startswith("allowed for the session")
            reload(device, deny=["executables.*"])
            await say(client, "k3")
            denied = result(await client.until("turn_end"))
            assert denied["approval"] == 'denied by policy: [tools.policy] deny = "executables.*"'
            reload(device)
            await say(client, "k4")
            assert result(await client.until("turn_end"))["approval"].startswith("allowed for the session")
        async with attached(device) as client:
            reload(device, write="deny", sessions={"s*": {"allow": ["*.note"]}})
            await say(client, "k5")
            assert result(await client.until("turn_end"))["approval"] is None
    assert len(notes(tmp_path)) == 4


async def test_a_kill_in_mid_tool_leaves_one_unknown_outcome_and_runs_nothing_twice(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with at_work(tmp_path, HANG, NOTE) as device:
        async with attached(device) as client:
            await say(client)
            await asked(client)
            await client.send(ONCE)
            await asyncio.to_thread((tmp_path / "fifo").read_bytes)
            device.stop(signal.SIGKILL)
        device.start()
        frames = device.chat("s", "What happened?")
        assert frames[-1]["reason"] == "completed"
        unknown, never = results(device)
        assert unknown["content"].startswith("The outcome of this call is unknown: loopd stopped while it ran")
        assert never["content"] == "Not run: loopd stopped before this call began. It had no effect."
        assert device.loopd("session", "verify", "s").returncode == 0
    assert notes(tmp_path) == ["begun"]


async def test_a_kill_while_a_call_waits_says_that_it_never_began(tmp_path: Path) -> None:
    with at_work(tmp_path) as device:
        async with attached(device) as client:
            await say(client)
            await asked(client)
            device.stop(signal.SIGKILL)
        device.start()
        async with attached(device) as client:
            await say(client)
            await client.until("turn_end")
        [never] = results(device)
        assert never["content"] == "Not run: loopd stopped before this call began. It had no effect."
        assert audited(device) == []
    assert notes(tmp_path) == []


def test_how_calls_were_written_is_counted_in_the_status(tmp_path: Path) -> None:
    by_own_name = {"name": "note", "arguments": json.dumps({"text": "milk"})}
    with at_work(tmp_path, by_own_name, {"name": "call_tool", "arguments": '{"a":'}) as device:
        device.chat("s", "Note it.")
        counted = device.json("status")["tool_calls"]
        assert counted == {
            "scripted": {
                "calls": 2,
                "mended": 1,
                "mended_how": {"inner_name": 1, "short_name": 1},
                "refused": 1,
                "refused_why": {"not_json": 1},
            }
        }
        words = device.bxctl("status").stdout
    assert "  scripted\n    calls            2\n" in words
    assert "      inner_name       1\n" in words
