"""The parts that every turn uses, read anew at each step: what changes here reaches every session at its next step."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from loopd.audit import AuditLog
from loopd.config import Config
from loopd.errors import AuditError
from loopd.home import Home
from loopd.model.client import ModelClient
from loopd.model.keeper import StateKeeper
from loopd.model.slots import SlotPool
from loopd.model.tally import Tally
from loopd.model.watch import ModelWatch
from loopd.proto.frames import ServerFrame
from loopd.tools.children import Children
from loopd.tools.mends import Mends
from loopd.tools.registry import Registry

Emit = Callable[[ServerFrame], None]
"""Takes every frame of a turn in order; must not block."""

T = TypeVar("T")


@dataclass(slots=True)
class Parts:
    """One of each. `config` is replaced as a whole when the file is read again.

    `config_refused` says why it was not replaced the last time.
    `audit_fault` says why there is no audit log; then nothing is done that would have to be audited.
    """

    home: Home
    config: Config
    client: ModelClient
    pool: SlotPool
    keeper: StateKeeper
    watch: ModelWatch
    registry: Registry
    audit_log: AuditLog | None
    children: Children
    audit_fault: str = ""
    config_refused: str = ""
    tally: Tally = field(default_factory=Tally)
    mends: Mends = field(default_factory=Mends)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def audit(self, event: str, **facts: Any) -> None:  # noqa: ANN401 - any JSON value
        """Write one audit record, durable on return; off the event loop.

        Raises:
            AuditError: it cannot be written; what was to be audited must not be done.
        """
        if self.audit_log is None:
            raise AuditError(f"there is no audit log: {self.audit_fault}", hint="mend it and restart loopd")
        async with self._one_at_a_time:
            await uninterrupted(asyncio.to_thread(self.audit_log.append, event, **facts))


async def uninterrupted(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end also when this task is cancelled meanwhile; the cancel is raised afterwards.

    What writes to disk must not be left half known: after this returns or raises, `work` has ended.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except BaseException:  # noqa: BLE001, S110 - the task's own end is taken below
            pass
    if cancelled is not None and task.exception() is None:
        raise cancelled
    return task.result()
