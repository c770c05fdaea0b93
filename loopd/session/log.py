"""The grammar of a session log, as a machine without I/O: which record may follow which (SPEC 2.2/4).

Open, verify, append, repair and fork all run this one machine. A log is `session_start` and then batches:

    [user] assistant usage [turn_end]     one finished model request
    tool_result                           one finished tool call
    [assistant of origin loopd] turn_end  the end of a turn

Between batches a turn is open or not, and calls may be pending:

    user                    only while no turn is open; opens one
    assistant (model)       after user, or while a turn is open and no call is pending; its calls become pending
    tool_result             only for the first pending call, with the next call number
    assistant (loopd)       while a turn is open and no call is pending
    turn_end                likewise; closes the turn
"""

import json
import re
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from loopd.proto.records import (
    FORMAT_VERSION,
    OLDEST_READABLE_VERSION,
    Assistant,
    Record,
    SessionStart,
    ToolCall,
    ToolResult,
    TurnEnd,
    Usage,
    User,
    decode_record,
)

FaultKind = Literal["no_newline", "nul", "not_utf8", "not_json", "unknown_record", "incomplete_step", "wrong_order"]
TITLE_CHARS = 60
_FORM = re.compile(r"u?a\$e?|r|l?e")


class LogFault(Exception):
    """Why a line cannot be what it should be; whoever knows the file makes a `TornLog` of it."""

    def __init__(self, kind: FaultKind, why: str) -> None:
        super().__init__(why)
        self.kind: FaultKind = kind
        self.why = why


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A turn without its `turn_end`.

    Attributes:
        key: idempotency key of its user record.
        line: the line of that record.
        pending: the calls without a result, in call order, with loopd's own numbers.
        after_result: the log ends in a `tool_result`.
    """

    key: str
    line: int
    pending: tuple[tuple[int, ToolCall], ...]
    after_result: bool


class Log:
    """What the records so far add up to.

    Attributes:
        line: number of the last record taken.
        whole_line: number of the last record that ended a batch.
        start: the `session_start`.
        next_call: the number of the next call to get a result.
        keys: idempotency key -> line of its user record; 0 for one of an earlier epoch.
        last_usage: the last usage with numbers in this epoch.
        title: the first line of the first user text, shortened.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.line = 0
        self.whole_line = 0
        self.start: SessionStart | None = None
        self.next_call = 1
        self.keys: ChainMap[str, int] = ChainMap()
        self.last_usage: Usage | None = None
        self.title = ""
        self._turn: tuple[str, int] | None = None
        self._pending: tuple[ToolCall, ...] = ()
        self._last: Record | None = None

    @property
    def whole(self) -> bool:
        """Whether the log may end here: the last record ended a batch."""
        return self.line > 0 and self.whole_line == self.line

    @property
    def open_turn(self) -> OpenTurn | None:
        """The turn that has no end yet."""
        if self._turn is None:
            return None
        key, line = self._turn
        return OpenTurn(key, line, tuple(enumerate(self._pending, self.next_call)), isinstance(self._last, ToolResult))

    def add(self, record: Record) -> None:
        """Take the next record.

        Raises:
            LogFault: it may not stand here; the machine is used up.
        """
        self.line += 1
        if self.line == 1 or isinstance(record, SessionStart):
            self._session_start(record)
        elif isinstance(record, User):
            self._user(record)
        elif isinstance(record, Assistant):
            self._assistant(record)
        elif isinstance(record, Usage):
            self._usage(record)
        elif isinstance(record, ToolResult):
            self._tool_result(record)
        else:
            self._turn_end(record)
        self._last = record
        if not isinstance(record, (User, Assistant)):
            self.whole_line = self.line

    def end(self) -> None:
        """Say that the log ends here.

        Raises:
            LogFault: the last `user` or `assistant` is not followed by what its form demands.
        """
        if not self.whole:
            raise LogFault("incomplete_step", self._lacks() if self._last else "the log is empty")

    def extended(self, records: Sequence[Record]) -> "Log":
        """Return what this log would be with `records` as its next batch; it does not change itself.

        Raises:
            LogFault: they are no batch that may follow.
        """
        if not _FORM.fullmatch("".join(map(_letter, records))):
            found = " ".join(record.type for record in records)
            raise LogFault("wrong_order", f"'{found}' is no batch")
        extended = Log(self.epoch)
        vars(extended).update(vars(self))
        extended.keys = self.keys.new_child()
        for record in records:
            extended.add(record)
        return extended

    def adopt(self, extended: "Log") -> None:
        """Become what `extended` of this log returned."""
        keys = self.keys
        keys.update(extended.keys.maps[0])
        vars(self).update(vars(extended))
        self.keys = keys

    def _session_start(self, record: Record) -> None:
        if not isinstance(record, SessionStart):
            raise LogFault("wrong_order", f"line 1 must be session_start, not {record.type}")
        if self.line > 1:
            raise LogFault("wrong_order", "a second session_start")
        if not OLDEST_READABLE_VERSION <= record.version <= FORMAT_VERSION:
            raise LogFault("unknown_record", _version_text(record.version))
        if record.epoch != self.epoch:
            raise LogFault("wrong_order", f"this is the log of epoch {self.epoch}, session_start says {record.epoch}")
        self.start = record
        self.next_call = record.next_call or 1
        self.keys.update(dict.fromkeys(record.keys or (), 0))

    def _user(self, record: User) -> None:
        self._between_batches(record)
        if self._turn is not None:
            raise LogFault("wrong_order", f"a user record while the turn of line {self._turn[1]} has no end")
        if record.key in self.keys:
            where = f"line {self.keys[record.key]}" if self.keys[record.key] else "an earlier epoch"
            raise LogFault("wrong_order", f"the key of this user record is that of {where}")
        self.keys[record.key] = self.line
        self._turn = (record.key, self.line)
        self.title = self.title or title_of(record.text)

    def _assistant(self, record: Assistant) -> None:
        if isinstance(self._last, User) and record.origin == "model":
            self._pending = record.tool_calls
            return
        self._between_batches(record)
        self._in_turn(record)
        if record.origin == "loopd" and record.tool_calls:
            raise LogFault("wrong_order", "an assistant record of origin loopd with tool calls")
        self._pending = record.tool_calls

    def _usage(self, record: Usage) -> None:
        if not (isinstance(self._last, Assistant) and self._last.origin == "model"):
            raise LogFault("wrong_order", "usage without the assistant record of its request")
        if record.prompt_tokens is not None and record.completion_tokens is not None:
            self.last_usage = record

    def _tool_result(self, record: ToolResult) -> None:
        self._between_batches(record)
        if not self._pending:
            raise LogFault("wrong_order", f"the result of call {record.call}, but no call waits for one")
        call = self._pending[0]
        if (record.call, record.id, record.name) != (self.next_call, call.id, call.name):
            raise LogFault(
                "wrong_order",
                f"the result of call {record.call} ({record.name}), where call {self.next_call} ({call.name}) waits",
            )
        self._pending = self._pending[1:]
        self.next_call += 1

    def _turn_end(self, record: TurnEnd) -> None:
        if not (isinstance(self._last, Assistant) and self._last.origin == "loopd"):
            self._between_batches(record)
            self._in_turn(record)
        self._turn = None

    def _between_batches(self, record: Record) -> None:
        if self.whole_line != self.line - 1:
            raise LogFault("wrong_order", f"{record.type} where {self._lacks()}")

    def _in_turn(self, record: Record) -> None:
        if self._turn is None:
            raise LogFault("wrong_order", f"{record.type} outside a turn")
        if self._pending:
            raise LogFault("wrong_order", f"{record.type} while call {self.next_call} has no result")

    def _lacks(self) -> str:
        if isinstance(self._last, User):
            return "the user record is not followed by its assistant record"
        if isinstance(self._last, Assistant) and self._last.origin == "loopd":
            return "the assistant record of origin loopd is not followed by turn_end"
        return "the assistant record is not followed by its usage"


