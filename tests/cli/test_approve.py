"""Approvals on the command line: what scripts get, and a second terminal (SPEC 6, 9)."""

import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.channel.fakes import PATIENCE_S, FakeEngine
from tests.cli.daemon import Bxctl

BXCTL = [sys.executable, "-m", "loopd.cli.bxctl"]
SAY = ["chat", "--session", "s", "--message", "write"]
ASKED = (
    "the model wants to run files.write, which may change something:\n"
    '  {"path": "/notes"}\n'
    '  asked because of [tools.policy] write = "ask"\n'
)


@pytest.fixture(autouse=True)
def asks(engine: FakeEngine) -> None:
    engine.ask("write")


def answers(engine: FakeEngine) -> list[str]:
    return [str(answer) for answer in engine.answers]


def by_me(what: str) -> str:
    return f"{what} by user {os.getuid()}"


def test_a_script_is_not_asked_and_its_turn_goes_on(served: Bxctl, engine: FakeEngine) -> None:
    done = served(*SAY)
    assert (done.status, done.out) == (0, "WRITE\n")
    assert answers(engine) == ["denied: nobody was there who could allow it"]


def test_a_script_may_allow_each_call_once_and_says_what_it_allowed(served: Bxctl, engine: FakeEngine) -> None:
    done = served(*SAY, "--approve", "once")
    assert (done.status, done.out) == (0, "WRITE\n")
    assert done.err == f"new session s\n{ASKED}allowed once\n"
    assert answers(engine) == [by_me("allowed once")]


def test_as_json_the_frames_are_all_that_is_printed(served: Bxctl, engine: FakeEngine) -> None:
    done = served(*SAY, "--approve", "once", "--json")
    frames = [frame for frame in done.frames if frame["type"].startswith("approval")]
    assert [frame["type"] for frame in frames] == ["approval_request", "approval_decided"]
    assert frames[0]["arguments"] == '{"path":"/notes"}'
    assert done.err == "new session s\n"


def test_only_calls_of_its_own_turn_are_answered_by_a_script(served: Bxctl, engine: FakeEngine) -> None:
    with asking():
        done = served("chat", "--session", "s", "--message", "mine", "--approve", "once")
        assert (done.status, "waits for an approval" in done.err) == (1, True)
        assert "hint: bxctl approve s shows what it asks" in done.err
        served("approve", "s", "1", "deny")
    assert answers(engine) == [by_me("denied")]


@contextmanager
def asking() -> Iterator["subprocess.Popen[str]"]:
    """Run a chat that waits for an answer from elsewhere; at the end of the block it must have ended well."""
    with subprocess.Popen([*BXCTL, *SAY, "--approve", "ask", "--json"], stdout=subprocess.PIPE, text=True) as chat:
        assert chat.stdout is not None
        assert any('"approval_request"' in line for line in chat.stdout)
        yield chat
        assert "turn_end" in chat.communicate(timeout=PATIENCE_S)[0]
    assert chat.returncode == 0


def test_a_second_terminal_sees_what_waits_and_answers_it(served: Bxctl, engine: FakeEngine) -> None:
    with asking():
        shown = served("approve", "s")
        assert re.sub(r"\d+ s left", "N s left", shown.out) == f"call 1, N s left:\n{ASKED}"
        requests = served("approve", "s", "--json").json["requests"]
        assert requests[0].items() >= {"call": 1, "name": "files.write", "effect": "write"}.items()
        done = served("approve", "s", "1", "session")
        assert (done.status, done.out) == (0, "call 1: allowed for the session\n")
    assert answers(engine) == [by_me("allowed for the session")]
    again = served("approve", "s", "1", "once", "--json")
    assert (again.status, again.out) == (1, "")
    assert again.err.startswith("error: call 1 was already " + by_me("allowed for the session"))
    assert served("approve", "s").err == "s asks nothing\n"
    assert served("approve", "s", "--json").json == {"session": "s", "requests": []}


def test_without_a_terminal_it_is_said_how_to_answer(served: Bxctl, engine: FakeEngine) -> None:
    engine.ask("write", seconds=0.05)
    done = served(*SAY, "--approve", "ask")
    assert ASKED + "waiting 0 s for an answer: bxctl approve s 1 once|session|deny\n" in done.err
    assert done.err.endswith("denied: nobody answered within 0.05 s (approval_timeout_s)\n")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["approve", "nothing"], 1, "there is no session nothing"),
        (["approve", "nothing", "1", "once"], 1, "there is no session nothing"),
        (["approve", "s", "1"], 2, "hint: bxctl approve s 1 once|session|deny"),
        (["approve", "s", "one", "once"], 2, "'one' is not a valid integer"),
        (["approve", "s", "1", "yes"], 2, "'yes' is not one of"),
        (["approve", "/"], 2, "session id"),
        (["chat", "--session", "s", "--approve", "once"], 2, "needs a terminal"),
    ],
)
def test_what_cannot_be_answered_is_said(served: Bxctl, arguments: list[str], status: int, said: str) -> None:
    done = served(*arguments)
    assert done.status == status
    assert said in done.err


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen([*BXCTL, *arguments], stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.shown = ""

    def until(self, *texts: str) -> None:
        """Read until one of the texts is shown behind what was read before."""
        begin = len(self.shown)
        while not any(text in self.shown[begin:] for text in texts):
            assert select.select([self._master], [], [], PATIENCE_S)[0], self.shown
            self.shown += os.read(self._master, 65_536).decode()

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self) -> int:
        """Return the exit status."""
        try:
            while data := os.read(self._master, 65_536):
                self.shown += data.decode()
        except OSError:  # the other end is closed
            pass
        os.close(self._master)
        return self._process.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("key", "choice", "status"), [("o", "allowed once", 0), ("\r", "denied", 0), ("\x03", "cancelled", 1)]
)
def test_at_a_terminal_a_message_asks(served: Bxctl, engine: FakeEngine, key: str, choice: str, status: int) -> None:
    terminal = Terminal(*SAY)
    terminal.until("299 s left", "298 s left")
    terminal.type(key)
    assert terminal.end() == status
    assert ASKED.replace("\n", "\r\n") in re.sub("\x1b\\[[0-9;]*m", "", terminal.shown)
    assert choice in terminal.shown
    assert answers(engine) == ([by_me(choice)] if status == 0 else [])
