import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tests.tools.processes import PATIENCE_S

LOOPD = (sys.executable, "-m", "loopd.cli.loopd")
# As systemd does it: the socket as descriptor 3, and the variables of sd_listen_fds(3).
HAND_OVER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
environment = os.environ | {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execve(sys.executable, [sys.executable, "-m", "loopd.cli.loopd", "tools", "serve", *sys.argv[2:]], environment)
"""


def greeting(path: Path) -> dict[str, object]:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(PATIENCE_S)
        link.connect(str(path))
        said: dict[str, object] = json.loads(link.makefile().readline())
    return said


def test_runner_serves_on_the_socket_that_systemd_hands_over(tmp_path: Path) -> None:
    path = tmp_path / "runner.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        command = [sys.executable, "-c", HAND_OVER, str(listener.fileno())]
        with subprocess.Popen(command, pass_fds=[listener.fileno()]) as process:
            assert "sandboxed" in greeting(path)
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
    assert path.exists()


def test_runner_serves_only_whom_it_may(tmp_path: Path) -> None:
    path = tmp_path / "runner.sock"
    command = [*LOOPD, "tools", "serve", "--socket", str(path), "--allow-uid", str(os.geteuid() + 1)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"listening on unix:{path}\n"
        assert greeting(path) == {"error": f"the runner does not serve user {os.geteuid()}"}
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert not path.exists()


def test_runner_without_any_socket_says_what_is_missing() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LISTEN_")}
    done = subprocess.run(
        [*LOOPD, "tools", "serve"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "--socket PATH" in done.stderr
