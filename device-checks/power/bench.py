"""One machine, its model and a client outside, and what is done with them: cut, boot, compare."""

import re
import secrets
import time
from dataclasses import dataclass
from random import Random
from typing import Any

from power.machine import Machine
from power.model import ScriptedModel
from power.witness import Witness

LONG_TEXT = "So much may be said about the sea and its light. " * 80
_BOOT_TIMEOUT_S = 600.0
_FLUSH_TIMEOUT_S = 60.0
_REFUSAL = re.compile(r"\.jsonl:\d+: ")


@dataclass(frozen=True, slots=True)
class Point:
    """A moment at which the power is cut, and how.

    Attributes:
        name: what the device is doing.
        frame: the type of the frame at which it is cut.
        step: what the scripted model does in that turn.
        flush: not at the frame itself, but at the flush of that number after it, before the flush is done.
        keep: the part of the unflushed sectors that the disk keeps nevertheless, at random.
    """

    name: str
    frame: str
    step: dict[str, Any]
    flush: int = 0
    keep: float = 0.0

    def __str__(self) -> str:
        where = f"flush {self.flush} after {self.frame}" if self.flush else self.frame
        return f"{self.name} at {where}" + (f" keeping {self.keep:.0%}" if self.keep else "")


class Bench:
    """A machine, the model server beside it, and the client that remembers."""

    def __init__(self, machine: Machine, model: ScriptedModel | None) -> None:
        self.machine = machine
        self.witness = Witness(machine.channel)
        self._model = model
        self._text = LONG_TEXT if model else "Name a colour of the sea."  # a real model is slow in there
        self._random = Random()
        self._session = self._new_session()
        self.boot()
        self.converse()

    def boot(self) -> float:
        """Boot and wait until the daemon serves; return how long that took, in seconds."""
        began = time.monotonic()
        if self._model is not None:
            self._model.play()
        self.machine.boot(self._model.url if self._model else None)
        status = self.witness.wait(_BOOT_TIMEOUT_S, self.machine.check)
        for refused in status["refused"]:
            assert _REFUSAL.search(refused["reason"]), f"refused without file and line: {refused}"
            if refused["session"] == self._session:
                self._session = self._new_session()
        return time.monotonic() - began

    def converse(self) -> None:
        """Hold a turn that is completed."""
        reason = self.witness.say(self._session, "Say something short.", secrets.token_hex(8))
        assert reason in {"completed", "length"}, reason

    def cut(self, point: Point) -> dict[str, Any]:
        """Cut the power at a point of a turn, boot again, and hold loopd to what it had acknowledged.

        Returns:
            What there was to lose, as a row of a table.
        """
        session, key = self._session, secrets.token_hex(8)
        if self._model is not None:
            self._model.play(point.step)
        talk = self.witness.talk(session, self._text, key)
        for frame in talk:
            self.witness.note(frame)
            if frame["type"] == point.frame and frame.get("key", key) == key:
                break
        else:
            raise AssertionError(f"the turn ended before its {point.frame}: {talk.end()}")
        self._lose_power(point)
        for frame in talk.rest()[0]:
            self.witness.note(frame)
        acknowledged = len(self.witness.acknowledged)
        seconds = self.boot()
        lost = self.witness.lost()
        assert lost == [], f"{len(lost)} of {acknowledged} acknowledged records are lost: {', '.join(lost[:5])}"
        if session == self._session:
            # As its client would: under the same key nothing runs twice.
            assert self.witness.say(session, self._text, key) in {"completed", "length", "interrupted"}
            said = [
                record for record in self.witness.records(session) if record["type"] == "user" and record["key"] == key
            ]
            assert len(said) == 1, f"said once, recorded {len(said)} times"
        self.converse()
        cut = self.machine.disk.cut
        assert cut is not None
        return {
            "cut": str(point), "unflushed sectors": cut.unflushed, "kept": cut.kept, "acknowledged": acknowledged,
            "lost": len(lost), "refused": "no" if session == self._session else "yes", "serves after s": round(seconds),
        }  # fmt: skip

    def _lose_power(self, point: Point) -> None:
        if point.flush:
            self.machine.disk.cut_at_flush(point.flush, point.keep, self._random)
            if point.step.get("prefill_gate"):
                assert self._model is not None
                self._model.open_gate()
            assert self.machine.disk.off.wait(_FLUSH_TIMEOUT_S), "no flush came"
        else:
            self.machine.disk.cut_now(point.keep, self._random)
        self.machine.kill()
        if self._model is not None:
            self._model.kill()

    @staticmethod
    def _new_session() -> str:
        return f"cut-{secrets.token_hex(4)}"
