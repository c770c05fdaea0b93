"""The real daemon, the real client and a model server as processes, for whole-path tests and benchmarks."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import tomli_w

PATIENCE_S = 900.0
_RUN = (sys.executable, "-c")
LOOPD = (*_RUN, "from loopd.cli.loopd import main; main()")
BXCTL = (*_RUN, "from loopd.cli.bxctl import main; main()")


class Appliance:
    """One home with its configuration and, while it runs, its daemon. The model server is somebody else's."""

    def __init__(self, root: Path, model_url: str, **tables: dict[str, Any]) -> None:
        self.home = root / "home"
        self.config_path = root / "loopd.toml"
        self.socket = root / "channel.sock"
        self.log_path = root / "loopd.log"
        self._model_url = model_url
        self.environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
            "HOME": str(root),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "LOOPD_HOME": str(self.home),
            "LOOPD_CONFIG": str(self.config_path),
            "LOOPD_SOCKET": str(self.socket),
        }
        self.daemon: subprocess.Popen[bytes] | None = None
        self.configure(**tables)

    def configure(self, **tables: dict[str, Any]) -> None:
        """Write the configuration; `model` gets the server's URL and temperature 0 unless told otherwise."""
        model = {"url": self._model_url, "temperature": 0.0, **tables.pop("model", {})}
        self.config_path.write_text(tomli_w.dumps({"model": model, **tables}), encoding="utf-8")

    def start(self) -> None:
        """Start the daemon and return when it has said that it is ready."""
        notify_path = self.home.parent / "notify.sock"
        notify_path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(str(notify_path))
            notify.settimeout(PATIENCE_S)
            with self.log_path.open("ab") as log:
                self.daemon = subprocess.Popen(
                    [*LOOPD, "serve"],
                    env={**self.environment, "NOTIFY_SOCKET": str(notify_path)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            while b"READY=1" not in notify.recv(4096):
                pass

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End the daemon by a signal and return its exit status."""
        assert self.daemon is not None
        self.daemon.send_signal(how)
        status = self.daemon.wait(PATIENCE_S)
        self.daemon = None
        return status

    def bxctl(self, *arguments: str, ok: bool = True, text: str = "") -> subprocess.CompletedProcess[str]:
        """Run the client to its end; with `ok` its exit status must be 0."""
        done = subprocess.run(
            [*BXCTL, *arguments],
            env=self.environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert not ok or done.returncode == 0, (
            f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.log()}"
        )
        return done

    def loopd(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `loopd` to its end."""
        return subprocess.run(
            [*LOOPD, *arguments], env=self.environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def json(self, *arguments: str) -> Any:
        """Run the client with `--json` and return what it printed."""
        return json.loads(self.bxctl(*arguments, "--json").stdout)

    def chat(self, session: str, *texts: str, options: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Say the texts one after another and return every server frame."""
        messages = [part for text in texts for part in ("--message", text)]
        done = self.bxctl("chat", "--session", session, *messages, *options, "--json")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def log(self) -> str:
        """Return what the daemon has logged."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def baseline(self, session: str) -> dict[str, Any]:
        """Return the frozen part of a session's requests."""
        path = self.home / "sessions" / session / "0.baseline.json"
        value: dict[str, Any] = json.loads(path.read_bytes())
        return value


@contextmanager
def running(appliance: Appliance) -> Iterator[Appliance]:
    """Run the daemon for the time of a block, and end it however the block ends."""
    appliance.start()
    try:
        yield appliance
    finally:
        if appliance.daemon is not None:
            appliance.daemon.kill()
            appliance.daemon.wait(PATIENCE_S)
            appliance.daemon = None


class ServerNumbers:
    """The model server's own numbers, asked past loopd."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=url.removeprefix("unix:")), base_url="http://model", timeout=PATIENCE_S
        )

    def close(self) -> None:
        self._http.close()

    def evaluated(self) -> int:
        """Return how many prompt tokens the server has evaluated since it started."""
        for line in self._http.get("/metrics").text.splitlines():
            if line.startswith("llamacpp:prompt_tokens_total "):
                return int(float(line.split()[1]))
        raise AssertionError("the server counts no prompt tokens")

    def prompt_tokens(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, open_: bool = True) -> int:
        """Return how many tokens a request of these messages has; without `open_`, the messages alone."""
        body = {"messages": messages, "tools": tools, "add_generation_prompt": open_}
        prompt = self._http.post("/apply-template", json=body).json()["prompt"]
        answer = self._http.post("/tokenize", json={"content": prompt, "add_special": True, "parse_special": True})
        return len(answer.json()["tokens"])
