"""An instance of loopd on the device, as a person uses it: the installed one, or a second one of the checks' own."""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from checks.device import Device

PATIENCE_S = 600.0


class Instance:
    """The installed loopd. What it says stays in sessions named `check-…`, which `forget` deletes."""

    unit = "loopd.service"
    model_unit = "loopd-model.service"
    home = "/var/lib/loopd"
    config_file = "/etc/loopd/loopd.toml"
    socket = "/run/loopd/channel.sock"
    model_socket = "/run/loopd-model/model.sock"
    program = "/opt/loopd/current"

    def __init__(self, device: Device) -> None:
        self.device = device
        self._sessions: list[str] = []

    def session(self) -> str:
        """Return the id of a session to be made."""
        self._sessions.append(f"check-{secrets.token_hex(6)}")
        return self._sessions[-1]

    def bxctl(self, command: str, *arguments: str, ok: bool = True, timeout_s: float = PATIENCE_S) -> str:
        """Run bxctl as root and return what it printed; with `ok` it must succeed, else it must fail: its stderr."""
        done = self.device.run(f"{self._environment()} bxctl {command}", *arguments, timeout_s=timeout_s)
        assert (done.rc == 0) == ok, f"bxctl {command} {arguments}: {done.rc}: {done.stderr[-800:]}"
        return str(done.stdout if ok else done.stderr)

    def loopd(self, command: str, *arguments: str, timeout_s: float = 120) -> tuple[int, str, str]:
        """Run loopd as root on the instance's home; return exit status, output and errors."""
        done = self.device.run(f"{self._environment()} loopd {command}", *arguments, timeout_s=timeout_s)
        return done.rc, str(done.stdout), str(done.stderr)

    def json(self, command: str, *arguments: str) -> Any:  # noqa: ANN401 - any JSON value
        """Run bxctl with --json and return what it printed."""
        return json.loads(self.bxctl(f"{command} --json", *arguments))

    def say(self, session: str, text: str, key: str) -> list[dict[str, Any]]:
        """Say one thing under its key, so that no accident runs it twice; return every frame."""
        said = self.bxctl("chat --session %s --message %s --key %s --json", session, text, key)
        return [json.loads(line) for line in said.splitlines()]

    def usage(self, session: str) -> list[dict[str, Any]]:
        """Return the rows of the session's token table."""
        rows: list[dict[str, Any]] = self.json("usage %s", session)["requests"]
        return rows

    def restart(self) -> None:
        """Restart the daemon and wait until it answers."""
        self.device.out("systemctl restart %s", self.unit, timeout_s=180)
        self.wait()

    def crash(self) -> None:
        """Kill the daemon as a crash would, and wait until systemd has brought it back."""
        before = self.main_pid()
        self.device.out("systemctl kill --signal=KILL --kill-whom=main %s", self.unit)
        self.device.wait(
            'pid=$(systemctl show -p MainPID --value %s) && [ "$pid" != 0 ] && [ "$pid" != %s ]', self.unit, before,
            why=f"the restart of {self.unit} after a crash",
        )  # fmt: skip
        self.wait()

    def wait(self, timeout_s: float = 180) -> None:
        """Return once the daemon answers and its model server is up."""
        ready = f'{self._environment()} bxctl status --json | grep -q \'"state": "up"\''
        self.device.wait(ready, timeout_s=timeout_s, why=f"an answer of {self.unit} with its model up")

    def main_pid(self) -> str:
        """Return the daemon's process id."""
        return self.device.out("systemctl show -p MainPID --value %s", self.unit)

    def forget(self) -> None:
        """Delete the sessions that were made here."""
        for session in self._sessions:
            self.device.run(f"{self._environment()} bxctl delete --yes %s", session)
        self._sessions.clear()

    def _environment(self) -> str:
        return (
            f"LOOPD_HOME={self.home} LOOPD_CONFIG={self.config_file} LOOPD_SOCKET={self.socket} "
            f"PATH={self.program}/bin:$PATH"
        )


