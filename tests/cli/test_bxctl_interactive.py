"""The chat in a terminal: what is typed, shown and put back (SPEC 9)."""

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output.plain_text import PlainTextOutput

from loopd.channel.conversation import Conversation
from loopd.cli.interactive import Interactive
from loopd.config import Config
from loopd.errors import DaemonError, ModelUnavailable
from loopd.home import Home
from loopd.proto.frames import Approve, Compact, Say
from tests.channel.fakes import PATIENCE_S, QUESTION_FRAME, Daemon, FakeEngine, serving
from tests.channel.test_sessions import talk

ENTER, CTRL_C, CTRL_D = "\r", "\x03", "\x04"


class Screen(io.StringIO):
    """What is printed above the prompt while it waits, and the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._written = asyncio.Event()

    def write(self, text: str) -> int:
        self._written.set()
        return super().write(text)

    async def until(self, text: str) -> None:
        """Return once this text is shown."""
        async with asyncio.timeout(PATIENCE_S):
            while text not in self.getvalue():
                self._written.clear()
                await self._written.wait()


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch, root: Path, screen: Screen) -> Iterator[PipeInput]:
    monkeypatch.setenv("XDG_STATE_HOME", str(root / "state"))
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=PlainTextOutput(screen)):
        yield pipe


@pytest.fixture
async def daemon(home: Home, config: Config, engine: FakeEngine) -> AsyncIterator[Daemon]:
    async with serving(home, config, engine) as running:
        yield running


@asynccontextmanager
async def chatting(daemon: Daemon, keyboard: PipeInput) -> AsyncIterator[None]:
    """Chat in session `s` for the time of a block, which types; then Ctrl-D."""
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(Interactive(Conversation(daemon.path, "s", can_approve=True)).run())
        yield
        keyboard.send_text(CTRL_D)


async def test_a_session_that_goes_on_from_a_summary_shows_it_first(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "hello")
        await client.ask(Compact(session="s"))
    async with chatting(daemon, keyboard):
        keyboard.send_text("again" + ENTER)
        for _ in range(2):
            await daemon.engine.turn_has_ended()
    out = capsys.readouterr().out
    assert "goes on in epoch 1, from this summary:\nThey said something." in out
    assert out.index("They said something.") < out.index("AGAIN")
    assert "HELLO" not in out


async def test_a_text_is_said_its_answer_and_its_usage_line_shown(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    async with chatting(daemon, keyboard):
        keyboard.send_text("hello" + ENTER)
        await daemon.engine.turn_has_ended()
    out, err = capsys.readouterr()
    assert "HELLO\n10 prompt · 0 cached · 10 evaluated · loss 0 · 0.2 s\n" in out
    assert err == "new session s\n"


async def test_a_text_that_failed_stands_in_the_input_line_again(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.engine.failure = ModelUnavailable("no model server", hint="loopd model serve")
    async with chatting(daemon, keyboard):
        keyboard.send_text("hello" + ENTER)
        await daemon.engine.turn_has_ended()
        daemon.engine.failure = None
        keyboard.send_text(" again" + ENTER)
        await daemon.engine.turn_has_ended()
    assert daemon.engine.ran == ["hello", "hello again"]
    assert "error: no model server\nhint: loopd model serve\n" in capsys.readouterr().err


async def test_ctrl_c_cancels_the_turn_and_puts_the_text_back(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.engine.hold("hello")
    async with chatting(daemon, keyboard):
        keyboard.send_text("hello" + ENTER)
        await daemon.engine.is_held()
        os.kill(os.getpid(), signal.SIGINT)
        await daemon.engine.turn_has_ended()
        keyboard.send_text("!" + ENTER)
        await daemon.engine.turn_has_ended()
    out, err = capsys.readouterr()
    assert daemon.engine.ran == ["hello", "hello!"]
    assert "cancelled" in out
    assert "error" not in err


async def test_ctrl_c_at_the_prompt_clears_the_line(daemon: Daemon, keyboard: PipeInput) -> None:
    async with chatting(daemon, keyboard):
        keyboard.send_text("not this" + CTRL_C + "this" + ENTER)
        await daemon.engine.turn_has_ended()
    assert daemon.engine.ran == ["this"]


async def test_a_session_with_a_past_shows_its_last_turns(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    async with daemon.client() as client:
        await client.open("s")
        for text in ("one", "two", "three", "four"):
            await client.send(Say(session="s", text=text, key=text))
            await client.until("turn_end")
    async with chatting(daemon, keyboard):
        keyboard.send_text("five" + ENTER)
        for _ in range(5):
            await daemon.engine.turn_has_ended()
    out = capsys.readouterr().out
    assert "› two\nTWO\n› three\nTHREE\n› four\nFOUR\n" in out
    assert "ONE" not in out


async def test_what_another_client_says_is_shown_above_the_prompt(
    daemon: Daemon, keyboard: PipeInput, screen: io.StringIO
) -> None:
    async with chatting(daemon, keyboard):
        keyboard.send_text("mine" + ENTER)
        await daemon.engine.turn_has_ended()
        async with daemon.client() as client:
            await client.open("s")
            await client.send(Say(session="s", text="theirs", key="t"))
            await client.until("turn_end")
        keyboard.send_text("mine again" + ENTER)
        for _ in range(2):
            await daemon.engine.turn_has_ended()
    assert "› theirs" in screen.getvalue()
    assert "THEIRS" in screen.getvalue()


# --- approvals ----------------------------------------------------------------------------------------------------

ASKED = """\
the model wants to run files.write, which may change something:
  {"path": "/notes"}
  asked because of [tools.policy] write = "ask"
