"""Where tools run: a unit of their own, which keeps them from everything of loopd and of the device."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks.device import Device
from checks.instance import Instance, Program, Second

pytestmark = pytest.mark.stage("serving")

_PROGRAMS = Path(__file__).parent / "programs"
_PROBE = Program((_PROGRAMS / "probe.py").read_text())
_LINGER = (_PROGRAMS / "linger.py").read_text()
_LEFT = "ps -eo user:32,args | grep '[l]oopd-check-\\(grand\\)\\?child' || true"
_RUNS = "pgrep -f '^loopd-check-grandchild' && pgrep -f '^loopd-check-child'"
# What a mark is left in: folders that every user may write, elsewhere.
_SHARED = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - of the device


def _call(name: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON value
    call = {"name": f"executables.{name}", "arguments": arguments}
    return {"tool_calls": [{"name": "call_tool", "arguments": json.dumps(call)}]}


@pytest.fixture(scope="module")
def found(device: Device) -> Iterator[dict[str, Any]]:
    """What the probe says of where it runs, called by a scripted model."""
    second = Second(device)
    read = (
        "/etc/loopd", "/etc/loopd/loopd.toml", "/var/lib/loopd", "/var/lib/loopd/slots", second.home,
        f"{second.home}/slots", f"{second.home}/sessions", second.config_file, "/etc/shadow", "/root", "/home",
    )  # fmt: skip
    sockets = [
        path
        for instance in (Instance(device), second)
        for path in (instance.socket, instance.model_socket, instance.tools_socket)
    ]
    probe = _call("probe", read=read, connect=[*sockets, "/run/dbus/system_bus_socket"], marks=_SHARED)
    second.install(script={"steps": [probe, {"text": "Done."}]}, programs={"probe": _PROBE})
    session = second.session()
    second.say(session, "Look around.", f"{session}-1")
    (result,) = second.results(session)
    assert result["ok"], result["content"]
    found: dict[str, Any] = json.loads(result["content"])
    yield found
    second.remove()


def test_tool_runs_in_the_unit_of_tools(found: dict[str, Any]) -> None:
    """A tool runs as the user loopd-tools in the unit of tools, in its own folder, with nothing of the daemon's.

    Seen failing: a configuration without `runner`, so that the daemon starts tools itself.
    """
    assert found["user"] == "loopd-tools"
    assert len(found["groups"]) == 1
    units = {line.rpartition("/")[2] for line in found["cgroup"]}
    assert units - {""} == {"loopd-check-tools.service"}
    assert found["directory"] == found["environment"]["HOME"] == found["environment"]["TMPDIR"] == Second.tools_home
    assert set(found["environment"]) <= {"PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE"}
    assert found["descriptors"] == [0, 1, 2]


def test_tool_reads_nothing_of_loopd(found: dict[str, Any]) -> None:
    """A tool can read no log, no state and nothing below /etc/loopd, not even what every user may read there.

    Seen failing: a unit without InaccessiblePaths; a configuration without `runner`.
    """
    assert {path: result for path, result in found["read"].items() if result == "done"} == {}


def test_tool_reaches_no_socket(found: dict[str, Any]) -> None:
    """A tool can connect neither to the channel nor to the model server, nor to the runner, nor to the system's bus.

    Seen failing: a unit without TemporaryFileSystem; a configuration without `runner`.
    """
    assert {path: result for path, result in found["connect"].items() if result == "done"} == {}


def test_tool_has_no_network(found: dict[str, Any]) -> None:
    """A tool has no network, not even the device's own addresses.

    Seen failing: a unit without PrivateNetwork, RestrictAddressFamilies and IPAddressDeny.
    """
    assert found["network"] != "done"
    assert found["interfaces"] == ["lo"]


def test_tool_writes_in_its_own_folder_alone(found: dict[str, Any], device: Device) -> None:
    """A tool can write in its own folder, and in temporary ones that nobody else sees; nowhere else.

    Seen failing: a unit without ProtectSystem, PrivateTmp and TemporaryFileSystem.
    """
    assert set(found["writable"]) - {*_SHARED, "/dev/mqueue"} == {Second.tools_home}
    for folder in _SHARED:
        assert device.run("test -e %s", f"{folder}/loopd-check-mark").rc == 1


def test_tool_makes_no_executable_memory(found: dict[str, Any]) -> None:
    """A tool cannot make memory that is writable and executable.

    Seen failing: a unit with MemoryDenyWriteExecute=no.
    """
    assert found["executable memory"] == "PermissionError"


def test_mcp_server_runs_in_the_unit_of_tools(second: Second, device: Device) -> None:
    """An MCP server over stdio runs in the unit of tools, and its tools can be called.

    Seen failing: a configuration without `runner`.
    """
    server = Program((_PROGRAMS / "mcp_server.py").read_text(), manifest="")
    call = {"tool_calls": [{"name": "call_tool", "arguments": '{"name": "check.where", "arguments": {}}'}]}
    second.install(
        script={"steps": [call, {"text": "Done."}]},
        programs={"server": server},
        tools=f'[tools.mcp.check]\ncommand = ["{second.programs}/server"]',
    )
    device.wait(f"{second.environment} bxctl tools --port check --json | grep '\"up\"'", why="the server's tools")
    session = second.session()
    assert second.say(session, "Where?", f"{session}-1")[-1]["reason"] == "completed"
    (result,) = second.results(session)
    assert result["ok"], result["content"]
    assert result["content"].startswith("loopd-tools ")
    assert "/loopd-check-tools.service" in result["content"]


def test_status_says_where_tools_run(installed: Instance) -> None:
    """`bxctl status` says that tools run in a sandbox, and where.

    Seen failing: the socket of tools stopped; a runner started with `--allow-uid root`.
    """
    tools = installed.json("status")["tool_processes"]
    assert (tools["where"], tools["sandboxed"]) == ("unix:/run/loopd-tools/runner.sock", True)
    assert (tools["state"], tools["reason"]) == ("up", "")


def test_child_and_grandchild_are_gone_after_their_deadline(second: Second, device: Device) -> None:
    """A tool that does not end at its deadline is ended with all that it started, whatever that ignores.

    Seen failing: a runner whose `_kill` does nothing.
    """
    program = Program(_LINGER, 'effect = "read"\ntimeout_s = 3')
    second.install(script={"steps": [_call("linger"), {"text": "Done."}]}, programs={"linger": program})
    session = second.session()
    second.begin(session, "Wait.", f"{session}-1")
    device.wait(_RUNS, why="a child and a grandchild")
    assert second.say(session, "Wait.", f"{session}-1")[-1]["reason"] == "completed"
    assert device.out(_LEFT) == ""
    (result,) = second.results(session)
    assert not result["ok"]
    assert "3 s" in result["content"]


@pytest.fixture
def lingering(second: Second, device: Device) -> str:
    """A second instance in which a tool runs that does not end; the next call is one of the probe. Its session."""
    steps = [_call("linger"), {"text": "So be it."}, _call("probe"), {"text": "Done."}]
    second.install(script={"steps": steps}, programs={"linger": Program(_LINGER), "probe": _PROBE})
    session = second.session()
    second.begin(session, "Wait.", f"{session}-1")
    device.wait(_RUNS, why="a child and a grandchild")
    return session


def test_stop_of_loopd_ends_the_runner_and_every_tool(second: Second, device: Device, lingering: str) -> None:
    """A stop of loopd ends first its turns, then the runner and every process of a tool; a start brings both back.

    Seen failing: units of tools without BindsTo and PartOf.
    """
    before = second.main_pid(second.tools_unit)
    device.out("systemctl stop %s", second.unit, timeout_s=120)
    device.wait('[ "$(systemctl is-active %s)" = inactive ]', second.tools_unit, why="the end of the runner")
    assert device.out(_LEFT) == ""
    stopped = device.out("journalctl -q -b --no-pager -o cat | grep '^Stopped loopd-check'").splitlines()
    assert [line.split()[1] for line in stopped[-2:]] == [second.unit, second.tools_unit]
    device.out("systemctl start %s", second.unit, timeout_s=120)
    second.wait()
    assert second.main_pid(second.tools_unit) not in (before, "0")
    for number, text in enumerate(("Are you there?", "And now?"), start=2):
        assert second.say(lingering, text, f"{lingering}-{number}")[-1]["reason"] == "completed"
    first, last = second.results(lingering)
    assert not first["ok"]
    assert last["ok"]


def test_crash_of_loopd_ends_every_tool(second: Second, device: Device, lingering: str) -> None:
    """A crash of loopd ends the runner and every tool, and both come back; the call in flight has a result.

    Seen failing: units of tools without BindsTo and PartOf.
    """
    before = second.main_pid(second.tools_unit)
    second.crash()
    assert device.out(_LEFT) == ""
    assert second.main_pid(second.tools_unit) not in (before, "0")
    for number, text in enumerate(("Are you there?", "And now?"), start=2):
        assert second.say(lingering, text, f"{lingering}-{number}")[-1]["reason"] == "completed"
    first, last = second.results(lingering)
    assert not first["ok"]
    assert "unknown" in first["content"]
    assert last["ok"], last["content"]


def test_crash_of_the_runner_fails_one_call(second: Second, device: Device, lingering: str) -> None:
    """When the runner is killed, its tools end, the call in flight says so, and the next call works.

    Seen failing: its socket stopped instead.
    """
    device.out("systemctl kill --signal=KILL --kill-whom=main %s", second.tools_unit)
    assert second.say(lingering, "Wait.", f"{lingering}-1")[-1]["reason"] == "completed"
    assert second.say(lingering, "And now?", f"{lingering}-2")[-1]["reason"] == "completed"
    first, last = second.results(lingering)
    assert not first["ok"]
    assert "runner" in first["content"]
    assert last["ok"], last["content"]
    assert device.out(_LEFT) == ""


def test_runner_that_cannot_start_holds_nothing_up(second: Second) -> None:
    """While the runner of tools cannot be started, loopd starts and serves, and a call says what is wrong.

    Seen failing: a unit of tools with Restart=on-failure.
    """
    second.install(script={"steps": [_call("probe"), {"text": "So be it."}]}, programs={"probe": _PROBE})
    second.drop_in(second.tools_unit, "ExecStartPre=/bin/false")
    second.restart()
    assert second.json("status")["tool_processes"]["state"] == "down"
    session = second.session()
    assert second.say(session, "Look around.", f"{session}-1")[-1]["reason"] == "completed"
    (result,) = second.results(session)
    assert not result["ok"]
    assert "runner" in result["content"]
