"""A bare client of the channel for benchmarks: it blocks, and costs next to nothing beside what it measures."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

from tests.bench.harness import seconds

PATIENCE_S = 300.0


class Talk:
    """One connection with one session open."""

    def __init__(self, path: Path, session: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("rb")
        self._session = session
        self._said = 0
        self._mark = token_hex(8)
        self._send(type="hello", version=1)
        self._send(type="open", session=session, create=True, **{"from": 0})
        self._until("caught_up")

    def say(self, text: str) -> Iterator[dict[str, Any]]:
        """Say it and yield the frames up to the turn's end."""
        self._said += 1
        self._send(type="say", session=self._session, text=text, key=f"{self._mark}-{self._said}")
        for line in self._lines:
            frame: dict[str, Any] = json.loads(line)
            yield frame
            if frame["type"] == "turn_end":
                assert frame["reason"] in {"completed", "length"}, frame
                return
            assert frame["type"] != "error", frame

    def first_delta_s(self, text: str) -> float:
        """Say it and return how long the first text took to come; the turn is waited for."""
        frames = self.say(text)
        taken_s = seconds(lambda: next(frame for frame in frames if frame["type"] == "delta"))
        for _ in frames:
            pass
        return taken_s

    def close(self) -> None:
        self._lines.close()
        self._socket.close()

    def _send(self, **frame: Any) -> None:
        self._socket.sendall(json.dumps(frame).encode() + b"\n")

    def _until(self, kind: str) -> None:
        for line in self._lines:
            frame = json.loads(line)
            assert frame["type"] != "error", frame
            if frame["type"] == kind:
                return
