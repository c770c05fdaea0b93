"""The model server and the daemon of a person who works from a checkout: what `make chat`, `restart` and `stop` do.

On a device systemd does this. Here both run in the background with their logs and process ids in one folder; a
process is known by its id and the time it started, so a reused id is never ended.
"""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
from tenacity import retry, retry_if_result, stop_after_delay, wait_fixed

from loopd.cli.context import Context, run
from loopd.errors import LoopdError

_SERVICES = ("model", "loopd")
_START_S = 30.0
_STOP_S = 60.0
_START_TIME_FIELD = 19  # of /proc/PID/stat behind the name, counted from 0; see proc(5)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--run", "folder", type=click.Path(path_type=Path), default=Path("build/run"), show_default=True)
@click.pass_context
def cli(ctx: click.Context, folder: Path) -> None:
    """Start, restart and stop the model server and the daemon of this checkout."""
    folder.mkdir(parents=True, exist_ok=True)
    ctx.obj = folder


@cli.command()
@click.option("--gguf", type=click.Path(path_type=Path), required=True, help="Model file to serve.")
@click.pass_obj
def start(folder: Path, gguf: Path) -> None:
    """Start what does not run yet."""
    _start(folder, "model", ["model", "serve", "--gguf", str(gguf)])
    _start(folder, "loopd", ["serve"])


@cli.command()
@click.pass_obj
def restart(folder: Path) -> None:
    """Restart the daemon; the model server goes on."""
    if not _running(folder, "model"):
        raise LoopdError("the model server does not run", hint="make chat starts both")
    _stop(folder, "loopd")
    _start(folder, "loopd", ["serve"])


@cli.command()
@click.pass_obj
def stop(folder: Path) -> None:
    """Stop the daemon, then the model server."""
    for service in reversed(_SERVICES):
        _stop(folder, service)


def _start(folder: Path, service: str, arguments: list[str]) -> None:
    if _running(folder, service):
        return
    log_path = folder / f"{service}.log"
    with log_path.open("ab") as log:
        process = subprocess.Popen(  # noqa: S603 - our own command line
            [sys.executable, "-m", "loopd.cli.loopd", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (folder / f"{service}.pid").write_text(f"{process.pid} {_started(process.pid)}\n")
    if not _answers(service, process):
        reasons = [line for line in log_path.read_text(errors="replace").splitlines() if line.startswith("error: ")]
        raise LoopdError(
            f"{service} did not start: {reasons[-1].removeprefix('error: ') if reasons else 'it gave no reason'}",
            hint=f"{log_path} has its log",
        )
    click.echo(f"{service} started (log: {log_path})", err=True)


@retry(
    stop=stop_after_delay(_START_S),
    wait=wait_fixed(0.1),
    retry=retry_if_result(lambda up: up is None),
    retry_error_callback=lambda _: False,
)
def _answers(service: str, process: "subprocess.Popen[bytes]") -> bool | None:
    """Tell whether the service takes connections; False once its process has ended."""
    from loopd.home import default_channel, default_model_socket

    home = Context().home.path
    path = default_model_socket(home) if service == "model" else default_channel(home)
    if process.poll() is not None:
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        return True if probe.connect_ex(str(path)) == 0 else None


def _stop(folder: Path, service: str) -> None:
    pid = _running(folder, service)
    if pid:
        os.kill(pid, signal.SIGTERM)
        if not _gone(pid):
            raise LoopdError(f"{service} (process {pid}) has not ended within {_STOP_S:g} s")
        click.echo(f"{service} stopped", err=True)
    (folder / f"{service}.pid").unlink(missing_ok=True)


@retry(
    stop=stop_after_delay(_STOP_S),
    wait=wait_fixed(0.05),
    retry=retry_if_result(lambda gone: not gone),
    retry_error_callback=lambda _: False,
)
def _gone(pid: int) -> bool:
    return not _started(pid)


def _running(folder: Path, service: str) -> int:
    """Return the process id of the service that was started here, 0 if it does not run."""
    try:
        pid, started = (folder / f"{service}.pid").read_text().split()
    except (OSError, ValueError):
        return 0
    return int(pid) if started == _started(int(pid)) else 0


def _started(pid: int) -> str:
    """Return when the process started, in clock ticks since boot; '' if there is none (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[_START_TIME_FIELD]


if __name__ == "__main__":
    run(cli)
