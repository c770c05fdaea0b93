"""Executables through the whole path: client, daemon, scripted model, runner, program; and `kill -9` in mid-tool."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cli.test_tools_commands import service
from tests.integration.appliance import BXCTL, PATIENCE_S, Appliance, running
from tests.servers import start_scripted_server
from tests.tools.processes import STUBBORN, await_gone, parent_of
from tests.tools.test_executables import put, shell


def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A step of the scripted model that calls a tool."""
    call = {"name": "call_tool", "arguments": json.dumps({"name": name, "arguments": arguments})}
    return {"text": "", "tool_calls": [call]}


def results(frames: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    return [(frame["ok"], frame["content"]) for frame in frames if frame["type"] == "tool_result"]


def test_a_read_and_a_write_executable_run_and_a_broken_one_says_why(tmp_path: Path) -> None:
    directory, note = tmp_path / "tools", tmp_path / "note"
    put(directory, "weather", shell("cat"), description="Tell the weather of a city.")
    put(directory, "note", shell(f"cat > {note}; echo kept"), description="Keep a note.", effect="write")
    put(directory, "broken", shell("echo no sensor >&2; exit 4"))
    script = {
        "steps": [
            calling("executables.weather", {"city": "Bern"}),
            {"text": "Sunny."},
            calling("note", {"text": "milk"}),
            {"text": "Noted."},
            calling("executables.broken", {}),
            {"text": "It is broken."},
        ]
    }
    with start_scripted_server(tmp_path / "m.sock", script) as url:
        device = Appliance(tmp_path, url, tools={"executables": str(directory), "policy": {"write": "allow"}})
        with running(device):
            frames = device.chat("s", "Weather in Bern?", "Note: milk", "Is it broken?")
            listed = device.bxctl("tools").stdout
            status = device.json("status")["tool_processes"]
            words = device.bxctl("status").stdout
            assert device.stop() == 0
    assert results(frames) == [
        (True, '{"city": "Bern"}\n'),
        (True, "kept\n"),
        (False, "broken failed: exit status 4\nno sensor"),
    ]
    assert json.loads(note.read_text()) == {"text": "milk"}
    assert "Tell the weather of a city." in listed
    assert (status["where"], status["state"], status["sandboxed"]) == ("child of loopd", "up", False)
    assert "tool processes are not sandboxed: they may do whatever loopd's own user may" in words


def test_a_kill_of_the_daemon_in_mid_tool_leaves_no_process_of_the_tool(tmp_path: Path) -> None:
    with in_mid_tool(tmp_path) as (device, client, pids):
        warden = next(parent for parent in map(parent_of, pids) if parent not in pids)
        runner = parent_of(warden)
        device.stop(signal.SIGKILL)
        await_gone(*pids, warden, runner)
        device.start()
        client.wait(PATIENCE_S)
        [result] = records(device, "tool_result")
        assert not result["ok"]
        assert "outcome" in result["content"]
        assert [end["reason"] for end in records(device, "turn_end")] == ["interrupted"]


def test_a_stop_of_the_daemon_in_mid_tool_ends_the_tool_in_time(tmp_path: Path) -> None:
    with in_mid_tool(tmp_path) as (device, client, pids):
        assert device.stop() == 0
        await_gone(*pids)
        [result] = records(device, "tool_result")
        assert (result["ok"], result["content"]) == (False, "Not run to its end: the turn was cancelled.")
        assert [end["reason"] for end in records(device, "turn_end")] == ["cancelled"]
        client.kill()


@contextmanager
def in_mid_tool(root: Path) -> Iterator[tuple[Appliance, subprocess.Popen[bytes], list[int]]]:
    """A daemon whose first turn runs a tool that never ends; the client, and the tool's processes."""
    directory, fifo, body = root / "tools", root / "fifo", root / "body.py"
    os.mkfifo(fifo)
    body.write_text(STUBBORN)
    put(directory, "act", shell(f"exec >{fifo}; exec {sys.executable} -I -S {body}"))
    script = {"steps": [calling("executables.act", {})], "default": {"text": "Fine."}}
    with start_scripted_server(root / "m.sock", script) as url:
        device = Appliance(root, url, tools={"executables": str(directory)})
        with running(device):
            command = [*BXCTL, "chat", "--session", "s", "--message", "Act.", "--json"]
            with subprocess.Popen(command, env=device.environment, stdout=subprocess.DEVNULL) as client:
                with fifo.open() as lines:
                    pids = [int(lines.readline()) for _ in range(3)]
                yield device, client, pids


def records(device: Appliance, kind: str) -> list[dict[str, Any]]:
    """The records of one type in the session's log."""
    log = device.home / "sessions" / "s" / "0.jsonl"
    return [record for record in map(json.loads, log.read_bytes().splitlines()) if record["type"] == kind]


def test_the_runner_may_be_a_service_that_is_restarted_by_hand(tmp_path: Path) -> None:
    directory, path = tmp_path / "tools", tmp_path / "r.sock"
    put(directory, "where", shell("pwd"))
    script = {"steps": [calling("where", {}), {"text": "There."}] * 3}
    with start_scripted_server(tmp_path / "m.sock", script) as url:
        device = Appliance(tmp_path, url, tools={"executables": str(directory), "runner": f"unix:{path}"})
        with running(device):
            answers = []
            with service(path):
                answers += results(device.chat("s", "Where?"))
            answers += results(device.chat("s", "Where?"))
            with service(path):
                answers += results(device.chat("s", "Where?"))
    there = (True, f"{tmp_path}/service\n")
    reason = f"the runner of tool processes (unix:{path}) cannot be reached: Connection refused"
    assert answers == [there, (False, reason), there]
