"""Every error that loopd raises on purpose, as one tree.

An error says what failed, on which path or id, expected against found (`message`), and what to type next
(`hint`). `code` is stable: clients and scripts may rely on it. `exit_code` is what a command that ends with the
error returns (0 ok, 1 the operation failed, 2 usage or configuration, 3 daemon unreachable, 4 a log was refused;
SPEC 9).

    LoopdError
    ├── UsageError                2  a value the person typed
    ├── ConfigError               2  the configuration file
    ├── HomeError                    the home directory: not ours, not writable
    │   └── HomeLocked               another daemon holds it
    ├── SessionError                 carries the session id
    │   ├── SessionExists, SessionNotFound, SessionBusy, SessionReadOnly
    │   ├── SessionIoError           carries the path
    │   ├── EncodeError              a record that cannot be written as it is (size, lone surrogates)
    │   └── SessionRefused        4  the files are not what was written
    │       ├── TornLog              path, 1-based line, byte offset, kind and reason
    │       └── BaselineError        the baseline is missing, altered or of another log
    ├── ModelError                   the model server
    │   ├── ModelUnavailable, ModelRejected, ContextOverflow, ModelStalled, ModelProtocolError
    │   ├── ModelChanged             another model or template than in the baseline
    │   └── ModelSetupError          the embedded server or its model file cannot be used
    ├── TurnError                    a `say` that was not taken
    │   ├── TurnBusy, KeyReused, DiskLow
    │   ├── NotCompacted             no summary took the place of the history, which goes on as it was
    │   └── ReplayViolation          an internal error: the request would not extend the last one
    ├── ToolError                    never leaves the tool runner: it becomes a result
    ├── AuditError                   the audit log cannot be written, or its chain is broken
    └── ChannelError                 the socket between client and daemon
        ├── FrameTooLarge, FrameInvalid, VersionMismatch, SlowConsumer, NotPermitted, LimitReached
        ├── NotPending               an answer to a call that waits for none
        ├── DaemonError              what the daemon answered, with its code
        └── DaemonUnreachable     3
"""

from pathlib import Path


class LoopdError(Exception):
    """The root: a fact for a person, with a stable code.

    Attributes:
        message: one line: what failed, where, expected against found.
        hint: one line: what to type next; empty where there is nothing to do.
        code: stable identifier on the wire and in JSON output.
        exit_code: exit status of a command that ends with this error.
    """

    code: str = "internal"
    exit_code: int = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class UsageError(LoopdError):
    """A value that a person typed cannot be used."""

    code = "usage"
    exit_code = 2


class ConfigError(LoopdError):
    """The configuration is refused: names file, table, key, what was found and what is allowed (SPEC 3)."""

    code = "config"
    exit_code = 2


class HomeError(LoopdError):
    """The home directory cannot be used by this user."""

    code = "home"


class HomeLocked(HomeError):
    """Another process holds the home's lock for life (SPEC 8)."""

    code = "home_locked"


