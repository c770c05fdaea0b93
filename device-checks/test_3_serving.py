"""Stage serving: the daemon that runs is the installed one, and only those reach it who may."""

import json

import pytest
from checks.device import Device
from checks.instance import Instance
from checks.report import Report

pytestmark = pytest.mark.stage("serving")

# Runs on the device as somebody: prints what a connect to the socket gives.
_CONNECT = """
import socket, sys
try:
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
    print('connected')
except OSError as error:
    print(type(error).__name__)
"""
# What the runner says to whoever runs this.
_ASK_RUNNER = """
import socket
with socket.socket(socket.AF_UNIX) as link:
    link.connect('/run/loopd-tools/runner.sock')
    print(link.makefile().readline())
"""
_OUTSIDER = "setpriv --reuid=nobody --regid=nogroup --clear-groups"
_TOOLS = "setpriv --reuid=loopd-tools --regid=loopd-tools --clear-groups"
_MEMBER = "setpriv --reuid=nobody --regid=nogroup --groups=$(getent group loopd | cut -d: -f3)"


@pytest.mark.parametrize("unit", ["loopd-model.service", "loopd-tools.service", "loopd.service"])
def test_unit_runs_what_is_installed(device: Device, unit: str) -> None:
    """The unit is active, and was started from the release, configuration and unit file that are installed now.

    Seen failing: the model server stopped; the link of the release switched without a restart.
    """
    runtime = unit.removesuffix(".service")
    assert device.run("systemctl is-active %s", unit).stdout.strip() == "active"
    done = device.run("sha256sum --check --quiet /run/%s/started", runtime)
    assert done.rc == 0, f"{unit} was started from something else: {done.stdout}{done.stderr}"


def test_answer_comes_from_the_installed_release(installed: Instance, device: Device, report: Report) -> None:
    """The daemon that answers on the channel is of the installed release, and its process runs from it.

    Seen failing: the link of the release switched without a restart.
    """
    release = device.out("basename $(readlink /opt/loopd/current)")
    status = installed.json("status")
    report.facts["status"] = status
    assert status["release"] == release.rpartition("-")[0]
    running = device.out("tr '\\0' '\\n' </proc/%s/cmdline | head -n 1", installed.main_pid())
    runs = running.removeprefix("/opt/loopd/releases/").partition("/")[0]
    assert runs == release, f"release {runs} runs, {release} is installed"


def test_model_server_is_up(installed: Instance) -> None:
    """The daemon has found its model server, and the model is the installed file.

    Seen failing: the model server stopped.
    """
    assert installed.json("status")["model"]["state"] == "up"


@pytest.mark.parametrize(
    ("path", "rights"),
    [
        ("/run/loopd/channel.sock", "srw-rw---- loopd loopd"),
        ("/run/loopd-model/model.sock", "srw------- loopd loopd-daemon"),
        ("/run/loopd-tools/runner.sock", "srw------- loopd loopd-daemon"),
    ],
)
def test_socket_has_its_rights(device: Device, path: str, rights: str) -> None:
    """The channel is open to the group of the people, the model server and the runner of tools to nobody but loopd.

    Seen failing: `chmod 666 /run/loopd/channel.sock`.
    """
    assert device.out("stat -c '%%A %%U %%G' %s", path) == rights


@pytest.mark.parametrize(
    "path", ["/run/loopd/channel.sock", "/run/loopd-model/model.sock", "/run/loopd-tools/runner.sock"]
)
def test_outsider_reaches_no_socket(device: Device, path: str) -> None:
    """A user outside the group, and that of the tools, can connect to none of the sockets.

    Seen failing: `chmod 666 /run/loopd-tools/runner.sock`; for the others, 755 for the folder too.
    """
    for who in (_OUTSIDER, _TOOLS):
        assert device.out(f"{who} python3 -c %s %s", _CONNECT, path) == "PermissionError"


def test_runner_serves_loopd_alone(device: Device) -> None:
    """The runner of tools serves nobody but the user loopd: not even root, who may connect.

    Seen failing: a runner started with `--allow-uid root`.
    """
    assert "does not serve user 0" in device.out("python3 -c %s", _ASK_RUNNER)


def test_member_of_the_group_may_talk(device: Device) -> None:
    """A user of the group loopd can use bxctl, but can reach neither the model server nor the runner of tools.

    Seen failing: `chmod 600 /run/loopd/channel.sock`.
    """
    assert "release" in json.loads(device.out(f"cd / && {_MEMBER} bxctl status --json"))
    for path in ("/run/loopd-model/model.sock", "/run/loopd-tools/runner.sock"):
        assert device.out(f"{_MEMBER} python3 -c %s %s", _CONNECT, path) == "PermissionError"


def test_outsider_reads_no_conversation(device: Device) -> None:
    """Users outside the group, in it, and that of the tools can read neither a log nor a saved state on disk.

    Seen failing: `chmod 755 /var/lib/loopd /var/lib/loopd/slots`.
    """
    for who in (_OUTSIDER, _MEMBER, _TOOLS):
        assert device.run(f"{who} ls /var/lib/loopd").rc != 0
        assert device.run(f"{who} ls /var/lib/loopd/slots").rc != 0


def test_nothing_of_ours_listens_on_the_network(device: Device) -> None:
    """Neither loopd nor its model server nor a tool listens on any network address.

    Seen failing: a process of the user loopd that listens.
    """
    listening = device.out("ss -H -tulne").splitlines()
    for user in ("loopd", "loopd-tools"):
        assert [line for line in listening if f"uid:{device.host.user(user).uid} " in line] == []


def test_files_of_the_daemon_are_its_own(device: Device) -> None:
    """Everything below the home belongs to loopd, and nobody else has any right to it.

    Seen failing: a file of root below the home.
    """
    assert device.out("find /var/lib/loopd ! -user loopd -o ! -type l -perm /077 | head -n 5") == ""


def test_logs_on_disk_are_whole(installed: Instance) -> None:
    """Every session's log and the audit log hold together.

    Seen failing: a byte cut from the end of a log.
    """
    for command in ("session verify", "audit verify"):
        status, _, errors = installed.loopd(command)
        assert status == 0, errors
        assert errors == ""


def test_journal_of_this_boot_is_free_of_errors(device: Device) -> None:
    """No unit of loopd has logged an error since the device booted.

    Seen failing: an error written to the journal about the daemon.
    """
    units = "-u loopd.service -u loopd-model.service -u loopd-tools.service"
    assert device.out(f"journalctl -b -q -p err --no-pager {units} | tail -n 20") == ""
