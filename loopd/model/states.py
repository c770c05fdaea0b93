"""Saved states of slots: which one a conversation should be given back, and which ones go first. Pure (SPEC 4.4).

A state is what a slot held after a request: the tokens of that request and its answer. Whatever is restored, the
server compares token by token, so a state that shares less than was thought costs time and never an answer.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from loopd.proto.model_identity import ModelIdentity

_SOME = 1
"""Tokens in common where only the baseline is known to be: more than nothing, less than any line of history."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Fit(_Strict):
    """What a state depends on: another model, template, build or context makes it worthless."""

    model: ModelIdentity
    template: str
    build: str
    context_tokens: int | None


class Mark(_Strict):
    """Where a request stands: `line` is how many records its session's log had when it was sent."""

    session: str
    epoch: int
    line: int
    baseline: str


class Left(_Strict):
    """How a slot was left by the last of loopd's requests in it; `turn` orders the uses.

    `task` is the server's number of the last request that ran in it; None if a state was restored into a slot that
    no request has run in. `process` is the server that it was, '' where that is not known.
    """

    mark: Mark
    task: int | None
    tokens: int
    turn: int
    process: str = ""


class State(_Strict):
    """The description of a saved state. It is written last: without it a state does not exist.

    Attributes:
        name: of its files, without their endings.
        kind: `session`, or `baseline` for the one that new sessions of that baseline start from.
        mark: the request after which the slot was saved.
        tokens: what the slot held.
        size_bytes: of the file that the server wrote.
        serial: counts up with each save; which one is older is never told by a clock.
        boot: where the file was not synced yet, the boot in which it can be trusted; '' once it was.
    """

    name: str
    kind: Literal["session", "baseline"]
    fit: Fit
    mark: Mark
    tokens: int = Field(ge=1)
    size_bytes: int = Field(ge=1)
    serial: int = Field(ge=1)
    boot: str = ""

    @classmethod
    def named(cls, kind: Literal["session", "baseline"], mark: Mark, tokens: int) -> str:
        """Return the name of a state: another one for each line and length, so that no good one is written over."""
        if kind == "baseline":
            return f"b.{mark.baseline.removeprefix('sha256:')[:16]}.{tokens}"
        return f"s.{mark.session}.{mark.epoch}.{mark.line}.{tokens}"


@dataclass(frozen=True, slots=True)
class Ancestor:
    """Where a fork left its parent: the parent's `line`, and the `tokens` that both share."""

    session: str
    epoch: int
    line: int
    tokens: int


@dataclass(frozen=True, slots=True)
class History:
    """A conversation that is about to send a request.

    Attributes:
        mark: where it stands.
        expected: tokens that its last request left behind (SPEC 4.3); 0 before the first.
        slot: the slot that its log names.
        parent: of a fork.
        kin: the session whose slot serves this one as well: a fork's parent, before the fork's first request.
        rebased: why nothing of the history can be cached; '' where it can.
    """

    mark: Mark
    expected: int
    slot: int | None = None
    parent: Ancestor | None = None
    kin: str = ""
    rebased: str = ""


class Contents(Protocol):
    """Tokens of a session, in a slot or in a file."""

    @property
    def mark(self) -> Mark:
        """The request that they are of."""
        ...

    @property
    def tokens(self) -> int:
        """How many."""
        ...


def shared_tokens(contents: Contents, history: History) -> int:
    """Return how many tokens of the history's next request are known to be in the contents."""
    of, to, parent = contents.mark, history.mark, history.parent
    if of.baseline != to.baseline:
        return 0
    if (of.session, of.epoch) == (to.session, to.epoch):
        return max(_SOME, min(contents.tokens, history.expected))
    if parent and (of.session, of.epoch) == (parent.session, parent.epoch):
        both = min(contents.tokens, parent.tokens) if of.line < parent.line else parent.tokens
        return max(_SOME, min(both, history.expected))
    return _SOME


