"""Approval questions for a person: what is to be run, and a key or a line for the answer (SPEC 6, 9).

What a model wrote is shown with everything made visible that could steer the terminal or hide something.
"""

import asyncio
import contextlib
import json
import sys
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from loopd.channel.conversation import Conversation
from loopd.cli.render import visible
from loopd.clock import monotonic_s
from loopd.proto.frames import ApprovalDecided, ApprovalRequest, Choice, Opened, ServerFrame, TurnEndFrame

if TYPE_CHECKING:
    from prompt_toolkit.application import Application
    from prompt_toolkit.key_binding import KeyPressEvent

How = Literal["key", "line", "wait", "once", "none"]
"""A key at once; a line that somebody else reads; an answer from elsewhere; "once" to everything; not at all."""

ANSWERS: dict[str, Choice] = {
    "o": "once",
    "once": "once",
    "s": "session",
    "session": "session",
    "n": "deny",
    "no": "deny",
    "deny": "deny",
}
DECIDED: dict[Choice, str] = {"once": "allowed once", "session": "allowed for the session", "deny": "denied"}

_HASTY_S = 0.5
"""A key that comes sooner was meant for something else."""

_LINE_CHARS = 100
_MAX_LINES = 24
_ARGUMENT_WORDS = {"read": "which only reads", "write": "which may change something"}


def described(request: ApprovalRequest) -> list[str]:
    """Return what is asked, as lines for a person."""
    return [
        f"the model wants to run {visible(request.name)}, {_ARGUMENT_WORDS[request.effect]}:",
        *(f"  {visible(line)}" for line in _argument_lines(request.arguments)),
        f"  asked because of {visible(request.rule)}",
    ]


def _argument_lines(text: str) -> list[str]:
    """Return the arguments in the form that is read best; text that is cut is no JSON and stays as it is."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.splitlines()
    line = json.dumps(value, ensure_ascii=False)
    lines = json.dumps(value, ensure_ascii=False, indent=2).split("\n")
    return [line] if len(line) <= _LINE_CHARS or len(lines) > _MAX_LINES else lines


class Questions:
    """The question that waits in a conversation; there is at most one.

    Args:
        conversation: takes the answers.
        screen: shows the questions and how they end.
        tasks: where a question waits for its key.
        how: how the answer is got; may be set anew for the next question.
        on_interrupt: called for Ctrl-C at a question.
    """

    def __init__(self, conversation: Conversation, screen: Console, tasks: asyncio.TaskGroup, how: How) -> None:
        self.how: How = how
        self.on_interrupt: Callable[[], None] = conversation.cancel
        self.waiting: ApprovalRequest | None = None
        self._conversation, self._screen, self._tasks = conversation, screen, tasks
        self._answered: Choice | None = None
        self._asking: asyncio.Task[None] | None = None
        self._line: Application[Choice | None] | None = None

    async def take(self, frame: ServerFrame) -> None:
        """Take one frame, in order: one that asks, or one after which nothing is to be answered any more."""
        match frame:
            case ApprovalRequest() if self.waiting is None and self.how != "none":
                self._begin(frame)
            case ApprovalDecided() if self.waiting and self.waiting.call == frame.call:
                own = self._answered == frame.decision
                await self.withdraw()
                self._say(_ending(frame, own=own))
            case Opened() | TurnEndFrame():
                await self.withdraw()

    def answer(self, choice: Choice) -> None:
        """Answer the question that waits; `approval_decided` ends it."""
        assert self.waiting is not None
        self._answered = choice
        self._conversation.approve(self.waiting.call, choice)

    def lost(self) -> None:
        """Take the question off the screen at once: the daemon is gone. If it still waits, it is asked again."""
        self.waiting = None
        if self._asking is not None and self._line is not None:
            self._line.renderer.erase()
            self._asking.cancel()

    async def withdraw(self) -> None:
        """Take the question off the screen: it is decided, or nobody is there to take the answer."""
        self.waiting = None
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait({self._asking})
            self._asking = None

    def _begin(self, request: ApprovalRequest) -> None:
        self.waiting, self._answered = request, None
        for line in described(request):
            self._say(line, style="yellow")
        if self.how == "key":
            self._asking = self._tasks.create_task(self._ask(request))
        elif self.how == "line":
            self._say(f"answer o (once), s (for the session) or n (no), within {request.seconds:.0f} s")
        elif self.how == "wait":
            where = f"bxctl approve {request.session} {request.call}"
            self._say(f"waiting {request.seconds:.0f} s for an answer: {where} once|session|deny")
        else:
            self.answer("once")

    async def _ask(self, request: ApprovalRequest) -> None:
        _forget_typed()
        self._line = _question(request, to_stderr=self._screen.stderr)
        choice = await self._line.run_async(handle_sigint=False)
        if choice is None:
            self.on_interrupt()
        elif self.waiting is request:
            self.answer(choice)

    def _say(self, text: str, style: str = "dim") -> None:
        self._screen.print(text, style=style, soft_wrap=True)


def _ending(frame: ApprovalDecided, *, own: bool) -> str:
    """Return how a question ended, for a person."""
    text = DECIDED[frame.decision]
    if own:
        return text
    return f"{text}: {visible(frame.reason)}" if frame.uid is None else f"{text} {visible(frame.reason)}, elsewhere"


def _question(request: ApprovalRequest, *, to_stderr: bool) -> "Application[Choice | None]":
    """Return a line that takes one key; its result is None for Ctrl-C."""
    from prompt_toolkit.application import Application
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout import FormattedTextControl, Layout, Window
    from prompt_toolkit.output import create_output

    began_s = monotonic_s()
    keys = KeyBindings()

    def bind(key: str, result: Choice | None) -> None:
        @keys.add(key)
        def _press(event: "KeyPressEvent") -> None:
            if monotonic_s() - began_s >= _HASTY_S or result is None:
                event.app.exit(result=result)

    for key in "osn":
        bind(key, ANSWERS[key])
        bind(key.upper(), ANSWERS[key])
    for key in ("enter", "c-d"):
        bind(key, "deny")
    bind("c-c", None)

    def text() -> FormattedText:
        left_s = max(0.0, request.seconds - (monotonic_s() - began_s))
        words = "run it? [o]nce · for the [s]ession · [n]o (Enter)"
        return FormattedText([("bold", words), ("", f"   {left_s:.0f} s left ")])

    window = Window(FormattedTextControl(text, show_cursor=False), dont_extend_height=True, wrap_lines=True)
    return Application(
        layout=Layout(window),
        key_bindings=keys,
        erase_when_done=True,
        refresh_interval=1.0,
        output=create_output(stdout=sys.stderr) if to_stderr else None,
    )


def _forget_typed() -> None:
    """Drop what was typed before the question was there: it was no answer."""
    with contextlib.suppress(OSError, ValueError, termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
