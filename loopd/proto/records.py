r"""The records of a session log, format version 1 (SPEC 2.1). This docstring and the models are the format.

A log is UTF-8 lines, each one compact JSON object, each ended by `\n`. The field `type` tells which
model applies, `at` is when it was written (for people; order is line order). Unknown types, unknown fields and
newer versions are refused by name. A log is one `session_start` and then batches, each written by one call and
synced before anything is shown (SPEC 2.2/4):

    [user] assistant usage [turn_end]     one finished model request
    tool_result                           one finished tool call
    [assistant of origin loopd] turn_end  the end of a turn

A session is one or more epochs, each a log of its own beside its baseline. A later epoch begins where a summary took
the place of what was said before: its `session_start` holds that summary, and the request that asked for it, and is
itself the whole of the compaction. The log before it is closed between two turns and never changes again.

    parent         this session, the former epoch, and its last line
    next_call      calls go on counting
    keys           the last 1,000 idempotency keys of the session, the oldest first
    summary        what every request of this epoch begins with, behind the system prompt: one user and one assistant
                   message (`loopd.session.replay`); it is in line 1 because nothing may stand between two batches
    summary_usage  the numbers of the request that made it: the last request of the former epoch, in whose log it is not
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

FORMAT_VERSION = 1
OLDEST_READABLE_VERSION = 1
KEPT_KEYS = 1000

TurnEndReason = Literal[
    "completed",
    "length",
    "step_limit",
    "tool_limit",
    "repeated_call",
    "deadline",
    "context_full",
    "cancelled",
    "model_error",
    "interrupted",
]
LossCause = Literal[
    "server_restarted",
    "slot_taken",
    "evicted",
    "state_not_restored",
    "history_rewritten",
    "retokenised",
    "cannot_roll_back",
    "model_changed",
    "unknown",
]
Tokens = Annotated[int, Field(ge=0)]
Milliseconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sha256 = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
At = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Parent(_Strict):
    """Where a fork or a later epoch comes from: `line` is the last line that is shared.

    `baseline` is set where a fork has another baseline than its parent: the request hashes in the copied lines are
    of the parent's.
    """

    id: str
    epoch: int = Field(ge=0)
    line: int = Field(ge=1)
    baseline: Sha256 | None = None


class Summary(_Strict):
    """What stands for the epochs before: the question, as it was sent, and the model's answer to it."""

    request: str
    text: str


class Cause(_Strict):
    """Why a request lost cached tokens, with what shows it."""

    name: LossCause
    evidence: str


class ToolCall(_Strict):
    """One call of an assistant message.

    `arguments` is exactly what the model produced. `sent` is the JSON text that replay sends (as a string or as
    the object itself, by the baseline's form): `{}` where the arguments are no JSON object.
    """

    id: str
    name: str
    arguments: str
    sent: str


class Usage(_Strict):
    """The numbers of one request as the model server reported them (None: it reported nothing), and our account.

    `request_bytes` and `request_sha256` are of the request's serialisation (SPEC 2.3).
    """

    type: Literal["usage"] = "usage"
    at: At
    prompt_tokens: Tokens | None
    completion_tokens: Tokens | None
    cached_tokens: Tokens | None
    expected: Tokens | None
    loss: Tokens | None
    cause: Cause | None
    prefill_ms: Milliseconds | None
    decode_ms: Milliseconds | None
    first_token_ms: Milliseconds | None
    slot: int | None
    request_bytes: int = Field(ge=0)
    request_sha256: Sha256


class SessionStart(_Strict):
    """Line 1. The last four fields are set in a later epoch, and the first three of them in a fork of one."""

    type: Literal["session_start"] = "session_start"
    at: At
    version: int = Field(ge=1)
    epoch: int = Field(ge=0)
    slot: int | None
    baseline: Sha256
    owner_uid: int = Field(ge=0)
    parent: Parent | None = None
    next_call: int | None = Field(default=None, ge=1)
    keys: tuple[str, ...] | None = Field(default=None, max_length=KEPT_KEYS)
    summary: Summary | None = Field(default=None, exclude_if=lambda value: value is None)
    summary_usage: Usage | None = None


class User(_Strict):
    """What the person said, with the idempotency key of the turn."""

    type: Literal["user"] = "user"
    at: At
    text: str
    key: str


class Assistant(_Strict):
    """A finished answer of the model, or (origin loopd) the record that closes a turn for the template's sake."""

    type: Literal["assistant"] = "assistant"
    at: At
    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    origin: Literal["model", "loopd"]


class ToolResult(_Strict):
    """What a call gave. `call` is loopd's own number in the session, `id` the model's.

    `cut` is how many bytes were left out of the middle, `lossy` tells that bytes were not UTF-8 and were replaced,
    `approval` who allowed or denied the call, where it was asked.
    """

    type: Literal["tool_result"] = "tool_result"
    at: At
    call: int = Field(ge=1)
    id: str
    name: str
    ok: bool
    content: str
    cut: int = Field(default=0, ge=0)
    lossy: bool = False
    approval: str | None = None


class TurnEnd(_Strict):
    """The loop is idle again, and why."""

    type: Literal["turn_end"] = "turn_end"
    at: At
    reason: TurnEndReason


Record = SessionStart | User | Assistant | ToolResult | Usage | TurnEnd
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="type")])


def decode_record(line: bytes) -> Record:
    """Return the record of one line (with or without its newline).

    Raises:
        pydantic.ValidationError: not JSON, or no record of this version.
    """
    return _ADAPTER.validate_json(line)


def record_from(value: object) -> Record:
    """Return the record that a decoded JSON value holds, e.g. the `record` of a channel frame.

    Raises:
        pydantic.ValidationError: no record of this version.
    """
    return _ADAPTER.validate_python(value, strict=False)


def encode_record(record: Record) -> bytes:
    r"""Return the record as its log line: compact JSON in the order of the model's fields, and `\n`.

    Raises:
        ValueError: a text holds a lone surrogate, which UTF-8 cannot.
    """
    return record.model_dump_json().encode("utf-8") + b"\n"
