"""What a request should have cost and what it did cost, in tokens: one pure account (SPEC 4.3).

The terms, for one request: `P` prompt, `C` completion and `K` cached tokens as the model server reported them.
`expected` is what the request before it on this line of history left behind: `P + C - 1` of the last request with
recorded usage, at most `P_now - 1` (the server always evaluates at least one token). Then

    loss = max(0, expected - K)      evaluated = P - K      floor = P - expected

Zero loss is the only good value. Every command, record and check uses these functions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from loopd.proto.records import Cause, Usage


@dataclass(frozen=True, slots=True)
class Reported:
    """What the model server said about one request; None where it said nothing. Times in milliseconds."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    first_token_ms: float | None = None


def usage_record(
    reported: Reported,
    *,
    at: str,
    expected: int | None,
    loss: int | None,
    cause: Cause | None,
    slot: int | None,
    request_bytes: int,
    request_sha256: str,
) -> Usage:
    """Return the record of one request: what was reported, and our account of it."""
    return Usage(
        at=at,
        **asdict(reported),
        expected=expected,
        loss=loss,
        cause=cause,
        slot=slot,
        request_bytes=request_bytes,
        request_sha256=request_sha256,
    )


def expected_tokens(previous: Usage | None, prompt_tokens: int | None) -> int | None:
    """Return how many tokens of this request should be cached.

    Args:
        previous: the last request with recorded numbers on this line of history; None for the first (0 expected).
        prompt_tokens: `P` of this request; None where the server reported nothing.
    """
    if prompt_tokens is None:
        return None
    if previous is None or previous.prompt_tokens is None or previous.completion_tokens is None:
        return 0
    return min(previous.prompt_tokens + previous.completion_tokens - 1, prompt_tokens - 1)


def loss_tokens(expected: int | None, cached_tokens: int | None) -> int | None:
    """Return `max(0, expected - K)`; None where either is unknown."""
    if expected is None or cached_tokens is None:
        return None
    return max(0, expected - cached_tokens)


def cost_s(usage: Usage) -> float | None:
    """Return the seconds that evaluating the lost tokens took: their share of the prefill; None where unknown."""
    if usage.loss is None or usage.prompt_tokens is None or usage.cached_tokens is None or usage.prefill_ms is None:
        return None
    evaluated = usage.prompt_tokens - usage.cached_tokens
    return usage.loss / evaluated * usage.prefill_ms / 1000 if evaluated else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One request in a table: its usage, where it stands, and whether the totals count it."""

    usage: Usage
    epoch: int
    line: int
    evaluated: int | None
    floor: int | None
    counted: bool

    def as_json(self) -> dict[str, Any]:
        """Return the row as `bxctl usage --json` prints it (SPEC 9)."""
        row = self.usage.model_dump(mode="json", exclude={"type", "request_bytes", "request_sha256"})
        return row | {
            "epoch": self.epoch,
            "line": self.line,
            "evaluated": self.evaluated,
            "floor": self.floor,
            "counted": self.counted,
        }


@dataclass(frozen=True, slots=True)
class Total:
    """Sums over the counted rows; `ratio` is evaluated over floor, None where nothing is counted."""

    evaluated: int
    floor: int
    ratio: float | None
    loss: int
    max_loss: int
    left_out: int


def rows(usages: Iterable[tuple[int, int, Usage]]) -> list[Row]:
    """Return the table of one session from its `(epoch, line, usage)` in log order.

    Left out of the totals (`counted` false): the first request of an epoch, one without numbers, one that follows
    a request without numbers, and one whose prompt is shorter than the former prompt with its answer
    (`P_now < P + C`: the template took something back).
    """
    table: list[Row] = []
    previous: Usage | None = None
    previous_epoch: int | None = None
    for epoch, line, usage in usages:
        prompt, cached = usage.prompt_tokens, usage.cached_tokens
        known = prompt is not None and cached is not None and usage.expected is not None
        before = previous if previous_epoch == epoch else None
        counted = (
            known
            and before is not None
            and before.prompt_tokens is not None
            and before.completion_tokens is not None
            and prompt is not None
            and prompt >= before.prompt_tokens + before.completion_tokens
        )
        table.append(
            Row(
                usage=usage,
                epoch=epoch,
                line=line,
                evaluated=prompt - cached if prompt is not None and cached is not None else None,
                floor=prompt - usage.expected if prompt is not None and usage.expected is not None else None,
                counted=counted,
            )
        )
        previous, previous_epoch = usage, epoch
    return table


def total(table: Sequence[Row]) -> Total:
    """Return the sums over the counted rows of `table`."""
    counted = [row for row in table if row.counted]
    evaluated = sum(row.evaluated or 0 for row in counted)
    floor = sum(row.floor or 0 for row in counted)
    losses = [row.usage.loss or 0 for row in counted]
    return Total(
        evaluated=evaluated,
        floor=floor,
        ratio=round(evaluated / floor, 4) if floor else None,
        loss=sum(losses),
        max_loss=max(losses, default=0),
        left_out=len(table) - len(counted),
    )
