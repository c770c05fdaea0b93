"""An instance of loopd on the device, as a person uses it: the installed one, or a second one of the checks' own."""

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checks.device import Device

PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program for a second instance, and what its manifest says beside the description; "" for none."""

    source: str
    manifest: str = 'effect = "read"\nschema = {}'


class Instance:
    """The installed loopd. What it says stays in sessions named `check-…`, which `forget` deletes."""

    unit = "loopd.service"
    model_unit = "loopd-model.service"
    tools_unit = "loopd-tools.service"
    home = "/var/lib/loopd"
    config_file = "/etc/loopd/loopd.toml"
    socket = "/run/loopd/channel.sock"
    model_socket = "/run/loopd-model/model.sock"
    tools_socket = "/run/loopd-tools/runner.sock"
    tools_home = "/var/lib/loopd-tools"
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
        done = self.device.run(f"{self.environment} bxctl {command}", *arguments, timeout_s=timeout_s)
        assert (done.rc == 0) == ok, f"bxctl {command} {arguments}: {done.rc}: {done.stderr[-800:]}"
        return str(done.stdout if ok else done.stderr)

    def loopd(self, command: str, *arguments: str, timeout_s: float = 120) -> tuple[int, str, str]:
        """Run loopd as root on the instance's home; return exit status, output and errors."""
        done = self.device.run(f"{self.environment} loopd {command}", *arguments, timeout_s=timeout_s)
        return done.rc, str(done.stdout), str(done.stderr)

    def json(self, command: str, *arguments: str) -> Any:  # noqa: ANN401 - any JSON value
        """Run bxctl with --json and return what it printed."""
        return json.loads(self.bxctl(f"{command} --json", *arguments))

    def say(self, session: str, text: str, key: str) -> list[dict[str, Any]]:
        """Say one thing under its key, so that no accident runs it twice; return every frame."""
        said = self.bxctl("chat --session %s --message %s --key %s --json", session, text, key)
        return [json.loads(line) for line in said.splitlines()]

    def begin(self, session: str, text: str, key: str) -> None:
        """Say one thing without waiting for its end; `say` with the same key gives every frame of it later."""
        said = f"{self.environment} bxctl chat --session %s --message %s --key %s"
        self.device.out(f"{said} </dev/null >/dev/null 2>&1 &", session, text, key)

    def results(self, session: str) -> list[dict[str, Any]]:
        """Return the session's tool results."""
        records = self.json("show %s", session)["records"]
        return [record for record in records if record["type"] == "tool_result"]

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
        is_up = "import json, sys; sys.exit(json.load(sys.stdin)['model']['state'] != 'up')"
        ready = f"{self.environment} bxctl status --json | python3 -c %s"
        self.device.wait(ready, is_up, timeout_s=timeout_s, why=f"an answer of {self.unit} with its model up")

    def main_pid(self, unit: str = "") -> str:
        """Return the process id of the daemon, or of another of its units."""
        return self.device.out("systemctl show -p MainPID --value %s", unit or self.unit)

    def forget(self) -> None:
        """Delete the sessions that were made here."""
        for session in self._sessions:
            self.device.run(f"{self.environment} bxctl delete --yes %s", session)
        self._sessions.clear()

    @property
    def environment(self) -> str:
        """The variables by which the commands find this instance, for a shell."""
        return (
            f"LOOPD_HOME={self.home} LOOPD_CONFIG={self.config_file} LOOPD_SOCKET={self.socket} "
            f"PATH={self.program}/bin:$PATH"
        )