"""


@pytest.fixture
def no_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take keys at once: a test types what it means."""
    monkeypatch.setattr("loopd.cli.questions._HASTY_S", 0.0)


async def asking(daemon: Daemon, keyboard: PipeInput, text: str = "write") -> None:
    """Say something whose turn asks, and return when it does."""
    daemon.engine.ask(text)
    keyboard.send_text(text + ENTER)
    await daemon.engine.is_held()


@pytest.mark.usefixtures("no_guard")
@pytest.mark.parametrize(
    ("key", "choice", "said"),
    [
        ("o", "once", "allowed once"),
        ("S", "session", "allowed for the session"),
        ("n", "deny", "denied"),
        (ENTER, "deny", "denied"),
        (CTRL_D, "deny", "denied"),
        ("xy o", "once", "allowed once"),
    ],
)
async def test_a_key_answers_what_a_turn_asks(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str], key: str, choice: str, said: str
) -> None:
    async with chatting(daemon, keyboard):
        await asking(daemon, keyboard)
        keyboard.send_text(key)
        await daemon.engine.turn_has_ended()
    assert [answer.choice for answer in daemon.engine.answers] == [choice]
    assert ASKED + f"{said}\nWRITE\n" in capsys.readouterr().out


@pytest.mark.usefixtures("no_guard")
async def test_ctrl_c_at_a_question_cancels_the_turn(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    async with chatting(daemon, keyboard):
        await asking(daemon, keyboard)
        keyboard.send_text(CTRL_C)
        await daemon.engine.turn_has_ended()
        daemon.engine.questions.clear()
        keyboard.send_text("!" + ENTER)
        await daemon.engine.turn_has_ended()
    assert daemon.engine.ran == ["write", "write!"]
    out = capsys.readouterr().out
    assert "denied: the turn was cancelled\n" in out
    assert "\ncancelled\n" in out


async def test_a_question_that_is_answered_elsewhere_goes_away_and_says_so(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    async with daemon.client(can_approve=True) as client, chatting(daemon, keyboard):
        await client.open("s")
        await asking(daemon, keyboard)
        await client.until("approval_request")
        await client.send(Approve(session="s", call=1, decision="session"))
        await daemon.engine.turn_has_ended()
        keyboard.send_text("again" + ENTER)
        await daemon.engine.turn_has_ended()
    out = capsys.readouterr().out
    assert ASKED + f"allowed for the session by user {os.getuid()}, elsewhere\nWRITE\n" in out
    assert "AGAIN" in out


async def test_a_question_that_nobody_answers_in_time_goes_away_and_says_so(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.engine.ask("write", seconds=0.05)
    async with chatting(daemon, keyboard):
        keyboard.send_text("write" + ENTER)
        await daemon.engine.turn_has_ended()
    assert ASKED + "denied: nobody answered within 0.05 s (approval_timeout_s)\nWRITE\n" in capsys.readouterr().out


async def test_keys_that_were_meant_for_something_else_are_no_answer(
    daemon: Daemon, keyboard: PipeInput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopd.cli.questions._HASTY_S", 3600.0)
    daemon.engine.ask("write", seconds=0.2)
    async with chatting(daemon, keyboard):
        keyboard.send_text("write" + ENTER)
        await daemon.engine.is_held()
        keyboard.send_text("oso" + ENTER)
        await daemon.engine.turn_has_ended()
    assert [answer.uid for answer in daemon.engine.answers] == [None]


async def test_nothing_that_the_model_wrote_can_steer_the_terminal_or_hide(
    daemon: Daemon, keyboard: PipeInput, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"a": "\x1b[2J\u202e\u200b\x9b", "b\n": "ü"}, ensure_ascii=False)
    evil = {"name": "x\x1b.y", "arguments": text, "effect": "read"}
    monkeypatch.setattr("tests.channel.fakes.QUESTION_FRAME", QUESTION_FRAME.model_copy(update=evil))
    daemon.engine.ask("write", seconds=0.05)
    async with chatting(daemon, keyboard):
        keyboard.send_text("write" + ENTER)
        await daemon.engine.turn_has_ended()
    out = capsys.readouterr().out
    assert "the model wants to run x\\x1b.y, which only reads:\n" in out
    assert r"""  {"a": "\u001b[2J\u202e\u200b\x9b", "b\n": "ü"}""" in out
    assert all(char.isprintable() or char == "\n" for char in out)


async def test_what_another_clients_turn_asks_is_answered_in_the_input_line(
    daemon: Daemon, keyboard: PipeInput, screen: Screen
) -> None:
    daemon.engine.ask("theirs")
    async with chatting(daemon, keyboard):
        keyboard.send_text("mine" + ENTER)
        await daemon.engine.turn_has_ended()
        async with daemon.client() as client:
            await client.open("s")
            await client.send(Say(session="s", text="theirs", key="t"))
            await screen.until("o/s/n ›")
            keyboard.send_text("no answer" + ENTER + CTRL_C + "Once " + ENTER)
            await client.until("turn_end")
    assert daemon.engine.ran == ["mine", "theirs"]
    assert [answer.choice for answer in daemon.engine.answers] == ["once"]
    shown = screen.getvalue()
    assert "answer o (once), s (for the session) or n (no)" in shown


async def test_a_session_that_cannot_be_opened_ends_the_chat_with_its_error(
    daemon: Daemon, keyboard: PipeInput
) -> None:
    daemon.engine.hold("x")
    (daemon.home.sessions / "s").write_text("a file")
    with pytest.raises(DaemonError) as caught:
        await asyncio.wait_for(Interactive(Conversation(daemon.path, "s")).run(), PATIENCE_S)
    assert (caught.value.code, caught.value.exit_code) == ("session_refused", 4)


async def test_texts_are_kept_for_the_next_chat(daemon: Daemon, keyboard: PipeInput, root: Path) -> None:
    async with chatting(daemon, keyboard):
        keyboard.send_text("hello" + ENTER)
        await daemon.engine.turn_has_ended()
    kept = root / "state" / "loopd" / "chat-history"
    assert "+hello" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0