def choose(
    states: Iterable[State], history: History, fit: Fit, *, here: int, rolls_back: bool = True
) -> tuple[State, int] | None:
    """Return the state that shares most with the history, and how much; None if none has more than `here`.

    Args:
        states: that are on disk.
        history: that is to go on.
        fit: of the server as it is now.
        here: tokens that the slot shares with it already.
        rolls_back: the model can drop tokens from the end of a state; otherwise all of it must be shared.
    """
    best: tuple[tuple[int, int, int], State] | None = None
    for state in states:
        if state.fit != fit:
            continue
        shared = _SOME if state.kind == "baseline" else shared_tokens(state, history)
        if state.mark.baseline != history.mark.baseline or shared <= here:
            continue
        if not rolls_back and state.tokens > shared:
            continue
        # Of two that share as much the shorter one is read faster.
        rank = (shared, -state.tokens, state.serial)
        if best is None or rank > best[0]:
            best = (rank, state)
    return (best[1], best[0][0]) if best else None


def superseded(states: Iterable[State], new: State) -> list[State]:
    """Return the states that are of no use once `new` is there: the same conversation's, or the same baseline's."""

    def same(old: State) -> bool:
        if old.kind == "baseline":
            return old.mark.baseline == new.mark.baseline
        return old.mark.session == new.mark.session

    return [old for old in states if old.kind == new.kind and old.name != new.name and same(old)]


def to_prune(states: Sequence[State], fit: Fit | None, room_bytes: int) -> list[State]:
    """Return what must go so that the rest takes at most `room_bytes`.

    First what does not fit the server, then the baselines', then the oldest.
    """
    total = sum(state.size_bytes for state in states)
    gone = []
    for state in sorted(states, key=lambda state: (state.fit == fit, state.kind != "baseline", state.serial)):
        if total <= room_bytes:
            break
        gone.append(state)
        total -= state.size_bytes
    return gone


def wants_baseline(states: Iterable[State], fit: Fit, contents: Contents) -> bool:
    """Tell whether the contents should be kept for new sessions too: there are none, or much longer ones."""
    kept = [
        state.tokens
        for state in states
        if state.kind == "baseline" and state.fit == fit and state.mark.baseline == contents.mark.baseline
    ]
    return not kept or min(kept) > 2 * contents.tokens


def is_saved(states: Iterable[State], fit: Fit, contents: Contents) -> bool:
    """Tell whether the contents are on disk as they are."""
    return any(
        state.kind == "session" and state.fit == fit and state.mark == contents.mark and state.tokens == contents.tokens
        for state in states
    )


class Speeds:
    """What prefill and restore cost on this device, as far as it was seen."""

    _LEAST_TOKENS = 16

    def __init__(self) -> None:
        self._prefill_ms = 0.0
        self._prefill_tokens = 0
        self._slowest_ms_per_token = 0.0
        self._quickest_ms_per_byte: float | None = None
        self.bytes_per_token = 0.0

    def evaluated(self, tokens: int, prefill_ms: float) -> None:
        """Take the prefill of one request."""
        self._prefill_ms += prefill_ms
        self._prefill_tokens += tokens
        if tokens >= self._LEAST_TOKENS:
            self._slowest_ms_per_token = max(self._slowest_ms_per_token, prefill_ms / tokens)

    def restored(self, size_bytes: int, restore_ms: float) -> None:
        """Take one restore."""
        rate = restore_ms / size_bytes
        self._quickest_ms_per_byte = min(rate, self._quickest_ms_per_byte or rate)

    def prefill_s(self, tokens: int) -> float | None:
        """Return what evaluating so many tokens costs on average; None before anything was evaluated."""
        return tokens * self._prefill_ms / self._prefill_tokens / 1000 if self._prefill_tokens else None

    def slower_restored(self, state: State, gain_tokens: int) -> str:
        """Say why a restore takes longer than a prefill of what it gains; '' if it does not, or is not known to.

        The quickest restore is held against the slowest prefill: a busy moment must not cost a cache.
        """
        if self._quickest_ms_per_byte is None or not self._slowest_ms_per_token or gain_tokens <= _SOME:
            return ""
        restore_s = state.size_bytes * self._quickest_ms_per_byte / 1000
        prefill_s = gain_tokens * self._slowest_ms_per_token / 1000
        if restore_s <= prefill_s:
            return ""
        return (
            f"restoring {state.tokens} tokens takes {restore_s:.2f} s here, evaluating {gain_tokens} {prefill_s:.2f} s"
        )


def find(states: Iterable[State], session: str) -> Collection[State]:
    """Return the states that hold text of a session, for its removal."""
    return [state for state in states if state.mark.session == session]
