"""MCP servers through the whole path: client, daemon, scripted model, runner, server. Whatever they do, the baseline
of a session is the one that it would have without them, and no cached token is lost."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopd.tools.port import doubt
from tests.integration.appliance import Appliance, running
from tests.mcp_servers import everything_server, filesystem_server, git_server, time_server
from tests.servers import start_scripted_server
from tests.tools.mcp.held import FAKE

WRITE = {"policy": {"write": "allow"}}


def step(tool: str, **arguments: Any) -> dict[str, Any]:
    """A step of the scripted model that calls one of the two tools it sees, or through call_tool another one."""
    if tool != "find_tool":
        tool, arguments = "call_tool", {"name": tool, "arguments": arguments}
    return {"tool_calls": [{"name": tool, "arguments": json.dumps(arguments)}]}


def turns(*steps: dict[str, Any]) -> dict[str, Any]:
    """A script in which each turn calls one tool."""
    return {"steps": [part for called in steps for part in (called, {"text": "Done."})], "default": {"text": "Fine."}}


def results(frames: list[dict[str, Any]]) -> list[str]:
    """What the tools gave, a failure marked as such."""
    found = [frame for frame in frames if frame["type"] == "tool_result"]
    return [frame["content"] if frame["ok"] else f"not ok: {frame['content']}" for frame in found]


def logged(device: Appliance, *words: str, times: int = 1) -> None:
    """Wait until the daemon has logged all of these, each so often."""
    missing = [part for part in words for _ in range(times)]
    command = ["tail", "--lines=+1", "--follow", str(device.log_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as tail:
        assert tail.stdout is not None
        for line in tail.stdout:
            for part in {part for part in missing if part in line}:
                missing.remove(part)
            if not missing:
                break
        tail.kill()


def baseline(device: Appliance, session: str) -> str:
    """The hash of what is frozen in a session, as its log names it and as it is on disk."""
    directory = device.home / "sessions" / session
    start = json.loads((directory / "0.jsonl").read_bytes().splitlines()[0])
    found = "sha256:" + hashlib.sha256((directory / "0.baseline.json").read_bytes()).hexdigest()
    assert start["baseline"] == found
    return found


def lost(device: Appliance, session: str) -> int:
    """The cached tokens that a session has lost, of which there must be none."""
    total: dict[str, int] = device.json("usage", session)["total"]
    return total["loss"]


def fake(root: Path, name: str, **settings: Any) -> dict[str, Any]:
    """Settings of a server that does as it is told by `root/NAME.json`."""
    path = root / f"{name}.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return {"command": [sys.executable, "-ES", str(FAKE), str(path)]}


@pytest.fixture(scope="module")
def plain_baseline(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of the baseline of a daemon without any MCP server."""
    root = tmp_path_factory.mktemp("plain")
    with start_scripted_server(root / "m.sock", turns()) as url, running(Appliance(root, url)) as device:
        device.chat("s", "Hello.")
        return baseline(device, "s")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    author = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    begin = ("-C", str(path), *author, "commit", "--quiet", "--allow-empty", "--message", "Begin at the beginning")
    for arguments in (("init", "--quiet", str(path)), begin):
        subprocess.run(["git", *arguments], env=environment, check=True)
    return path


