r"""Replay: the pure function (baseline, records) -> request messages (SPEC 2.3).

A message is the canonical JSON of one entry of an OpenAI chat request. The serialisation of a request is each
message and `\n`, joined. Records only ever add messages, so the serialisation of a request is a strict prefix of
every later one's: the append-only property, on which the model server's prompt cache rests.

What a record adds:

    session_start  of a later epoch: the summary, as a user message that asks for it and the answer
    user           {role: user}; before the first one's text the system prompt, where the baseline's form says so
    assistant      {role: assistant}: text, reasoning (where it is sent back), tool calls
    tool_result    {role: tool}
    all others     nothing

Inside a call's arguments the order of keys is the model's; everywhere else keys are sorted. The templates below
have their keys in that order.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from loopd.errors import ReplayViolation
from loopd.proto.canonical import canonical, object_text, sha256
from loopd.proto.records import Assistant, Record, SessionStart, ToolCall, ToolResult, Usage, User
from loopd.session.baseline import Baseline

_JSON_SPACE = dict.fromkeys(map(ord, " \t\r\n"))


@dataclass(frozen=True, slots=True)
class Request:
    """The messages of one request; length and hash of its serialisation, as its `usage` will record them."""

    messages: list[bytes]
    request_bytes: int
    request_sha256: str


class Replay:
    """The messages of a growing log, one record at a time, with a running hash: each message is hashed once.

    Attributes:
        messages: what the next request begins with; only ever extended.
        violation: how the last recorded request is no prefix of these messages; '' where it is one.
    """

    def __init__(self, baseline: Baseline) -> None:
        self.messages: list[bytes] = []
        self.violation = ""
        self._baseline = baseline
        self._line = 0
        self._foreign_lines = 0
        self._hash = hashlib.sha256()
        self._size = 0
        self._before_answer = (0, self._hash.copy())
        self._prefix = ""
        if baseline.system_prompt and baseline.system == "message":
            self._append(b'{"content":%b,"role":"system"}' % canonical(baseline.system_prompt))
        elif baseline.system_prompt:
            self._prefix = f"{baseline.system_prompt}\n\n"

    def add(self, record: Record) -> None:
        """Take the next record of the log."""
        self._line += 1
        if isinstance(record, User):
            self._append(self._user(record.text))
            self._prefix = ""
        elif isinstance(record, Assistant):
            self._before_answer = (self._size, self._hash.copy())
            self._append(self._assistant(record))
        elif isinstance(record, ToolResult):
            self._append(_tool(record))
        elif isinstance(record, Usage):
            self._check(record)
        elif isinstance(record, SessionStart):
            self._start(record)

    def preview(self, text: str) -> list[bytes]:
        """Return the messages that a user's text would add; nothing changes."""
        return [self._user(text)]

    def request(self, text: str | None) -> Request:
        """Return the request that follows the log, with the user's text if there is one; nothing changes.

        Raises:
            ReplayViolation: the serialisation of the last recorded request is no prefix of this one's.
        """
        if self.violation:
            raise ReplayViolation(self.violation, hint="this is a fault in loopd; nothing was sent")
        new = [] if text is None else self.preview(text)
        size, digest = self._size, self._hash.copy()
        for message in new:
            digest.update(message)
            digest.update(b"\n")
            size += len(message) + 1
        return Request([*self.messages, *new], size, f"sha256:{digest.hexdigest()}")

    def _append(self, message: bytes) -> None:
        self.messages.append(message)
        self._hash.update(message)
        self._hash.update(b"\n")
        self._size += len(message) + 1

    def _start(self, start: SessionStart) -> None:
        if start.parent and start.parent.baseline:
            self._foreign_lines = start.parent.line
        if start.summary:
            self._append(self._user(start.summary.request))
            self._append(b'{"content":%b,"role":"assistant"}' % canonical(start.summary.text))
            self._prefix = ""

    def _check(self, usage: Usage) -> None:
        """Compare what was sent, as recorded, with what this replay holds up to the answer."""
        if self._line <= self._foreign_lines:
            return
        size, digest = self._before_answer
        found = f"sha256:{digest.hexdigest()}"
        self.violation = ""
        if (size, found) != (usage.request_bytes, usage.request_sha256):
            self.violation = (
                "the history does not begin with the last request that was sent: "
                f"{usage.request_bytes} bytes {usage.request_sha256} were sent, {size} bytes {found} are rebuilt"
            )

    def _user(self, text: str) -> bytes:
        return b'{"content":%b,"role":"user"}' % canonical(self._prefix + text)

    def _assistant(self, record: Assistant) -> bytes:
        reasoning = calls = b""
        if record.reasoning and self._baseline.reasoning == "sent":
            reasoning = b',"reasoning_content":%b' % canonical(record.reasoning)
        if record.tool_calls:
            calls = b',"tool_calls":[%b]' % b",".join(map(self._call, record.tool_calls))
        return b'{"content":%b%b,"role":"assistant"%b}' % (canonical(_content(record)), reasoning, calls)

    def _call(self, call: ToolCall) -> bytes:
        arguments = canonical(call.sent) if self._baseline.arguments == "string" else call.sent.encode()
        return b'{"function":{"arguments":%b,"name":%b},"id":%b,"type":"function"}' % (
            arguments,
            canonical(call.name),
            canonical(call.id),
        )


def replay(baseline: Baseline, records: Iterable[Record]) -> list[bytes]:
    """Return the messages of the request that follows `records`: canonical JSON each, without newlines."""
    state = Replay(baseline)
    for record in records:
        state.add(record)
    return state.messages


def request_of(messages: Sequence[bytes]) -> Request:
    """Return the request of these messages, e.g. of the first ones of a longer history."""
    data = serialisation(messages)
    return Request([*messages], len(data), sha256(data))


def serialisation(messages: Iterable[bytes]) -> bytes:
    """Return the bytes that `request_bytes` counts and `request_sha256` hashes."""
    return b"".join(message + b"\n" for message in messages)


def tool_call(call_id: str, name: str, arguments: str, form: Literal["string", "object"] = "string") -> ToolCall:
    """Return the call as it is recorded: with what replay will send for it for ever (SPEC 2.1).

    As a string the arguments go back to the letter, so that they have the tokens that the model produced. Arguments
    that are no JSON object make a model server refuse every later request; for them `{}` is sent, and their text
    stands in the message.
    """
    compact = object_text(arguments)
    if compact is None:
        return ToolCall(id=call_id, name=name, arguments=arguments, sent="{}")
    return ToolCall(id=call_id, name=name, arguments=arguments, sent=arguments if form == "string" else compact)


def _content(record: Assistant) -> str:
    notes = [
        f"[The arguments of this call of {call.name} were not a JSON object: {call.arguments}]"
        for call in record.tool_calls
        if call.sent == "{}" and call.arguments.translate(_JSON_SPACE) not in {"", "{}"}
    ]
    return "\n\n".join([record.text, *notes] if record.text else notes)


def _tool(record: ToolResult) -> bytes:
    return b'{"content":%b,"name":%b,"role":"tool","tool_call_id":%b}' % (
        canonical(record.content),
        canonical(record.name),
        canonical(record.id),
    )