def decode_line(line: bytes) -> Record:
    r"""Return the record of one line as it is on disk, its `\n` included.

    Raises:
        LogFault: NUL bytes, no newline, not UTF-8, not JSON, or no record that this release knows.
    """
    if b"\0" in line:
        raise LogFault("nul", f"NUL bytes from byte {line.index(0)} of the line")
    if not line.endswith(b"\n"):
        raise LogFault("no_newline", "the line does not end in a newline")
    try:
        return decode_record(line)
    except ValidationError as error:
        raise _fault(line, error) from None


def explain(error: ValidationError) -> str:
    """Return the first fault of a record or baseline in one line: the field, and what is wrong with it."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ": ".join([".".join(map(str, first["loc"])) or "the value", first["msg"]])


def title_of(text: str) -> str:
    """Return the first line of `text` that is not blank, at most `TITLE_CHARS` long."""
    line = next(iter(text.lstrip()[:1000].splitlines()), "").rstrip()
    return line if len(line) <= TITLE_CHARS else line[: TITLE_CHARS - 1] + "…"


def _letter(record: Record) -> str:
    if isinstance(record, Assistant):
        return "a" if record.origin == "model" else "l"
    return {"user": "u", "tool_result": "r", "usage": "$", "turn_end": "e"}.get(record.type, "?")


def _fault(line: bytes, error: ValidationError) -> LogFault:
    """Name what is wrong with a line that is no record."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as fault:
        return LogFault("not_utf8", f"not UTF-8 from byte {fault.start} of the line")
    except (ValueError, RecursionError) as fault:
        return LogFault("not_json", f"not JSON: {fault}")
    if isinstance(value, dict) and value.get("type") == "session_start":
        version = value.get("version")
        if isinstance(version, int) and not OLDEST_READABLE_VERSION <= version <= FORMAT_VERSION:
            return LogFault("unknown_record", _version_text(version))
    return LogFault("unknown_record", explain(error))


def _version_text(version: int) -> str:
    return f"format version {version}, and this release reads {OLDEST_READABLE_VERSION} to {FORMAT_VERSION}"
