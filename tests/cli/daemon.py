"""A fake daemon in a thread, and `bxctl` run in this process against it."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from loopd.cli.bxctl import main
from loopd.config import Config
from loopd.home import Home
from tests.channel.fakes import PATIENCE_S, FakeEngine, serving


@contextmanager
def daemon_thread(home: Home, config: Config, engine: FakeEngine) -> Iterator[None]:
    """Serve in a thread of its own for the time of a block."""
    ready = threading.Event()
    ending: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    async def serve() -> None:
        stop = asyncio.Event()
        ending.append((asyncio.get_running_loop(), stop))
        async with serving(home, config, engine):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield
    finally:
        loop, stop = ending[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)


@dataclass
class Done:
    """What a command left: its exit status and what it printed."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def frames(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Bxctl:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str) -> Done:
        self._monkeypatch.setattr("sys.argv", ["bxctl", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = self._capsys.readouterr()
        assert "Traceback" not in err
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, out, err)
