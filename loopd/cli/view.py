"""Shows the frames of a conversation to a person: the answer as it streams, what the tools do, what it cost."""

from typing import Any

from rich.console import Console, RenderableType
from rich.progress_bar import ProgressBar
from rich.status import Status
from rich.table import Table
from rich.text import Text

from loopd.cli.render import UsageLine, plain, short
from loopd.proto.frames import (
    Accepted,
    Compacting,
    Delta,
    Opened,
    Prefill,
    Queued,
    Reasoning,
    RecordFrame,
    ServerFrame,
    ToolResultFrame,
    ToolStarted,
    TurnEndFrame,
    UsageFrame,
)

_LONG_PREFILL_TOKENS = 512


class AnswerView:
    """Prints answers and nothing else: what `chat --message` shows."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: set[tuple[int, int]] = set()
        self._streamed = False
        self._in_line = False

    def show(self, frame: ServerFrame) -> None:
        """Take one frame of the turn, in order."""
        match frame:
            case Delta():
                self._stream(frame.text)
                self._streamed = True
            case RecordFrame() if (frame.epoch, frame.line) not in self._seen:
                self._seen.add((frame.epoch, frame.line))
                self._record(frame.record)
            case Opened() | TurnEndFrame():
                self._finish_line()
                self._streamed = False
            case _:
                pass

    def _record(self, record: dict[str, Any]) -> None:
        if record["type"] == "assistant":
            if record["text"] and not self._streamed:
                self._stream(record["text"])
            self._finish_line()
            self._streamed = False

    def _stream(self, text: str, style: str | None = None) -> None:
        """Print a piece of text at once, wherever it ends; without a style exactly as it is."""
        if style:
            self._console.print(plain(text), end="", style=style, soft_wrap=True)
        else:
            self._console.file.write(plain(text))
        self._console.file.flush()
        if text:
            self._in_line = not text.endswith("\n")

    def _finish_line(self) -> None:
        if self._in_line:
            self._console.print()
            self._in_line = False


class TurnView(AnswerView):
    """Shows everything about a turn: what the interactive chat prints while one is in flight.

    `others` is set while this client has no turn of its own: then only whole records are printed, above the prompt.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.others = True
        self._status: Status | None = None
        self._usage = UsageLine()
        self._reasoned = False

    def show(self, frame: ServerFrame) -> None:
        """Take one frame, in order."""
        if self.others and not isinstance(frame, RecordFrame):
            return
        match frame:
            case Accepted():
                self._usage, self._reasoned = UsageLine(), False
                self.wait("waiting for the model")
            case Queued():
                place = f"place {frame.place} in the queue" if frame.place else "waiting for the model server"
                self.wait(f"{place} {plain(frame.reason)}")
            case Compacting():
                self.wait("writing a summary of the conversation to go on from")
            case Prefill():
                self._prefill(frame)
            case _:
                self.rest()
                self._show_step(frame)

    def _show_step(self, frame: ServerFrame) -> None:
        match frame:
            case Reasoning():
                self._stream(frame.text, style="dim italic")
                self._reasoned = True
            case ToolStarted():
                self._finish_line()
                self._dim(f"→ {short(frame.name)} {short(frame.arguments)}")
                self.wait(f"running {short(frame.name)}")
            case ToolResultFrame():
                self._dim(f"← {'' if frame.ok else 'failed: '}{short(frame.content)}")
            case UsageFrame():
                self._account(frame)
            case _:
                if isinstance(frame, Delta) and self._reasoned:
                    self._finish_line()
                    self._reasoned = False
                super().show(frame)
                if isinstance(frame, TurnEndFrame) and self._usage.requests:
                    self._dim(f"{self._usage}\n")

    def _account(self, frame: UsageFrame) -> None:
        self._usage.add(frame)
        if frame.loss:
            what = f"lost {frame.loss:,} cached tokens: {frame.cause or 'unknown'}"
            self._console.print(what, style="yellow")

    def rest(self) -> None:
        """Take the status line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def said(self, text: str) -> None:
        """Print what a person said."""
        self._console.print(f"› {plain(text)}", style="bold")

    def _record(self, record: dict[str, Any]) -> None:
        if self.others and record["type"] == "user":
            self.said(record["text"])
        if record["type"] == "session_start" and (summary := record.get("summary")):
            self._dim(f"the conversation goes on in epoch {record['epoch']}, from this summary:")
            self._dim(f"{plain(summary['text'])}\n")
        super()._record(record)
        if self.others and record["type"] == "assistant":
            for call in record["tool_calls"]:
                self._dim(f"→ {short(call['name'])} {short(call['arguments'])}")

    def _prefill(self, frame: Prefill) -> None:
        """Say how far the prompt is read; with a bar where that takes a while."""
        text = f"reading {frame.processed:,} of {frame.total:,} tokens, {frame.cached:,} cached"
        new = frame.total - frame.cached
        if new < _LONG_PREFILL_TOKENS:
            self.wait(text)
            return
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(total=new, completed=frame.processed - frame.cached, width=30), Text(text, "dim"))
        self.wait(line)

    def wait(self, what: RenderableType) -> None:
        """Show a status line until the next thing that is printed."""
        self._finish_line()
        if self._status is None:
            self._status = self._console.status("", spinner="dots", spinner_style="dim")
            self._status.start()
        self._status.update(Text(what, style="dim") if isinstance(what, str) else what)

    def _dim(self, text: str) -> None:
        self._console.print(text, style="dim")