class Second(Instance):
    """A second loopd with its own home, sockets and units, of the installed units' making; `remove` ends it.

    Its units live in /run and its program is a link, so that it may be upgraded, starved and broken while the
    installed one goes on. With a script the model server is a scripted one.
    """

    unit = "loopd-check.service"
    model_unit = "loopd-check-model.service"
    home = "/var/lib/loopd-check"
    config_file = "/run/loopd-checks/loopd.toml"
    socket = "/run/loopd-check/channel.sock"
    model_socket = "/run/loopd-check-model/model.sock"
    program = "/run/loopd-checks/current"
    copy = "/opt/loopd-check-release"

    def install(self, *, script: Mapping[str, Any] | None = None, home_bytes: int | None = None) -> None:
        """Make it anew and start it.

        Args:
            script: what a scripted model server plays; None for the installed model.
            home_bytes: put the home on a file system in memory of that size.
        """
        self.remove()
        out = self.device.out
        out(f"mkdir -p /run/loopd-checks {self.home} && ln -sfn $(readlink -f /opt/loopd/current) {self.program}")
        if home_bytes:
            out(f"mount -t tmpfs -o size={home_bytes} loopd-check {self.home}")
        out(f"mkdir -p {self.home}/slots && chmod 700 {self.home} && chown -R loopd:loopd-daemon {self.home}")
        self.configure()
        self._write_unit("/etc/systemd/system/loopd.service", self.unit)
        self._write_unit("/etc/systemd/system/loopd-model.service", self.model_unit)
        if script is not None:
            self._write("/run/loopd-checks/script.json", json.dumps(script))
            dropin = f"/run/systemd/system/{self.model_unit}.d"
            start = f"{self.program}/bin/loopd model serve --script /run/loopd-checks/script.json"
            out("mkdir -p %s", dropin)
            self._write(f"{dropin}/script.conf", f"[Service]\nExecStart=\nExecStart={start}\n")
        out(f"systemctl daemon-reload && systemctl start {self.model_unit} {self.unit}", timeout_s=180)
        self.wait()

    def configure(self, extra: str = "", *, max_completion_tokens: int = 32) -> None:
        """Write its configuration: the likeliest answers, kept short, its own sockets, `extra` lines for `[loop]`."""
        gguf = self.device.out("sed -n '/^gguf = /p' /etc/loopd/loopd.toml")
        self._write(
            self.config_file,
            f'[model]\nurl = "unix:{self.model_socket}"\n{gguf}\ncontext_tokens = 4096\ntemperature = 0.0\n'
            f"[loop]\nmax_completion_tokens = {max_completion_tokens}\nmin_free_bytes = 0\n{extra}\n"
            f'[channel]\nsocket = "{self.socket}"\ngroup = "loopd"\n',
        )

    def upgrade(self) -> None:
        """Switch its program to a copy of the release under another path, as an upgrade switches the link."""
        self.device.out(
            f"rm -rf {self.copy} && cp -a $(readlink -f /opt/loopd/current) {self.copy} && "
            f"sed -i '1s|^#!.*/bin/|#!{self.copy}/bin/|' {self.copy}/bin/loopd {self.copy}/bin/bxctl && "
            f"ln -sfn {self.copy} {self.program}",
            timeout_s=120,
        )
        self.restart()
        assert self.device.out(f"tr '\\0' '\\n' </proc/{self.main_pid()}/cmdline | head -n 1").startswith(self.copy)

    def remove(self) -> None:
        """Stop it and remove every trace; nothing happens where there is none."""
        self.device.run(
            f"systemctl stop {self.unit} {self.model_unit}; umount {self.home}; rm -rf {self.home} {self.copy} "
            f"/run/loopd-checks /run/systemd/system/{self.unit} /run/systemd/system/{self.model_unit}"
            f" /run/systemd/system/{self.model_unit}.d; systemctl daemon-reload;"
            f" systemctl reset-failed {self.unit} {self.model_unit}",
            timeout_s=180,
        )
        self._sessions.clear()

    def _write_unit(self, source: str, unit: str) -> None:
        text = self.device.out("cat %s", source)
        for old, new in (
            ("/var/lib/loopd", self.home),
            ("/etc/loopd/loopd.toml", self.config_file),
            ("/opt/loopd/current", self.program),
            ("/opt/loopd/model-server/", f"{self.program}/"),
            ("RuntimeDirectory=loopd-model", "RuntimeDirectory=loopd-check-model"),
            ("RuntimeDirectory=loopd\n", "RuntimeDirectory=loopd-check\n"),
            ("/run/loopd-model/", "/run/loopd-check-model/"),
            ("/run/loopd/", "/run/loopd-check/"),
        ):
            text = text.replace(old, new)
        for kind in ("After", "Wants"):
            text = "\n".join(
                line.replace("loopd-model.service", self.model_unit) if line.startswith(f"{kind}=") else line
                for line in text.splitlines()
            )
        self._write(f"/run/systemd/system/{unit}", text + "\n")

    def _write(self, path: str, text: str) -> None:
        self.device.out("printf %%s %s >%s && chmod 644 %s", text, path, path)
