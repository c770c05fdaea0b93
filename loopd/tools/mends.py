"""How the models wrote their tool calls since the daemon started: mended and refused ones, by kind. Pure (SPEC 6)."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from loopd.tools.call import Call, Fault, Mend, Refused
from loopd.tools.port import Outcome


@dataclass(slots=True)
class _Calls:
    calls: int = 0
    mended: int = 0
    mends: Counter[Mend] = field(default_factory=Counter)
    faults: Counter[Fault] = field(default_factory=Counter)


@dataclass(slots=True)
class Mends:
    """Counters for each model, by its alias."""

    _models: dict[str, _Calls] = field(default_factory=dict)

    def add(self, model: str, call: Call) -> None:
        """Count one call as `prepare` understood it."""
        counts = self._models.setdefault(model, _Calls())
        counts.calls += 1
        if isinstance(call, Refused):
            counts.faults[call.fault] += 1
        elif not isinstance(call, Outcome) and call.mended:
            counts.mended += 1
            counts.mends.update(call.mended)

    def describe(self) -> dict[str, Any]:
        """Return the counts by alias. A call may have been mended in several ways; a refused one counts as refused."""
        return {
            model: {
                "calls": counts.calls,
                "mended": counts.mended,
                "mended_how": dict(sorted(counts.mends.items())),
                "refused": counts.faults.total(),
                "refused_why": dict(sorted(counts.faults.items())),
            }
            for model, counts in sorted(self._models.items())
        }
