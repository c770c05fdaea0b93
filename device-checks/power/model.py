"""The scripted model server, beside the machine: it loses its power with it, and plays a script for each cut."""

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

from checks.device import ROOT

from power.machine import free_port

GATE = "hold"
_LOOPD = ROOT / ".venv" / "bin" / "loopd"


class ScriptedModel:
    """One server at a time, always on the same port.

    Attributes:
        url: where it listens, as seen from inside the machine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self.url = f"http://10.0.2.2:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def play(self, *steps: dict[str, Any]) -> None:
        """Be a server that has just started; it plays the steps, and then short answers."""
        self.kill()
        script = self._folder / "script.json"
        script.write_text(json.dumps({"steps": steps, "default": {"text": "Fine."}, "context_tokens": 1_000_000}))
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(_LOOPD), "--home", str(self._folder / "home"),
             "model", "serve", "--script", str(script), "--port", str(self._port)],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it listens

    def open_gate(self) -> None:
        """Let the request go on that waits at `GATE`."""
        gate = f"http://127.0.0.1:{self._port}/gates/{GATE}"
        with urllib.request.urlopen(urllib.request.Request(gate, method="POST"), timeout=30) as answer:
            answer.read()

    def kill(self) -> None:
        """Lose the power; nothing happens where none runs."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
