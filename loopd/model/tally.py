"""What the daemon's requests have cost since it started: hits, and losses by cause. Pure (SPEC 4.3)."""

from dataclasses import dataclass, field
from typing import Any

from loopd.proto.records import LossCause, Usage
from loopd.proto.usage import cost_s


@dataclass(slots=True)
class _Losses:
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Tally:
    """Sums over all finished requests of all sessions."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    expected_tokens: int = 0
    lost_tokens: int = 0
    unknown: int = 0
    _causes: dict[LossCause, _Losses] = field(default_factory=dict)

    def add(self, usage: Usage) -> None:
        """Count one request; one whose tokens the server did not report is only counted."""
        self.requests += 1
        if usage.prompt_tokens is None or usage.cached_tokens is None:
            self.unknown += 1
            return
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.expected_tokens += usage.expected or 0
        self.lost_tokens += usage.loss or 0
        if usage.loss:
            losses = self._causes.setdefault(usage.cause.name if usage.cause else "unknown", _Losses())
            losses.requests += 1
            losses.tokens += usage.loss
            losses.seconds += cost_s(usage) or 0.0

    def describe(self) -> dict[str, Any]:
        """Return the sums; `hit_rate` is the share of the tokens that should have been cached and were."""
        hit = self.expected_tokens - self.lost_tokens
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "evaluated_tokens": self.prompt_tokens - self.cached_tokens,
            "expected_tokens": self.expected_tokens,
            "lost_tokens": self.lost_tokens,
            "hit_rate": round(hit / self.expected_tokens, 4) if self.expected_tokens else None,
            "without_numbers": self.unknown,
            "losses": [
                {"cause": cause, "requests": it.requests, "tokens": it.tokens, "seconds": round(it.seconds, 2)}
                for cause, it in sorted(self._causes.items())
            ],
        }
