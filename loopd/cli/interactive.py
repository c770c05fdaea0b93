"""The chat in a terminal: an input line with history, the answer as it streams, Ctrl-C for the turn (SPEC 9)."""

import asyncio
import contextlib
from collections import deque
from contextlib import aclosing
from pathlib import Path

from platformdirs import user_state_path
from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.patch_stdout import patch_stdout

from loopd.channel.conversation import Conversation
from loopd.cli.questions import ANSWERS, Questions
from loopd.cli.render import console
from loopd.cli.view import TurnView
from loopd.cli.words import check_answer, interrupts, say_new, show_end, show_error
from loopd.errors import DaemonError
from loopd.proto.frames import CaughtUp, ErrorFrame, Opened, RecordFrame, ServerFrame, TurnEndFrame
from loopd.proto.ids import new_key

_SHOWN_TURNS = 3
_READ_LINES = 40


class Interactive:
    """One conversation in a terminal.

    A task reads the daemon's frames all the time, also while the person types, so that what other clients say shows
    up and the daemon never finds this one slow.
    """

    _questions: Questions

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        conversation.on_lost = self._lost
        self._view = TurnView(console())
        self._prompt: PromptSession[str] = PromptSession(history=_history())
        self._ready = asyncio.Event()
        self._past: deque[RecordFrame] | None = None
        self._key: str | None = None
        self._end: asyncio.Future[TurnEndFrame | DaemonError] | None = None

    async def run(self) -> None:
        """Talk until Ctrl-D.

        Raises:
            LoopdError: the session cannot be opened, or the daemon is gone and did not come back.
        """
        try:
            async with aclosing(self._conversation), asyncio.TaskGroup() as tasks:
                self._questions = Questions(self._conversation, console(), tasks, "line")
                reading = tasks.create_task(self._read())
                await self._ready.wait()
                self._hint(f"session {self._conversation.session} · Ctrl-C cancels the turn, Ctrl-D ends the chat\n")
                await self._talk()
                await self._questions.withdraw()
                reading.cancel()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._view.rest()

    # --- the daemon's side --------------------------------------------------------------------------------------

    async def _read(self) -> None:
        async with aclosing(self._conversation.frames()) as frames:
            async for frame in frames:
                try:
                    check_answer(frame, self._key)
                except DaemonError as error:
                    if self._end is None or not isinstance(frame, ErrorFrame) or frame.ref != self._key:
                        raise
                    self._end.set_result(error)
                if self._ready.is_set():
                    await self._show(frame)
                else:
                    await self._open(frame)

    async def _show(self, frame: ServerFrame) -> None:
        self._view.show(frame)
        await self._questions.take(frame)
        if self._prompt.app.is_running:
            self._prompt.app.invalidate()
        if isinstance(frame, TurnEndFrame) and frame.key == self._key and self._end and not self._end.done():
            self._end.set_result(frame)

    async def _open(self, frame: ServerFrame) -> None:
        """Take the frames before the first prompt: of a session with a past, its last turns are shown."""
        match frame:
            case Opened(created=True):
                say_new(frame.session)
            case Opened() if self._past is None and (frame.lines > 1 or frame.epoch):
                self._past = deque(maxlen=_READ_LINES)
                await self._conversation.history(max(1, frame.lines - _READ_LINES + 1))
            case RecordFrame() if self._past is not None:
                self._past.append(frame)
            case CaughtUp() if self._past is None or self._past or frame.line <= 1:
                self._show_past()
                self._ready.set()

    def _show_past(self) -> None:
        past = list(self._past or ())
        starts = ("user", "session_start") if past and past[0].epoch else ("user",)
        begins = [index for index, frame in enumerate(past) if frame.record["type"] in starts]
        for frame in past[begins[-_SHOWN_TURNS:][0] :] if begins else []:
            self._view.show(frame)

    # --- the person's side --------------------------------------------------------------------------------------

    async def _talk(self) -> None:
        unsaid = ""
        while True:
            try:
                with patch_stdout(raw=True):
                    text = await self._prompt.prompt_async(self._message, default=unsaid)
            except EOFError:
                return
            except KeyboardInterrupt:
                self._hint("Ctrl-D ends the chat")
                unsaid = ""
                continue
            unsaid = await self._said(text) if text.strip() else ""

    async def _said(self, text: str) -> str:
        """Take a line: the answer to a question that waits, else a turn; return what goes back into the input line."""
        if not self._questions.waiting:
            return await self._turn(text)
        if choice := ANSWERS.get(text.strip().lower()):
            self._questions.answer(choice)
            return ""
        self._hint("a call waits for an answer first: o, s or n (Ctrl-C clears the line)")
        return text

    def _message(self) -> FormattedText:
        """Return what stands before the input line; another client's turn may want an answer there."""
        return FormattedText([("bold", "o/s/n › " if self._questions.waiting else "› ")])

    async def _turn(self, text: str) -> str:
        """Run one turn; return the text that goes back into the input line, '' where it is recorded."""
        self._key, self._end = new_key(), asyncio.get_running_loop().create_future()
        self._view.others = False
        try:
            with interrupts(self._conversation, self._cancelling) as interrupt:
                self._questions.how, self._questions.on_interrupt = "key", interrupt
                await self._conversation.say(text, self._key)
                end = await self._end
        finally:
            await self._questions.withdraw()
            self._questions.how = "line"
            self._view.rest()
            self._view.others = True
            self._key = self._end = None
        if isinstance(end, DaemonError):
            show_error(end)
        elif end.reason == "cancelled":
            self._hint("cancelled")
        elif show_end(end):
            return ""
        self._hint("")
        return "" if isinstance(end, TurnEndFrame) and end.recorded else text

    def _cancelling(self) -> None:
        self._view.wait("cancelling; Ctrl-C once more leaves, and the turn goes on")

    def _lost(self) -> None:
        self._view.rest()
        self._questions.lost()
        self._hint("the connection to the daemon is lost, trying again")

    def _hint(self, text: str) -> None:
        console().print(text, style="dim")


class _ForgivingHistory(FileHistory):
    """The input history in a file; a full disk does not end a chat."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def _history() -> History:
    path = Path(user_state_path("loopd")) / "chat-history"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError:
        return InMemoryHistory()
    return _ForgivingHistory(path)
