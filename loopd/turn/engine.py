"""What the channel asks of the parts below it: baselines, whether a turn may begin, turns, facts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loopd.config import Config
from loopd.errors import AuditError, DiskLow, ModelError
from loopd.model.check import ModelCheck
from loopd.model.client import Event, Loading
from loopd.proto.frames import TurnEndFrame
from loopd.proto.records import FORMAT_VERSION
from loopd.session.baseline import Baseline
from loopd.session.store import Session
from loopd.tools.registry import Registry
from loopd.turn.approvals import Approvals
from loopd.turn.compact import Compaction
from loopd.turn.loop import Turn
from loopd.turn.parts import Emit, Parts


@dataclass(frozen=True, slots=True)
class Engine:
    """Turns over one set of parts."""

    parts: Parts

    async def baseline(self, on_wait: Callable[[str], None]) -> Baseline:
        """Freeze what a new session's requests never change (SPEC 2.3).

        Args:
            on_wait: is told why, where the model server is still waited for.

        Raises:
            AuditError: the daemon is read-only.
            ModelError: the model server cannot be asked for the forms it takes.
        """

        def tell(event: Event) -> None:
            if isinstance(event, Loading):
                on_wait(event.message)

        self._writable()
        check = await self.parts.watch.current(tell)
        return new_baseline(self.parts.config, self.parts.registry, check)

    async def admit(self, session: Session) -> None:  # noqa: ARG002 - what is asked of every session so far
        """Refuse a turn that could not be kept, at once; nothing is written and nobody is waited for.

        Raises:
            AuditError: the daemon is read-only.
            DiskLow: less than `min_free_bytes` are free.
        """
        self._writable()
        home, least = self.parts.home, self.parts.config.loop.min_free_bytes
        if (free := home.free_bytes()) < least:
            raise DiskLow(
                f"{free:,} bytes are free under {home.path}, and a turn needs {least:,} ([loop] min_free_bytes)",
                hint="free some disk space and say it again; reading and export still work",
            )

    async def run_turn(self, session: Session, text: str, key: str, emit: Emit, approvals: Approvals) -> TurnEndFrame:
        """Run one turn to its end; cancelling the task cancels the turn, whose end is returned all the same.

        With `[loop] auto_compact`, a turn for which the context has hardly room begins in a new epoch.

        Raises:
            CancelledError: it was cancelled while the summary was written.
        """
        if self.parts.config.loop.auto_compact:
            await Compaction(self.parts, session, emit).make_room(text)
        return await Turn(self.parts, session, emit, approvals).run(text, key)

    async def recover(self, session: Session, emit: Emit) -> None:
        """End a turn that a crash left without its end (SPEC 2.2/9).

        Raises:
            SessionError: the records cannot be written.
        """
        await Turn(self.parts, session, emit).recover()

    async def estimate(self, session: Session) -> dict[str, Any]:
        """Return what a compaction would cost.

        Raises:
            LoopdError: as `Compaction.estimate`.
        """
        return await Compaction(self.parts, session, lambda _frame: None).estimate()

    async def compact(self, session: Session, emit: Emit, *, uid: int, pid: int) -> dict[str, Any]:
        """Go on in the next epoch, from a summary; cancelling the task leaves the epoch as it is.

        Raises:
            LoopdError: as `Compaction.run_to_next_epoch`.
        """
        return await Compaction(self.parts, session, emit).run_to_next_epoch(uid=uid, pid=pid)

    async def audit(self, event: str, **facts: Any) -> None:  # noqa: ANN401 - any JSON value
        """Write one audit record, durable on return.

        Raises:
            AuditError: it cannot be written.
        """
        await self.parts.audit(event, **facts)

    async def status(self) -> dict[str, Any]:
        """Return the facts of all parts; what is not known stands as a reason."""
        parts = self.parts
        model: dict[str, Any] = {"url": parts.client.url}
        try:
            check = await parts.watch.current()
        except ModelError as error:
            model |= {"state": "unavailable", "reason": error.message}
        else:
            model |= {"state": "up", **check.describe()}
        return {
            "config": {"sha256": parts.config.sha256(), "refused": parts.config_refused or None},
            "model": model,
            "slots": parts.keeper.slots(),
            "cache": parts.tally.describe(),
            "states": parts.keeper.describe(),
            "tool_processes": await parts.children.describe(),
            "tool_calls": parts.mends.describe(),
            "audit": {"state": "ok"} if parts.audit_log else {"state": "read-only", "reason": parts.audit_fault},
        }

    async def forget(self, session_id: str) -> None:
        """Remove the saved states of a session that is deleted."""
        await self.parts.keeper.forget(session_id)

    async def tools(self, query: str, session_id: str) -> list[dict[str, Any]]:
        """Return the ports with their states and tools, all or those that find_tool finds."""
        registry = self.parts.registry
        return await registry.describe_found(query, session_id) if query else registry.describe(session_id)

    def _writable(self) -> None:
        if self.parts.audit_log is None:
            raise AuditError(f"loopd serves read-only: {self.parts.audit_fault}", hint="mend it and restart loopd")


def new_baseline(config: Config, registry: Registry, check: ModelCheck) -> Baseline:
    """Return the baseline of a session made now. Nothing in it may differ tomorrow: no date, no tool list."""
    return Baseline(
        version=FORMAT_VERSION,
        system_prompt=config.loop.system_prompt,
        tools=registry.definitions,
        model=check.model,
        template=check.template,
        arguments=check.forms.arguments,
        reasoning=config.loop.reasoning,
        system=check.forms.system,
    )
