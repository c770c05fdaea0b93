"""The limits of a turn: pure (SPEC 5). Each gives a `turn_end` reason and a message naming the limit and its value.

Times are seconds of a monotonic clock that the loop reads; nothing here does.
"""

import json
from dataclasses import dataclass

from loopd.config import LoopTable
from loopd.errors import ContextOverflow
from loopd.proto.canonical import canonical
from loopd.proto.records import TurnEndReason, Usage

TEMPLATE_TOKENS = 512
"""What a chat template may add to a request: its marks, and the instructions before the tool definitions."""

NEARLY_FULL = 0.8
"""The part of the context behind which the next turn begins with a summary, where that is wanted."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the turn ends, in a word for the log and in a sentence for a person."""

    reason: TurnEndReason
    message: str


class TurnLimits:
    """What one turn has used so far of its steps, tool calls and time.

    Args:
        table: `[loop]`.
        now_s: when the turn began.
    """

    def __init__(self, table: LoopTable, now_s: float) -> None:
        self._table = table
        self._ends_at_s = now_s + table.turn_timeout_s
        self._waits = 0
        self._wait_began_s = 0.0
        self._steps = 0
        self._calls = 0
        self._last_call: tuple[str, str | bytes] | None = None
        self._same_calls = 0

    def step(self, now_s: float) -> Stop | None:
        """Count a model request that is about to be sent, or tell why it must not be."""
        if stop := self.time(now_s):
            return stop
        if self._steps >= self._table.max_steps:
            return Stop("step_limit", f"the turn used all its model requests (max_steps = {self._table.max_steps})")
        self._steps += 1
        return None

    def call(self, name: str, arguments: str) -> Stop | None:
        """Count a tool call that is about to run, or tell why it must not.

        Args:
            name: the function as the model named it.
            arguments: as the model produced them; objects are compared as values, anything else as text.
        """
        if self._calls >= self._table.max_tool_calls:
            return Stop(
                "tool_limit", f"the turn used all its tool calls (max_tool_calls = {self._table.max_tool_calls})"
            )
        call = (name, _comparable(arguments))
        self._same_calls = self._same_calls + 1 if call == self._last_call else 1
        self._last_call = call
        if self._same_calls >= self._table.max_same_call:
            return Stop(
                "repeated_call",
                f"the model made the same call again and again (max_same_call = {self._table.max_same_call})",
            )
        self._calls += 1
        return None

    def wait(self, now_s: float) -> None:
        """Begin to wait for an approval or in the queue; that time does not count. Waits may overlap."""
        if self._waits == 0:
            self._wait_began_s = now_s
        self._waits += 1

    def resume(self, now_s: float) -> None:
        """End one wait."""
        self._waits -= 1
        if self._waits == 0:
            self._ends_at_s += now_s - self._wait_began_s

    def remaining_s(self, now_s: float) -> float:
        """Return how much of the wall time is left, 0 or less when it is over; it stands still during a wait."""
        return self._ends_at_s - (self._wait_began_s if self._waits else now_s)

    def time(self, now_s: float) -> Stop | None:
        """Tell whether the wall time is over."""
        if self.remaining_s(now_s) > 0:
            return None
        return Stop("deadline", f"the turn took all its time (turn_timeout_s = {self._table.turn_timeout_s:g})")


def answer_cut(table: LoopTable, completion_tokens: int | None) -> Stop:
    """Return the end of a turn whose answer the server cut: by our limit, or because the context is full."""
    if completion_tokens is not None and completion_tokens < table.max_completion_tokens:
        return Stop("length", f"the answer was cut after {completion_tokens} tokens: the model's context is full")
    return Stop(
        "length", f"the answer reached its length limit (max_completion_tokens = {table.max_completion_tokens})"
    )


def surely_fits(last: Usage | None, new_bytes: int, context_tokens: int) -> bool:
    """Tell from an upper bound whether a request fits: a token is at least one byte. If not, tokens must be counted.

    Args:
        last: the last recorded usage with numbers on this line of history; None where there is none.
        new_bytes: of the serialised messages since that request; without one, of all messages and tool definitions.
        context_tokens: of one slot; a prompt must leave room for at least one token of answer.
    """
    known = 0
    if last is not None:
        if last.prompt_tokens is None or last.completion_tokens is None:
            return False
        known = last.prompt_tokens + last.completion_tokens
    return known + new_bytes + TEMPLATE_TOKENS < context_tokens


def nearly_full(last: Usage | None, context_tokens: int) -> bool:
    """Tell whether what is left of the context should be kept for a summary.

    Args:
        last: the last recorded usage with numbers in this epoch; None where there is none.
        context_tokens: of one slot.
    """
    if last is None or last.prompt_tokens is None or last.completion_tokens is None:
        return False
    return last.prompt_tokens + last.completion_tokens >= NEARLY_FULL * context_tokens


def summary_tokens(table: LoopTable, context_tokens: int | None) -> int:
    """Return how many tokens a summary may have: it must leave most of the context to what comes."""
    return min(table.max_summary_tokens, max(1, (context_tokens or table.max_summary_tokens * 8) // 8))


def context_stop(prompt_tokens: int, context_tokens: int) -> Stop | None:
    """Tell whether a counted prompt leaves no room for an answer."""
    if prompt_tokens < context_tokens:
        return None
    return Stop("context_full", ContextOverflow(prompt_tokens, context_tokens).message)


def _comparable(arguments: str) -> str | bytes:
    try:
        return canonical(json.loads(arguments))
    except (ValueError, RecursionError):
        return arguments
