"""`loopd tools`: the runner as a service of its own, and the check of executables."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loopd.errors import ToolError
from tests.cli.test_model_commands import loopd
from tests.integration.appliance import LOOPD
from tests.tools.processes import PATIENCE_S, STUBBORN, family, is_gone, kept, output, python
from tests.tools.test_executables import put, shell

# As systemd does it: the socket as descriptor 3, and the variables of sd_listen_fds(3).
HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.execve(sys.argv[2], sys.argv[2:], os.environ | {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})
"""


@contextmanager
def service(path: Path, *flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run the runner until the block ends, in a directory of its own."""
    directory = path.parent / "service"
    directory.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [*LOOPD, "tools", "serve", "--socket", str(path), *flags],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            **environment,
        },
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"listening on unix:{path}\n"
        try:
            yield process
        finally:
            process.kill()


async def test_loopd_uses_the_service_that_its_configuration_names(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    async with kept(tmp_path, runner=f"unix:{path}") as children:
        with service(path, OTHER="of the service"):
            async with await children.start(python("import json, os; print(json.dumps(dict(os.environ)))")) as child:
                _, stdout, _ = await output(child)
            described = await children.describe()
        after = await children.describe()
    work = str(tmp_path / "service")
    assert json.loads(stdout) == {"PATH": os.environ["PATH"], "HOME": work, "TMPDIR": work, "LANG": "C.UTF-8"}
    assert described == {
        "where": f"unix:{path}",
        "state": "up",
        "reason": "",
        "sandboxed": False,
        "note": "tool processes are not sandboxed: they may do whatever the runner's user may",
    }
    assert (after["state"], after["sandboxed"]) == ("down", False)
    assert after["reason"].startswith("the runner of tool processes ")


async def test_a_service_that_is_restarted_between_calls_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    async with kept(tmp_path, runner=f"unix:{path}") as children:
        with pytest.raises(ToolError, match="cannot be reached: No such file or directory"):
            await children.start(["true"])
        for _ in range(2):  # the second finds the socket that the first, being killed, left behind
            with service(path):
                async with await children.start(["true"]) as child:
                    assert await child.wait() == 0


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
async def test_a_service_that_ends_takes_its_processes_along(tmp_path: Path, how: signal.Signals) -> None:
    path = tmp_path / "r.sock"
    async with kept(tmp_path, runner=f"unix:{path}") as children:
        with service(path) as process:
            async with await children.start(python(STUBBORN)) as child:
                pids = await family(child)
                process.send_signal(how)
                with pytest.raises(ToolError, match="the runner was stopped"):
                    async with asyncio.timeout(PATIENCE_S):
                        await child.wait()
                assert [pid for pid in pids if not is_gone(pid)] == []
            assert await asyncio.to_thread(process.wait, PATIENCE_S) == (-how if how == signal.SIGKILL else 0)
            assert path.exists() is (how == signal.SIGKILL)


async def test_another_user_than_the_allowed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    with service(path, "--allow-uid", "12345"):
        assert path.stat().st_mode & 0o777 == 0o666
        async with kept(tmp_path, runner=f"unix:{path}") as children:
            refused = f"the runner does not serve user {os.geteuid()}"
            with pytest.raises(ToolError, match=refused):
                await children.start(["true"])
            assert (await children.describe())["reason"] == refused


async def test_allowed_users_are_named_or_numbered_and_the_own_is_the_only_one_by_default(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    with service(path):
        assert path.stat().st_mode & 0o777 == 0o600
    with service(path, "--allow-uid", "nobody", "--allow-uid", str(os.geteuid())):
        async with kept(tmp_path, runner=f"unix:{path}") as children, await children.start(["true"]) as child:
            assert await child.wait() == 0


def test_the_service_tells_systemd_when_it_is_ready(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(PATIENCE_S)
        with service(tmp_path / "r.sock", NOTIFY_SOCKET=str(tmp_path / "notify")):
            assert b"READY=1" in notify.recv(4096)


def test_a_socket_that_cannot_be_had_is_one_error_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    path.write_text("")
    taken = loopd(tmp_path, "tools", "serve", "--socket", str(path))
    assert (taken.returncode, taken.stderr) == (
        2,
        f"error: {path} is there and is no socket\nhint: give another path: --socket PATH\n",
    )
    path.unlink()
    with service(path):
        assert "error: another process listens on" in loopd(tmp_path, "tools", "serve", "--socket", str(path)).stderr


def test_no_directory_is_made_for_a_socket(tmp_path: Path) -> None:
    done = loopd(tmp_path, "tools", "serve", "--socket", str(tmp_path / "none/r.sock"))
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: cannot listen on {tmp_path}/none/r.sock: there is no directory {tmp_path}/none",
        "hint: make it, or give another path: --socket PATH",
    ]
    assert not (tmp_path / "none").exists()


@contextmanager
def handed_over(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the runner on a socket that is already listened on, until the block ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-c", HAND_OVER, str(listener.fileno()), *LOOPD, "tools", "serve"]
        with subprocess.Popen(command, cwd=path.parent, pass_fds=[listener.fileno()]) as process:
            yield process
            process.terminate()


async def test_the_socket_that_systemd_hands_over_is_served(tmp_path: Path) -> None:
    path = tmp_path / "r.sock"
    with handed_over(path) as process:
        async with (
            kept(tmp_path, runner=f"unix:{path}") as children,
            await children.start(python("import os; print(os.listdir('/proc/self/fd'))")) as child,
        ):
            _, stdout, _ = await output(child)
    assert stdout == b"['0', '1', '2', '3']\n"  # the last one lists them
    assert process.returncode == 0
    assert path.exists()


def test_a_service_without_a_socket_says_what_is_missing(tmp_path: Path) -> None:
    done = loopd(tmp_path, "tools", "serve")
    assert done.returncode == 2
    assert "error: give a socket: --socket PATH" in done.stderr


def test_a_user_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = loopd(tmp_path, "tools", "serve", "--socket", str(tmp_path / "r"), "--allow-uid", "no-such-user")
    assert done.returncode == 2
    assert "error: there is no user 'no-such-user'" in done.stderr


def test_check_lists_the_good_and_fails_with_every_fault(tmp_path: Path) -> None:
    directory = tmp_path / "tools"
    put(directory, "good", shell("true"))
    assert loopd(tmp_path, "tools", "check", str(directory)).stdout == f"{directory}/good: ok: good (read)\n"
    put(directory, "a", shell("true"), effect="destroy")
    put(directory, "b", shell("true"), mode=0o644)
    done = loopd(tmp_path, "tools", "check", str(directory))
    assert done.returncode == 2
    assert done.stdout == f"{directory}/good: ok: good (read)\n"
    assert done.stderr.splitlines() == [
        f"error: {directory}/a.toml: effect: found 'destroy', allowed: 'read' or 'write'",
        f"error: {directory}/b: mode: found 0644, allowed: an executable one (chmod +x)",
    ]


def test_check_names_programs_without_a_manifest_and_says_that_there_is_none(tmp_path: Path) -> None:
    directory = tmp_path / "tools"
    directory.mkdir(mode=0o755)
    nothing = f"{directory}: there is no manifest (NAME.toml) in it, so there are no tools\n"
    done = loopd(tmp_path, "tools", "check", str(directory))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", nothing)
    (directory / "README").write_text("no program")
    (directory / "act").write_text("#!/bin/sh\n")
    (directory / "act").chmod(0o755)
    note = f"note: {directory}/act has no manifest act.toml beside it, so it is no tool\n"
    done = loopd(tmp_path, "tools", "check", str(directory))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", nothing + note)
    put(directory, "good.sh", shell("true"))
    done = loopd(tmp_path, "tools", "check", str(directory))
    assert (done.returncode, done.stderr) == (0, note)


def test_check_without_a_directory_says_so(tmp_path: Path) -> None:
    config = tmp_path / "loopd.toml"
    config.write_text("")
    assert loopd(tmp_path, "--config", str(config), "tools", "check").returncode == 2
    config.write_text(f'[tools]\nexecutables = "{tmp_path}/none"\n')
    done = loopd(tmp_path, "--config", str(config), "tools", "check")
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path}/none: cannot be read: No such file or directory\n")
