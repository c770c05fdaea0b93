"""What the channel needs from the parts below it, as one interface: the daemon gives the real one, tests a fake."""

from collections.abc import Callable
from typing import Any, Protocol

from loopd.proto.frames import ServerFrame, TurnEndFrame
from loopd.session.baseline import Baseline
from loopd.session.store import Session
from loopd.turn.approvals import Approvals

Emit = Callable[[ServerFrame], None]


class Engine(Protocol):
    """Turns, baselines and facts."""

    async def baseline(self, on_wait: Callable[[str], None]) -> Baseline:
        """Return what a session that is created now is frozen to.

        Args:
            on_wait: is told why, where the model server is still waited for.

        Raises:
            ModelError: the model server is needed for it and does not answer.
        """
        ...

    async def admit(self, session: Session) -> None:
        """Refuse a turn that cannot begin, before anything is accepted; quick, and nothing is written.

        Raises:
            LoopdError: DiskLow, ModelChanged and the like; the `say` is answered with it.
        """
        ...

    async def run_turn(self, session: Session, text: str, key: str, emit: Emit, approvals: Approvals) -> TurnEndFrame:
        """Run one turn to its end; cancelling the task cancels the turn.

        Each record is emitted after it is durable. The end is returned, not emitted. `approvals` is asked about calls.

        Raises:
            LoopdError: the turn could not be run or recorded.
            CancelledError: the turn was cancelled; a cancel may also be answered by returning its end.
        """
        ...

    async def recover(self, session: Session, emit: Emit) -> None:
        """End a turn that a crash left without its end (SPEC 2.2/9); each record is emitted."""
        ...

    async def estimate(self, session: Session) -> dict[str, Any]:
        """Return what a compaction of the session would cost.

        Raises:
            LoopdError: it cannot be compacted.
        """
        ...

    async def compact(self, session: Session, emit: Emit, *, uid: int, pid: int) -> dict[str, Any]:
        """Go on in the session's next epoch from a summary, and return what was done; `uid` and `pid` asked for it.

        The record of the new epoch's `session_start` is emitted when it is durable.

        Raises:
            LoopdError: it could not be done; the session goes on as it was.
            CancelledError: likewise.
        """
        ...

    async def audit(self, event: str, **facts: Any) -> None:  # noqa: ANN401 - any JSON value
        """Write one audit record, durable on return.

        Raises:
            AuditError: it cannot be written; what was to be audited is not done.
        """
        ...

    async def status(self) -> dict[str, Any]:
        """Return the facts of configuration, model, slots and audit log for `status`."""
        ...

    async def forget(self, session_id: str) -> None:
        """Remove what is kept of a session that is deleted, outside its directory."""
        ...

    async def tools(self, query: str, session_id: str) -> list[dict[str, Any]]:
        """Return the ports: `{"port", "state", "reason", "tools": [{"name", "description", "effect", "calls", …}]}`.

        Args:
            query: "" for all tools, else only what find_tool finds for it, each with its `rank`.
            session_id: whose calls the policy's `decision` is about; "" for a session that no rule names.
        """
        ...
