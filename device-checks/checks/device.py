"""The device under check: commands with a deadline, JSON answers, waiting for events, and the lease."""

import getpass
import json
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import paramiko
from testinfra.backend.base import CommandResult
from testinfra.host import Host

from checks.pinned import PinnedBackend

ROOT = Path(__file__).resolve().parents[2]
_LEASE = "/run/lock/loopd-checks.lease"
_BOOT_TIMEOUT_S = 300.0


class DeviceLeased(Exception):
    """Somebody else checks this device just now; the message says who."""


class Device:
    """One device, reached as root over SSH.

    Args:
        name: a host that ssh knows, or a virtual device of this project.
    """

    def __init__(self, name: str) -> None:
        own = ROOT / "build" / "devices" / name / "ssh_config"
        theirs = Path("~/.ssh/config").expanduser()
        self.name = name
        self.folder = own.parent if own.exists() else None
        self.ssh_config = own if own.exists() else theirs if theirs.exists() else Path("/dev/null")
        self._backend = PinnedBackend(name, ssh_config=str(self.ssh_config), timeout=30, sudo=True)
        self.host = Host(self._backend)
        self._lease: paramiko.Channel | None = None

    def run(self, command: str, *arguments: str, timeout_s: float = 60) -> CommandResult:
        """Run a shell command as root; each `%s` in it is one of the arguments, quoted."""
        return self.host.run("timeout --kill-after=5 %s sh -c %s", f"{timeout_s:g}", _filled(command, arguments))

    def out(self, command: str, *arguments: str, timeout_s: float = 60) -> str:
        """Run a shell command that must succeed and return what it printed."""
        done = self.run(command, *arguments, timeout_s=timeout_s)
        assert done.rc == 0, f"`{_filled(command, arguments)[:200]}` ended with {done.rc}: {done.stderr[-800:]}"
        return str(done.stdout).strip()

    def json(self, command: str, *arguments: str, timeout_s: float = 60) -> Any:  # noqa: ANN401 - any JSON value
        """Run a shell command that prints JSON."""
        return json.loads(self.out(command, *arguments, timeout_s=timeout_s))

    def python(self, source: str, *arguments: str, timeout_s: float = 120) -> str:
        """Run a program with the Python of the installed release."""
        words = " ".join(shlex.quote(part) for part in ("-c", source, *arguments))
        return self.out(f"/opt/loopd/current/bin/python {words}", timeout_s=timeout_s)

    def wait(self, command: str, *arguments: str, timeout_s: float = 60, why: str = "") -> None:
        """Return once a shell command succeeds on the device; it is tried there, over one connection."""
        loop = f"until {_filled(command, arguments)}; do sleep 0.2; done >/dev/null 2>&1"
        done = self.run(loop, timeout_s=timeout_s)
        assert done.rc == 0, f"{why or command} did not happen within {timeout_s:g} s"

    def boot_id(self) -> str:
        """Return what changes with every boot."""
        return self.out("cat /proc/sys/kernel/random/boot_id")

    def reboot(self) -> float:
        """Reboot, wait for the new boot, take the lease again; return the seconds until SSH answered."""
        before, began = self.boot_id(), time.monotonic()
        self.run("systemd-run --on-active=0.2 --timer-property=AccuracySec=100ms systemctl reboot")
        while time.monotonic() - began < _BOOT_TIMEOUT_S:
            self._backend.drop()
            self._lease = None
            try:
                if self.boot_id() != before:
                    self.lease()
                    return time.monotonic() - began
            except (OSError, EOFError, paramiko.SSHException, AssertionError):
                time.sleep(0.3)
        raise AssertionError(f"{self.name} did not come back within {_BOOT_TIMEOUT_S:g} s")

    def lease(self) -> None:
        """Take the device for this run; the lease ends with the connection, however it ends.

        Raises:
            DeviceLeased: another run holds it.
        """
        transport = self._backend.client.get_transport()
        assert transport is not None
        channel = transport.open_session()
        who = f"{getpass.getuser()}@{socket.gethostname()}"
        held = f"exec 9>>{_LEASE}; flock -n 9 || {{ cat {_LEASE}; exit 1; }}; echo {who} >{_LEASE}; echo held; cat"
        channel.exec_command(f"sudo sh -c {shlex.quote(held)}")
        said = channel.makefile("r").readline().strip()
        if said != "held":
            raise DeviceLeased(f"{self.name} is being checked by {said or 'somebody else'}")
        self._lease = channel

    def release(self) -> None:
        """Give the device back and end the connection."""
        if self._lease is not None:
            self._lease.close()
        self._backend.drop()


def _filled(command: str, arguments: tuple[str, ...]) -> str:
    return command % tuple(map(shlex.quote, arguments)) if arguments else command
