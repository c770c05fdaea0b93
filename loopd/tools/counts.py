"""How often each tool has been called since the daemon started, and how it went last: pure (SPEC 6)."""

from dataclasses import dataclass, field
from typing import Any

_MAX_FAILURE_CHARS = 300


@dataclass(slots=True)
class _Count:
    calls: int = 0
    failed: int = 0
    last_failure: str = ""
    failed_at: str = ""


@dataclass(slots=True)
class Counts:
    """Counts by full name; there are as many as tools that were ever called."""

    _tools: dict[str, _Count] = field(default_factory=dict)

    def began(self, name: str) -> None:
        """Count a call that is about to run."""
        self._tools.setdefault(name, _Count()).calls += 1

    def failed(self, name: str, failure: str, at: str) -> None:
        """Count that a call failed.

        Args:
            name: the tool's full name.
            failure: what the model was told; its beginning is kept.
            at: when, as in records.
        """
        count = self._tools.setdefault(name, _Count())
        count.failed += 1
        count.last_failure = " ".join(failure[: 2 * _MAX_FAILURE_CHARS].split())[:_MAX_FAILURE_CHARS]
        count.failed_at = at

    def describe(self, name: str) -> dict[str, Any]:
        """Return the counts of a tool; `last_failure` and `failed_at` are null where no call failed."""
        count = self._tools.get(name) or _Count()
        return {
            "calls": count.calls,
            "failed": count.failed,
            "last_failure": count.last_failure or None,
            "failed_at": count.failed_at or None,
        }
