"""The file tools through the real daemon, asked by a scripted model, also for what lies outside the root."""

import json
import signal
from pathlib import Path
from typing import Any

from tests.integration.appliance import Appliance, running
from tests.servers import start_scripted_server

HIDDEN = "hidden-treasure"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": "call_tool", "arguments": json.dumps({"name": name, "arguments": arguments})}


def steps(docs: Path) -> list[dict[str, Any]]:
    """One call a turn, each with its answer in words behind it."""
    calls = [
        {"name": "find_tool", "arguments": json.dumps({"query": "read a text file"})},
        call("files.list"),
        call("files.read", path="plan.txt"),
        call("files.search", text="MILK"),
        call("files.write", path="shopping/list.txt", content="milk\n", directories=True),
        call("files.write", path=f"{docs}/shopping/list.txt", content="bread\n", append=True),
        call("files.read", path=f"{docs}/../home/loopd.lock"),
        call("files.read", path="/etc/passwd"),
        call("files.read", path="away/secret.txt"),
        call("files.write", path="away/new.txt", content="x"),
    ]
    return [{"tool_calls": calls}, {"text": "Done."}]


def test_a_model_works_below_its_root_and_sees_nothing_outside(tmp_path: Path) -> None:
    docs, outside = tmp_path / "docs", tmp_path / "outside"
    docs.mkdir()
    outside.mkdir()
    (docs / "plan.txt").write_text("Buy milk.\n")
    (docs / "away").symlink_to("../outside")
    (outside / "secret.txt").write_text(HIDDEN)
    with start_scripted_server(tmp_path / "m.sock", {"steps": steps(docs)}) as url:
        tools = {"files": {"write": [str(docs)]}, "policy": {"write": "allow"}}
        device = Appliance(tmp_path, url, tools=tools)
        with running(device):
            frames = device.chat("s", "Do it all.")
            listed = {port["port"]: port for port in device.json("tools")["ports"]}
    results = [frame for frame in frames if frame["type"] == "tool_result"]
    assert [(frame["ok"], frame["content"].partition("\n")[0]) for frame in results[1:]] == [
        (True, f"{docs}: 2 entries:"),
        (True, f"{docs}/plan.txt, line 1 of 1:"),
        (True, "1 found in 1 files:"),
        (True, f"{docs}/shopping/list.txt was made: it has 5 bytes now."),
        (True, f"{docs}/shopping/list.txt was appended to: it has 11 bytes now."),
        (False, f"Write the path without '..': {docs}/../home/loopd.lock. The roots are {docs}."),
        (False, f"/etc/passwd is outside the roots. The roots are {docs}."),
        (False, f"A link in {docs} leads outside the root {docs}: refused."),
        (False, f"A link in {docs} leads outside the root {docs}: refused."),
    ]
    assert "- files.read: " in results[0]["content"].splitlines()[1]
    assert HIDDEN not in json.dumps(frames)
    assert (docs / "shopping/list.txt").read_text() == "milk\nbread\n"
    assert [path.name for path in outside.iterdir()] == ["secret.txt"]
    assert [tool["name"] for tool in listed["files"]["tools"]] == ["read", "list", "search", "write"]


def test_a_root_that_holds_the_home_is_refused_before_the_daemon_starts_and_at_a_reload(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path / "m.sock", {"default": {"text": "Fine."}}) as url:
        device = Appliance(tmp_path, url, tools={"files": {"read": [str(tmp_path)]}})
        for command in (["serve"], ["config", "check", str(device.config_path)]):
            done = device.loopd(*command)
            assert done.returncode == 2
            assert f"[tools] files.read.0: found '{tmp_path}'" in done.stderr
            assert "lies in it" in done.stderr
        device.configure()
        with running(device):
            device.configure(tools={"files": {"read": [str(device.home / "sessions")]}})
            before = device.json("status")["config"]
            reload(device, "config_refused")
            refused = device.json("status")["config"]
            assert (before["refused"], refused["sha256"]) == (None, before["sha256"])
            assert f"[tools] files.read.0: found '{device.home / 'sessions'}'" in refused["refused"]
            assert ports(device) == ["builtin"]
            (tmp_path / "docs").mkdir()
            device.configure(tools={"files": {"read": [str(tmp_path / "docs")]}})
            reload(device, "config_reloaded")
            assert device.json("status")["config"]["refused"] is None
            assert ports(device) == ["builtin", "files"]


def reload(device: Appliance, word: str) -> None:
    """Have the daemon read its configuration again, and return once it has logged what it made of it."""
    assert device.daemon is not None
    device.daemon.send_signal(signal.SIGHUP)
    for _ in range(1000):
        if word in device.log():
            return
        device.bxctl("status")
    raise AssertionError(device.log())


def ports(device: Appliance) -> list[str]:
    return [port["port"] for port in device.json("tools")["ports"]]