class Second(Instance):
    """A second loopd with its own home, sockets and units, of the installed units' making; `remove` ends it.

    Its units live in /run and its program is a link, so that it may be upgraded, starved and broken while the
    installed one goes on. With a script the model server is a scripted one; the only executables are those it is given.
    """

    unit = "loopd-check.service"
    model_unit = "loopd-check-model.service"
    tools_unit = "loopd-check-tools.service"
    tools_socket_unit = "loopd-check-tools.socket"
    home = "/var/lib/loopd-check"
    config_file = "/run/loopd-checks/loopd.toml"
    socket = "/run/loopd-check/channel.sock"
    model_socket = "/run/loopd-check-model/model.sock"
    tools_socket = "/run/loopd-check-tools/runner.sock"
    tools_home = "/var/lib/loopd-check-tools"
    root = "/opt/loopd-check"
    program = f"{root}/current"
    copy = f"{root}/release"
    programs = f"{root}/tools"
    _tools = ""

    def install(
        self,
        *,
        script: Mapping[str, Any] | None = None,
        home_bytes: int | None = None,
        programs: Mapping[str, Program] | None = None,
        tools: str = "",
    ) -> None:
        """Make it anew and start it.

        Args:
            script: what a scripted model server plays; None for the installed model.
            home_bytes: put the home on a file system in memory of that size.
            programs: tools of the port `executables`, by name.
            tools: lines for `[tools]` in its configuration, from now on.
        """
        self.remove()
        self._tools = tools
        out = self.device.out
        out(f"mkdir -p /run/loopd-checks {self.programs} {self.home}")
        out(f"ln -sfn $(readlink -f /opt/loopd/current) {self.program}")
        if home_bytes:
            out(f"mount -t tmpfs -o size={home_bytes} loopd-check {self.home}")
        out(f"mkdir -p {self.home}/slots && chmod 700 {self.home} && chown -R loopd:loopd-daemon {self.home}")
        for name, program in (programs or {}).items():
            if program.manifest:
                manifest = f'description = "{name}, for a check"\n{program.manifest}\n'
                self._write(f"{self.programs}/{name}.toml", manifest)
            self._write(f"{self.programs}/{name}", f"#!/usr/bin/python3\n{program.source}")
            out("chmod 755 %s", f"{self.programs}/{name}")
        self.configure()
        for unit in (self.unit, self.model_unit, self.tools_unit, self.tools_socket_unit):
            self._write_unit(f"/etc/systemd/system/{unit.replace('-check', '')}", unit)
        out(
            f"mkdir -p /run/systemd/system/{self.unit}.wants && "
            f"ln -sf ../{self.tools_unit} /run/systemd/system/{self.unit}.wants/"
        )
        if script is not None:
            self._write("/run/loopd-checks/script.json", json.dumps(script))
            start = f"{self.program}/bin/loopd model serve --script /run/loopd-checks/script.json"
            self.drop_in(self.model_unit, f"ExecStart=\nExecStart={start}")
        out(f"systemctl daemon-reload && systemctl start {self.model_unit} {self.unit}", timeout_s=180)
        self.wait()

    def configure(self, extra: str = "", *, max_completion_tokens: int = 32) -> None:
        """Write its configuration: the likeliest answers, kept short, its own sockets, `extra` lines for `[loop]`."""
        gguf = self.device.out("sed -n '/^gguf = /p' /etc/loopd/loopd.toml")
        self._write(
            self.config_file,
            f'[model]\nurl = "unix:{self.model_socket}"\n{gguf}\ncontext_tokens = 4096\ntemperature = 0.0\n'
            f"[loop]\nmax_completion_tokens = {max_completion_tokens}\nmin_free_bytes = 0\n{extra}\n"
            f'[channel]\nsocket = "{self.socket}"\ngroup = "loopd"\n'
            f'[tools]\nrunner = "unix:{self.tools_socket}"\nexecutables = "{self.programs}"\n{self._tools}\n',
        )

    def drop_in(self, unit: str, lines: str) -> None:
        """Change `[Service]` of one of its units; it counts from the unit's next start on."""
        folder = f"/run/systemd/system/{unit}.d"
        self.device.out("mkdir -p %s", folder)
        self._write(f"{folder}/check.conf", f"[Service]\n{lines}\n")
        self.device.out("systemctl daemon-reload")

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
        units = f"{self.unit} {self.tools_socket_unit} {self.tools_unit} {self.model_unit}"
        self.device.run(
            f"systemctl stop {units}; umount {self.home}; rm -rf {self.home} {self.tools_home} {self.root} "
            "/run/loopd-checks /run/loopd-check-tools /run/systemd/system/loopd-check*; systemctl daemon-reload; "
            f"systemctl reset-failed {units}",
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
            ("StateDirectory=loopd-tools", "StateDirectory=loopd-check-tools"),
            ("/run/loopd-model/", "/run/loopd-check-model/"),
            ("/run/loopd-tools", "/run/loopd-check-tools"),
            ("/run/loopd/", "/run/loopd-check/"),
        ):
            text = text.replace(old, new)
        text = re.sub(r"^(After|Before|BindsTo|PartOf|Requires|Wants)=.*", _of_the_checks, text, flags=re.MULTILINE)
        self._write(f"/run/systemd/system/{unit}", text + "\n")

    def _write(self, path: str, text: str) -> None:
        self.device.out("printf %%s %s >%s && chmod 644 %s", text, path, path)


def _of_the_checks(line: re.Match[str]) -> str:
    """Return a unit's line with the units of the checks in place of the installed ones."""
    return re.sub(r"\bloopd(?=(-\w+)?\.)", "loopd-check", line[0])