def test_published_servers_are_found_and_called_over_stdio_and_http(
    tmp_path: Path, repository: Path, plain_baseline: str
) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    (shelf / "note.txt").write_text("Milk, bread and a lamp.", encoding="utf-8")
    script = turns(
        step("find_tool", query="convert time between time zones"),
        step("time.convert_time", source_timezone="Asia/Tokyo", time="16:30", target_timezone="UTC"),
        step("find_tool", query="show commit log of git repository"),
        step("git.git_log", repo_path=str(repository)),
        step("find_tool", query="read text file from file system"),
        step("files-on-shelf.read_text_file", path=str(shelf / "note.txt")),
        step("files-on-shelf.write_file", path=str(shelf / "new.txt"), content="A new note."),
        step("files-on-shelf.read_text_file", path="/etc/passwd"),
        step("find_tool", query="add two numbers with everything"),
        step("everything.get-sum", a=2, b=40),
        step("everything.get-tiny-image"),
    )
    with start_scripted_server(tmp_path / "m.sock", script) as url, everything_server() as everything:
        servers = {
            "time": {"command": time_server()},
            "git": {"command": git_server(repository)},
            "files-on-shelf": {"command": filesystem_server(shelf)},
            "everything": {"url": everything},
        }
        device = Appliance(tmp_path, url, tools={"mcp": servers, **WRITE})
        with running(device):
            logged(device, *(f"mcp_up server={name}" for name in servers))
            frames = device.chat("s", *(f"Message {n}." for n in range(11)))
            ports = {port["port"]: port for port in device.json("tools")["ports"]}
            assert (baseline(device, "s"), lost(device, "s")) == (plain_baseline, 0)
            assert device.stop() == 0
    found = results(frames)
    assert "time.convert_time" in found[0].splitlines()[1]
    assert "07:30" in found[1]
    assert "git.git_log" in found[2]
    assert "Begin at the beginning" in found[3]
    assert "files-on-shelf.read_text_file" in found[4]
    assert found[5] == "Milk, bread and a lamp."
    assert (shelf / "new.txt").read_text(encoding="utf-8") == "A new note."
    assert found[7].startswith("not ok: ")
    assert "everything.get-sum" in found[8]
    assert "42" in found[9]
    assert "[image: image/png, " in found[10]
    effects = {name: {tool["name"]: tool["effect"] for tool in port["tools"]} for name, port in ports.items()}
    assert effects["files-on-shelf"]["read_text_file"] == "read"
    assert effects["files-on-shelf"]["write_file"] == "write"
    assert [(port["state"], port["reason"]) for port in ports.values()] == [("up", "")] * len(ports)


def test_a_server_that_comes_up_at_turn_three_is_found_from_then_on_and_costs_nothing(
    tmp_path: Path, plain_baseline: str
) -> None:
    needed = tmp_path / "needed"
    script = turns(
        step("find_tool", query="fake echo"),
        step("late.echo", text="early"),
        step("find_tool", query="fake echo"),
        step("late.echo", text="hello"),
        step("late.die"),
        step("late.echo", text="again"),
        step("find_tool", query="fake echo"),
        step("late.echo", text="down"),
    )
    with start_scripted_server(tmp_path / "m.sock", script) as url:
        late = fake(tmp_path, "late", needs=str(needed))
        device = Appliance(tmp_path, url, tools={"mcp": {"late": late}, **WRITE})
        with running(device):
            logged(device, "mcp_down server=late")
            before = results(device.chat("s", "One.", "Two."))
            reason = next(port["reason"] for port in device.json("tools")["ports"] if port["port"] == "late")
            needed.touch()
            logged(device, "mcp_up server=late")
            after = results(device.chat("s", "Three.", "Four.", "Five."))
            logged(device, "mcp_up server=late", times=2)
            after += results(device.chat("s", "Six."))
            needed.unlink()
            assert device.stop() == 0
            device.start()
            later = results(device.chat("s", "Seven.", "Eight."))
            assert (baseline(device, "s"), lost(device, "s")) == (plain_baseline, 0)
    assert "late.echo" not in before[0]
    assert before[1].startswith("not ok: late.echo is unavailable: late is down now (")
    assert reason.endswith(f"exit status 7; stderr: not without {needed}")
    assert "late.echo" in after[0]
    assert "unavailable" not in after[0]
    assert after[1] == "echo hello"
    assert after[2].startswith("not ok: late ended in mid-call (the connection ended; exit status 3; stderr: the roof")
    assert after[2].endswith("whether the call took effect is unknown")
    assert after[3] == "echo again"
    assert "late.echo (unavailable now)" in later[0]
    assert later[1].startswith("not ok: late.echo is unavailable: late is down now (")