class SessionError(LoopdError):
    """Something about one session; the others are not affected."""

    code = "session"

    def __init__(self, session_id: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.session_id = session_id


class SessionExists(SessionError):
    """A session of this id is there already."""

    code = "session_exists"


class SessionNotFound(SessionError):
    """There is no session of this id."""

    code = "session_not_found"


class SessionBusy(SessionError):
    """Another process has the session open for writing."""

    code = "session_busy"


class SessionReadOnly(SessionError):
    """An append failed in a way that leaves the file's end unknown; the session must be reopened."""

    code = "session_read_only"


class SessionIoError(SessionError):
    """The operating system refused to read, write or sync `path`."""

    code = "session_io"

    def __init__(self, session_id: str, path: Path, action: str, error: OSError) -> None:
        super().__init__(session_id, f"cannot {action} {path}: {error.strerror or error}")
        self.path = path
        self.errno = error.errno


class EncodeError(SessionError):
    """A record that cannot be written: too large, or not expressible in UTF-8. Nothing was written."""

    code = "encode"


class SessionRefused(SessionError):
    """The session's files are not what loopd wrote; only this session is refused (SPEC 2.2/8)."""

    code = "session_refused"
    exit_code = 4

    def __init__(self, session_id: str, path: Path, message: str, *, hint: str = "") -> None:
        hint = hint or f"loopd session verify {session_id}"
        super().__init__(session_id, message, hint=hint)
        self.path = path


class TornLog(SessionRefused):
    """A log line that was not written whole, shown as `<path>:<line>: <why>`.

    Attributes:
        path: the log file.
        line: 1-based number of the first bad line.
        offset: byte offset at which that line begins.
        kind: no_newline, nul, not_utf8, not_json, unknown_record, incomplete_step or wrong_order.
        why: the reason in words.
        good_lines: how many lines end in whole batches before it (what `repair` keeps).
        good_bytes: their length in bytes.
    """

    code = "torn_log"

    def __init__(
        self,
        session_id: str,
        path: Path,
        *,
        line: int,
        offset: int,
        kind: str,
        why: str,
        good_lines: int,
        good_bytes: int,
    ) -> None:
        super().__init__(session_id, path, f"{path}:{line}: {why} ({kind}, byte {offset})")
        self.line, self.offset, self.kind, self.why = line, offset, kind, why
        self.good_lines, self.good_bytes = good_lines, good_bytes


class BaselineError(SessionRefused):
    """The baseline is missing, is not canonical, or its hash is not the one in the log's `session_start`."""

    code = "baseline"


class ModelError(LoopdError):
    """The model server did not do what was asked."""

    code = "model"


class ModelUnavailable(ModelError):
    """No connection, or the server is still loading after `load_timeout_s`."""

    code = "model_unavailable"


class ModelRejected(ModelError):
    """The server refused the request; the message holds its words."""

    code = "model_rejected"


class ContextOverflow(ModelError):
    """The prompt does not fit.

    Attributes:
        prompt_tokens: tokens asked for.
        context_tokens: tokens there are.
    """

    code = "context_full"

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        super().__init__(
            f"the conversation needs {prompt_tokens} tokens and the model's context has {context_tokens}",
            hint="bxctl compact goes on from a summary; or serve the model with a larger context_tokens in [model]",
        )
        self.prompt_tokens, self.context_tokens = prompt_tokens, context_tokens


class ModelStalled(ModelError):
    """No token and no progress for `idle_timeout_s` while the server reported processing."""

    code = "model_stalled"


class ModelProtocolError(ModelError):
    """The server's answer is not of the protocol, or it ended in mid-stream."""

    code = "model_protocol"


class ModelChanged(ModelError):
    """The server has another model or template than the session's baseline."""

    code = "model_changed"


class ModelSetupError(ModelError):
    """The embedded server cannot be started, or its model file cannot be had."""

    code = "model_setup"


class TurnError(LoopdError):
    """A `say` that was not taken; nothing was written."""

    code = "turn"


class TurnBusy(TurnError):
    """The session has a turn in flight."""

    code = "busy"


class NotCompacted(TurnError):
    """A summary could not be made; the epoch goes on as it was."""

    code = "not_compacted"


class KeyReused(TurnError):
    """The idempotency key belongs to another text."""

    code = "key_reused"


class DiskLow(TurnError):
    """Less than `min_free_bytes` are free: a new turn could not be kept."""

    code = "disk_low"


class ReplayViolation(TurnError):
    """Internal error: the request would not extend the last recorded one, so it was not sent (SPEC 2.3)."""

    code = "replay_violation"


class ToolError(LoopdError):
    """A tool failed; the runner turns it into a result the model can read."""

    code = "tool"


class AuditError(LoopdError):
    """The audit log cannot be written, or does not hold together."""

    code = "audit"


class ChannelError(LoopdError):
    """The socket protocol between client and daemon."""

    code = "channel"


class FrameTooLarge(ChannelError):
    """A client frame over `max_frame_bytes`; the connection lives on."""

    code = "frame_too_large"


class FrameInvalid(ChannelError):
    """A frame that is not JSON, of no known type, or lacks a field; the connection lives on."""

    code = "frame_invalid"


class VersionMismatch(ChannelError):
    """Client and daemon speak different versions of the protocol."""

    code = "version_mismatch"


class SlowConsumer(ChannelError):
    """The client stopped reading the live stream and was dropped."""

    code = "slow_consumer"


class NotPermitted(ChannelError):
    """Only the session's owner and root may do this, or only a client that said so in its `hello`."""

    code = "not_permitted"


class LimitReached(ChannelError):
    """The daemon has as many clients or open sessions as `[channel]` or `[loop]` allows."""

    code = "limit_reached"


class NotPending(ChannelError):
    """The call waits for no approval: it never did, or it is decided."""

    code = "not_pending"


class DaemonError(ChannelError):
    """What an `error` frame says, as a client raises it: with the daemon's code, and the exit status of that."""

    def __init__(self, code: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code, self.exit_code = code, exit_code_of(code)


class DaemonUnreachable(ChannelError):
    """Nobody answers on the socket."""

    code = "daemon_unreachable"
    exit_code = 3


def exit_code_of(code: str) -> int:
    """Return the exit status that belongs to a code from the wire; 1 for one that this release does not know."""
    kinds: list[type[LoopdError]] = [LoopdError]
    for kind in kinds:
        if kind.code == code:
            return kind.exit_code
        kinds.extend(kind.__subclasses__())
    return LoopdError.exit_code
