"""The stage a device is in: reachable, installed, serving. The first failure latches (SPEC 10, device checks)."""

STAGES = ("reachable", "installed", "serving")


class Latch:
    """Remembers the first failed check of each stage; checks of later stages then fail at once and name it."""

    def __init__(self) -> None:
        self._failed: dict[str, str] = {}

    def fail(self, stage: str, check: str) -> None:
        """Note that a check of a stage failed."""
        self._failed.setdefault(stage, check)

    def cause(self, stage: str) -> str | None:
        """Return what failed in a stage before this one, None where all is well."""
        earlier = STAGES[: STAGES.index(stage)]
        return next((f"{name}: {self._failed[name]}" for name in earlier if name in self._failed), None)
