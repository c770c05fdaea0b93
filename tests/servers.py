"""Model servers as processes, for tests of the whole path."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from loopd.model.catalog import SMOLLM2

_ROOT = Path(__file__).parents[1]
_LOOPD = (sys.executable, "-c", "from loopd.cli.loopd import main; main()")
_PATIENCE_S = 60.0


def model_file() -> Path:
    """Return the small real model: `LOOPD_TEST_MODEL`, else the one that `make setup` has fetched."""
    path = Path(os.environ.get("LOOPD_TEST_MODEL", _ROOT / "build" / "models" / SMOLLM2.name))
    assert path.is_file(), f"no test model at {path}: make setup, or set LOOPD_TEST_MODEL"
    return path


@contextmanager
def start_model_server(
    socket: Path, *, gguf: Path, home: Path | None = None, pids: list[int] | None = None, **model_table: Any
) -> Iterator[str]:
    """Run `loopd model serve` with one thread and yield its URL.

    Args:
        socket: where it listens.
        gguf: the model.
        home: whose `slots` directory its states go to; a temporary one for None.
        pids: is given the process's id.
        model_table: sets more keys of `[model]`.
    """
    with tempfile.TemporaryDirectory(prefix="loopd-") as directory:
        config = Path(directory) / "loopd.toml"
        table = {"gguf": str(gguf), "threads": 1, **model_table}
        config.write_text(tomli_w.dumps({"model": table}), encoding="utf-8")
        arguments = (
            "--home",
            str(home or directory),
            "--config",
            str(config),
            "model",
            "serve",
            "--socket",
            str(socket),
        )
        with _listening(arguments, Path(directory) / "server.log", pids) as url:
            yield url


@contextmanager
def start_scripted_server(socket: Path | None, script: Mapping[str, Any]) -> Iterator[str]:
    """Run `loopd model serve --script` on the socket, or on a free port, and yield its URL."""
    with tempfile.TemporaryDirectory(prefix="loopd-") as home:
        path = Path(home) / "script.json"
        path.write_text(json.dumps(script), encoding="utf-8")
        place = ("--socket", str(socket)) if socket else ("--port", "0")
        arguments = ("--home", home, "model", "serve", "--script", str(path), *place)
        with _listening(arguments, Path(home) / "server.log") as url:
            yield url


@contextmanager
def _listening(arguments: tuple[str, ...], log_path: Path, pids: list[int] | None = None) -> Iterator[str]:
    """Run `loopd` with the arguments; yield the URL that it says it listens on."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("NOTIFY_SOCKET", None)
    with log_path.open("wb") as log:
        server = subprocess.Popen(
            [*_LOOPD, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert server.stdout is not None
    if pids is not None:
        pids.append(server.pid)
    try:
        line = next((line for line in server.stdout if line.startswith("listening on ")), "")
        assert line, f"{arguments} ended with {server.wait(_PATIENCE_S)}:\n{log_path.read_text(errors='replace')}"
        yield line.removeprefix("listening on ").strip()
    finally:
        server.terminate()
        server.wait(_PATIENCE_S)
        server.stdout.close()
