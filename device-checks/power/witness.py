"""A client outside the machine: what it was told is durable, and whether it still is."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checks.device import ROOT

Frame = dict[str, Any]
_BXCTL = ROOT / ".venv" / "bin" / "bxctl"
_TURN_TIMEOUT_S = 900
_ASK_TIMEOUT_S = 60


class Talk:
    """One `bxctl chat --json`: its frames, as they come."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            ["timeout", "--signal=KILL", str(_TURN_TIMEOUT_S), *command],
            env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Frame]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield json.loads(line)

    def rest(self) -> tuple[list[Frame], str]:
        """End the client, which lost its daemon; return what it had received by then, and what it said."""
        self._process.terminate()
        frames = list(self)
        return frames, self.end()

    def end(self) -> str:
        """Wait for its end and return what it said on stderr."""
        return self._process.communicate()[1]


class Witness:
    """Remembers each record that the daemon acknowledged."""

    def __init__(self, channel: Path) -> None:
        self._environment = os.environ | {"LOOPD_SOCKET": str(channel)}
        self.acknowledged: dict[tuple[str, int, int], Frame] = {}

    def talk(self, session: str, text: str, key: str) -> Talk:
        """Begin to say something."""
        chat = ["chat", "--session", session, "--message", text, "--key", key, "--json"]
        return Talk([str(_BXCTL), *chat], self._environment)

    def note(self, frame: Frame) -> None:
        """Remember a frame, if it acknowledges a record."""
        if frame["type"] == "record":
            self.acknowledged[frame["session"], frame["epoch"], frame["line"]] = frame["record"]

    def say(self, session: str, text: str, key: str) -> str:
        """Say something, wait for the end of its turn, and return how it ended."""
        talk, reason = self.talk(session, text, key), ""
        for frame in talk:
            self.note(frame)
            if frame["type"] == "turn_end" and frame["key"] == key:
                reason = frame["reason"]
        said = talk.end()
        assert reason, f"the turn did not end: {said.strip()}"
        return reason

    def wait(self, timeout_s: float, check: Callable[[], None]) -> Frame:
        """Return the daemon's status once it serves and its model server is up; `check` raises where that is vain."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            check()
            status = self._ask("status")
            if status and status["model"]["state"] == "up":
                return status
            time.sleep(0.5)
        raise AssertionError(f"the daemon did not serve within {timeout_s:g} s")

    def records(self, session: str) -> list[Frame]:
        """Return the records of a session, of a refused one those before the bad line."""
        return list((self._ask("show", session) or {"records": []})["records"])

    def lost(self) -> list[str]:
        """Name each acknowledged record that is not there, or not as it was."""
        there = {
            (session, record.pop("epoch"), record.pop("line")): record
            for session in {place[0] for place in self.acknowledged}
            for record in self.records(session)
        }
        return [
            f"{session} epoch {epoch} line {line}: {record['type']}"
            for (session, epoch, line), record in sorted(self.acknowledged.items())
            if there.get((session, epoch, line)) != record
        ]

    def _ask(self, *command: str) -> Frame | None:
        """Return what bxctl prints, None where it prints nothing."""
        done = subprocess.run(
            ["timeout", str(_ASK_TIMEOUT_S), str(_BXCTL), *command, "--json"],
            env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        answer: Frame | None = json.loads(done.stdout) if done.stdout else None
        return answer