def test_servers_that_do_everything_wrong_cost_nobody_else_anything(tmp_path: Path, plain_baseline: str) -> None:
    tool = {"description": "Of a thousand.", "inputSchema": {"type": "object"}}
    servers = {
        "thousand": fake(tmp_path, "thousand", tools=[{**tool, "name": f"wheel_{n}"} for n in range(1000)], pages=100),
        "hung": {**fake(tmp_path, "hung", silent=["initialize"]), "connect_timeout_s": 1.0},
        "garbage": fake(tmp_path, "garbage", answer={"initialize": '{"jsonrpc": "2.0", "id": $ID, "result": [}'}),
        "missing": {"command": ["/no/such/program"]},
        "secret": {"command": ["true"], "env_files": {"KEY": str(tmp_path / "nothing")}},
        "refusing": {"url": "http://127.0.0.1:9/mcp"},
        "twice": fake(tmp_path, "twice", tools=[{**tool, "name": "same"}, {**tool, "name": "same"}, {"name": "bad"}]),
        "odd": {**fake(tmp_path, "odd", banner=["Welcome!", "\udcff"]), "call_timeout_s": 1.0},
    }
    script = turns(
        step("find_tool", query="wheel 321"),
        step("thousand.wheel_321"),
        step("odd.never"),
        step("odd.broken"),
        step("odd.wrong"),
        step("odd.noise"),
        step("odd.grow"),
        step("find_tool", query="fake grown"),
        step("odd.grown", text="up"),
    )
    with start_scripted_server(tmp_path / "m.sock", script) as url:
        device = Appliance(tmp_path, url, tools={"mcp": servers, **WRITE})
        with running(device):
            up = ("thousand", "twice", "odd")
            logged(
                device,
                *(f"mcp_{'up' if name in up else 'down'} server={name}" for name in servers),
                "mcp_tool_dropped server=twice tool='same'",
                "mcp_tool_dropped server=twice tool='bad'",
            )
            found = results(device.chat("s", *(f"Message {n}." for n in range(7))))
            logged(device, "mcp_listed server=odd tools=15")
            found += results(device.chat("s", "Found?", "Grown?"))
            ports = {port["port"]: port for port in device.json("tools")["ports"]}
            assert (baseline(device, "s"), lost(device, "s")) == (plain_baseline, 0)
            assert device.stop() == 0
    assert "thousand.wheel_321" in found[0]
    assert found[1:7] == [
        "wheel_321",
        f"not ok: odd.never was stopped: not done after 1 s.{doubt('write')}",
        "not ok: the answer is broken, or longer than a message may be",
        "not ok: the answer is no JSON-RPC message",
        "after the noise",
        "grown",
    ]
    assert "odd.grown" in found[7]
    assert found[8] == "grown up"
    assert len(ports["thousand"]["tools"]) == 1000
    assert [tool["name"] for tool in ports["twice"]["tools"]] == ["same"]
    reasons = {name: port["reason"] for name, port in ports.items() if port["state"] == "down"}
    assert reasons.keys() == {"hung", "garbage", "missing", "secret", "refusing"}
    assert reasons["hung"] == "no answer to initialize within 1 s"
    assert reasons["garbage"].startswith("initialize: the answer is broken")
    assert "/no/such/program" in reasons["missing"]
    assert f"KEY cannot be read from {tmp_path}/nothing" in reasons["secret"]
    assert reasons["refusing"].endswith("http://127.0.0.1:9/mcp")


def test_the_daemon_waits_for_no_server_and_takes_a_changed_one_at_a_signal(tmp_path: Path) -> None:
    script = turns(step("one.echo", text="first"), step("two.echo", text="second"), step("one.echo", text="third"))
    with start_scripted_server(tmp_path / "m.sock", script) as url:
        one, two = fake(tmp_path, "one", silent=["initialize"]), fake(tmp_path, "two")
        device = Appliance(tmp_path, url, tools={"mcp": {"one": one}, **WRITE})
        with running(device):
            assert device.daemon is not None
            (tmp_path / "one.json").write_text("{}", encoding="utf-8")
            device.configure(tools={"mcp": {"one": {**one, "call_timeout_s": 5.0}}, **WRITE})
            device.daemon.send_signal(signal.SIGHUP)
            logged(device, "mcp_up server=one")
            found = results(device.chat("s", "First."))
            device.configure(tools={"mcp": {"two": two}, **WRITE})
            device.daemon.send_signal(signal.SIGHUP)
            logged(device, "mcp_up server=two")
            found += results(device.chat("s", "Second.", "Third."))
            assert device.stop() == 0
    assert found[:2] == ["echo first", "echo second"]
    assert found[2].startswith("not ok: There is no one tool named 'one.echo'.")
