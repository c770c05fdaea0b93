"""`kill -9` at random points of a scripted conversation: nothing acknowledged is lost, every log opens."""

import json
import os
import random
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.appliance import BXCTL, PATIENCE_S, Appliance, running
from tests.servers import start_scripted_server

KILLS = int(os.environ.get("KILLS", "20"))
LONGEST_S = 1.5
UNREACHABLE = 3
TEXTS = tuple(f"Question number {number}: what time is it?" for number in range(6))
CLOCK = {"name": "call_tool", "arguments": json.dumps({"name": "clock", "arguments": {}})}
SCRIPT = {
    "steps": [
        {"text": "Let me look.", "tool_calls": [CLOCK], "delay_ms": 5},
        {"text": "It is late, and the day is long. " * 8, "delay_ms": 2},
    ]
    * 40,
    "default": {"text": "Fine."},
}


@pytest.mark.timeout(120 + 30 * KILLS)
def test_whatever_was_acknowledged_is_there_after_a_kill_at_any_point(tmp_path: Path) -> None:
    source = random.Random()
    with start_scripted_server(tmp_path / "m.sock", SCRIPT) as url:
        device = Appliance(tmp_path, url)
        with running(device):
            for number in range(KILLS):
                session = f"k{number}"
                frames = talk_and_kill(device, session, source.uniform(0, LONGEST_S))
                device.chat(session, "Are you still there?")
                verdict = device.loopd("session", "verify", session)
                assert verdict.returncode == 0, verdict.stderr
                assert_acknowledged_is_there(device, session, frames)


def talk_and_kill(device: Appliance, session: str, after_s: float) -> list[dict[str, Any]]:
    """Hold a conversation during which the daemon is killed and started again; return all frames that came."""
    messages = [part for text in TEXTS for part in ("--message", text)]
    client = subprocess.Popen(
        [*BXCTL, "chat", "--session", session, *messages, "--json"],
        env=device.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def kill_and_restart() -> None:
        device.stop(signal.SIGKILL)
        device.start()

    killer = threading.Timer(after_s, kill_and_restart)
    killer.start()
    out, err = client.communicate(timeout=PATIENCE_S)
    killer.join()
    frames = [json.loads(line) for line in out.splitlines()]
    ends = [frame for frame in frames if frame["type"] == "turn_end"]
    if client.returncode == UNREACHABLE:
        assert frames == [], "only a client that was never connected may give up"
    elif client.returncode != 0:
        assert ends, err
        assert ends[-1]["reason"] == "interrupted", (ends[-1], err)
    else:
        assert [end["reason"] for end in ends] == ["completed"] * len(TEXTS)
    return frames


def assert_acknowledged_is_there(device: Appliance, session: str, frames: list[dict[str, Any]]) -> None:
    log = device.home / "sessions" / session / "0.jsonl"
    lines = [json.loads(line) for line in log.read_bytes().splitlines()]
    acknowledged = [frame for frame in frames if frame["type"] == "record"]
    for frame in acknowledged:
        assert lines[frame["line"] - 1] == frame["record"]
    keys = [line["key"] for line in lines if line["type"] == "user"]
    assert len(keys) == len(set(keys)), "a text was run twice"
    calls = [line["call"] for line in lines if line["type"] == "tool_result"]
    assert calls == list(range(1, len(calls) + 1))


def test_a_kill_in_the_first_prefill_leaves_the_log_as_it_was_and_the_client_says_it_again(tmp_path: Path) -> None:
    script = {"steps": [{"text": "First."}, {"text": "Lost.", "prefill_gate": "g"}], "default": {"text": "Again."}}
    with start_scripted_server(tmp_path / "m.sock", script) as url:
        device = Appliance(tmp_path, url)
        with running(device):
            device.chat("s", "One.")
            log = device.home / "sessions" / "s" / "0.jsonl"
            before = log.read_bytes()
            arguments = [*BXCTL, "chat", "--session", "s", "--message", "Two.", "--key", "k2", "--json"]
            with subprocess.Popen(arguments, env=device.environment, stdout=subprocess.PIPE, text=True) as client:
                wait_at_gate(url, "g")
                device.stop(signal.SIGKILL)
                assert log.read_bytes() == before
                device.start()
                out, _ = client.communicate(timeout=PATIENCE_S)
            assert client.returncode == 0
            frames = [json.loads(line) for line in out.splitlines()]
            assert [frame["text"] for frame in frames if frame["type"] == "delta"] == ["Again."]
            users = [line for line in log.read_bytes().splitlines() if b'"type":"user"' in line]
            assert [json.loads(line)["key"] for line in users][1:] == ["k2"]


def wait_at_gate(url: str, name: str) -> None:
    """Return once a request waits at the scripted server's gate."""
    transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
    with httpx.Client(transport=transport, base_url="http://model", timeout=PATIENCE_S) as http:
        assert http.get(f"/gates/{name}").is_success
