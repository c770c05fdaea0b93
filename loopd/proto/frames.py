"""The frames of the channel (SPEC 8): one JSON object a line, either way. Unknown optional fields are ignored.

A client begins with `hello` and is answered `welcome`; anything else first, or another version, is an `error`.
`ref` is a client's own mark on a request: the frames that answer it carry it back.

A turn as a client sees it:

    say -> accepted -> [queued] -> prefill … -> delta | reasoning … -> record user, assistant, usage
        -> [[approval_request -> approval_decided] -> tool_started -> tool_result -> record tool_result -> prefill …]
        -> turn_end

`accepted` is memory only; the `record` of the `user` is the durable acknowledgement.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from loopd.proto.ids import MAX_KEY_CHARS
from loopd.proto.records import TurnEndReason

PROTOCOL_VERSION = 1

Choice = Literal["once", "session", "deny"]
"""What a person decides about a call."""


class _Frame(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)
    ref: str | None = None


class _SessionFrame(_Frame):
    session: str


# --- client ---------------------------------------------------------------------------------------------------


class Hello(_Frame):
    """The first frame. `can_approve`: this client shows approval requests to a person."""

    type: Literal["hello"] = "hello"
    version: int
    can_approve: bool = False


class Open(_Frame):
    """Attach to a session: history from record number `from` on, then the live stream.

    `session` None makes a new one with a fresh id; `create` makes the named one if it does not exist. `from` 0
    sends no history. `epoch` is the one whose lines `from` counts, the newest where not given: a client that was
    away while an epoch was closed gets the rest of it and then the next one.
    """

    type: Literal["open"] = "open"
    session: str | None = None
    create: bool = False
    start: int = Field(default=1, ge=0, alias="from")
    epoch: int | None = Field(default=None, ge=0)
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True, serialize_by_alias=True)


class Say(_SessionFrame):
    """Begin a turn. The key makes it idempotent: the same key never runs twice."""

    type: Literal["say"] = "say"
    text: str = Field(min_length=1)
    key: str = Field(min_length=1, max_length=MAX_KEY_CHARS)


class Cancel(_SessionFrame):
    """End the turn in flight; nothing of the request in flight is recorded."""

    type: Literal["cancel"] = "cancel"


class Approve(_SessionFrame):
    """Answer an `approval_request`; the first answer counts. Only a client that can approve may.

    `session` allows the tool until the daemon closes the session.
    """

    type: Literal["approve"] = "approve"
    call: int
    decision: Choice


class Read(_SessionFrame):
    """Send the records of any session from record number `from` on, also of a refused one up to its bad line.

    `epoch` is the one to read, or `all` for one after another; of the first that is read, `from` counts the lines.
    """

    type: Literal["read"] = "read"
    start: int = Field(default=1, ge=1, alias="from")
    epoch: Annotated[int, Field(ge=0)] | Literal["newest", "all"] = "newest"
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True, serialize_by_alias=True)


class List(_Frame):
    """List the sessions."""

    type: Literal["list"] = "list"


class Status(_Frame):
    """Describe the daemon: version, model, slots, sessions open and refused, disk."""

    type: Literal["status"] = "status"


class UsageOf(_SessionFrame):
    """The token table of a session."""

    type: Literal["usage"] = "usage"


class Why(_SessionFrame):
    """Explain the losses of a session."""

    type: Literal["why"] = "why"


class Tools(_Frame):
    """List the tool ports and their tools."""

    type: Literal["tools"] = "tools"


class Compact(_SessionFrame):
    """Close the epoch and go on in the next from a summary (the session's owner and root only).

    The session must be open on this connection, as for `say`. With `estimate` nothing is done, and the reply says
    what it would cost; without, the reply comes at the end.
    """

    type: Literal["compact"] = "compact"
    estimate: bool = False


class Fork(_SessionFrame):
    """Make a new session from the first `upto` lines of this one (all whole batches where None)."""

    type: Literal["fork"] = "fork"
    to: str | None = None
    upto: int | None = Field(default=None, ge=1)
    new_baseline: bool = False


class Close(_SessionFrame):
    """Detach from a session."""

    type: Literal["close"] = "close"


class Delete(_SessionFrame):
    """Remove a session for good (its owner and root only)."""

    type: Literal["delete"] = "delete"


ClientFrame = (
    Hello
    | Open
    | Say
    | Cancel
    | Approve
    | Read
    | List
    | Status
    | UsageOf
    | Why
    | Tools
    | Compact
    | Fork
    | Close
    | Delete
)
CLIENT_FRAME: TypeAdapter[ClientFrame] = TypeAdapter(Annotated[ClientFrame, Field(discriminator="type")])


# --- server ---------------------------------------------------------------------------------------------------


class Welcome(_Frame):
    """The answer to `hello`."""

    type: Literal["welcome"] = "welcome"
    version: int
    release: str
    uid: int


class Opened(_SessionFrame):
    """Attached. `lines` is how many records the epoch's log has, `created` whether it was made just now."""

    type: Literal["opened"] = "opened"
    epoch: int
    lines: int
    created: bool
    running: bool


class RecordFrame(_SessionFrame):
    """A durable record, as it stands in the log."""

    type: Literal["record"] = "record"
    epoch: int
    line: int
    record: dict[str, Any]


class CaughtUp(_SessionFrame):
    """History has been sent; what follows is live. `line` is the last record's number."""

    type: Literal["caught_up"] = "caught_up"
    line: int


class Accepted(_SessionFrame):
    """The turn has begun, in memory only. `text` is what was said, for the other clients of the session."""

    type: Literal["accepted"] = "accepted"
    key: str
    text: str = ""


class Queued(_SessionFrame):
    """Waiting for a slot, or for the model server to load; `place` 1 is next, 0 means the server is waited for."""

    type: Literal["queued"] = "queued"
    place: int
    reason: str = ""


class Compacting(_SessionFrame):
    """The model writes a summary; the `record` of the next epoch's `session_start` tells that it took its place."""

    type: Literal["compacting"] = "compacting"
    epoch: int


class Prefill(_SessionFrame):
    """Progress of the prompt's evaluation, in tokens."""

    type: Literal["prefill"] = "prefill"
    cached: int
    processed: int
    total: int


class Delta(_SessionFrame):
    """Text of the answer, as it comes."""

    type: Literal["delta"] = "delta"
    text: str


class Reasoning(_SessionFrame):
    """Reasoning text, as it comes."""

    type: Literal["reasoning"] = "reasoning"
    text: str


class ToolStarted(_SessionFrame):
    """A tool call is about to run."""

    type: Literal["tool_started"] = "tool_started"
    call: int
    name: str
    arguments: str


class ToolResultFrame(_SessionFrame):
    """A tool call has ended, or was not allowed to run; its `record` follows."""

    type: Literal["tool_result"] = "tool_result"
    call: int
    name: str
    ok: bool
    content: str


class ApprovalRequest(_SessionFrame):
    """A person must decide about a call. Goes to clients that can approve, and again when one attaches.

    `name` is the tool's full name, `arguments` what it will be run with, as JSON; where that is long, its middle is
    left out with a count. `rule` says what asks, `seconds` how long an answer is waited for; then it is denied.
    """

    type: Literal["approval_request"] = "approval_request"
    call: int
    name: str
    arguments: str
    effect: Literal["read", "write"]
    rule: str
    seconds: float


class ApprovalDecided(_SessionFrame):
    """A call waits no longer: somebody has answered, or it is denied because nobody did.

    `uid` is whose answer it was, None where it was nobody's; `reason` says it in words.
    """

    type: Literal["approval_decided"] = "approval_decided"
    call: int
    name: str
    decision: Choice
    uid: int | None
    reason: str


class UsageFrame(_SessionFrame):
    """The account of one request, for the usage line."""

    type: Literal["usage"] = "usage"
    prompt_tokens: int | None
    cached_tokens: int | None
    evaluated: int | None
    loss: int | None
    cause: str | None
    seconds: float | None


class TurnEndFrame(_SessionFrame):
    """The turn is over. Where nothing of it was recorded, `text` is what the person had said.

    `code`, `message` and `hint` say more where the reason is a limit or an error.
    """

    type: Literal["turn_end"] = "turn_end"
    key: str
    reason: TurnEndReason
    recorded: bool
    text: str | None = None
    code: str | None = None
    message: str = ""
    hint: str = ""


class Reply(_Frame):
    """The answer to a request that asks for data; `to` is the request's type."""

    type: Literal["reply"] = "reply"
    to: str
    data: Any


class ErrorFrame(_Frame):
    """A request failed. `session` tells which one, where it was about one."""

    type: Literal["error"] = "error"
    session: str | None = None
    code: str
    message: str
    hint: str = ""


ServerFrame = (
    Welcome
    | Opened
    | RecordFrame
    | CaughtUp
    | Accepted
    | Queued
    | Compacting
    | Prefill
    | Delta
    | Reasoning
    | ToolStarted
    | ToolResultFrame
    | ApprovalRequest
    | ApprovalDecided
    | UsageFrame
    | TurnEndFrame
    | Reply
    | ErrorFrame
)
SERVER_FRAME: TypeAdapter[ServerFrame] = TypeAdapter(Annotated[ServerFrame, Field(discriminator="type")])
