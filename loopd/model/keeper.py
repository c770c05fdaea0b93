"""Keeps what is in the slots: saves what must give way, restores what comes back (SPEC 4.4).

Before a session's request its slot is looked at. If the session's tokens are not in it, what is in it is saved - here
and nowhere else on a turn's path - and the best state that is on disk is restored. Everything else happens while
nobody asks: a slot that has been idle is saved, files are synced, the ledger is written.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

from loopd.clock import monotonic_s
from loopd.config import ModelTable
from loopd.errors import ModelError
from loopd.model.client import ModelClient, SlotView
from loopd.model.slots import SlotCondition, SlotPool
from loopd.model.states import Fit, History, Left, State, shared_tokens
from loopd.model.statestore import NotSaved, StateStore
from loopd.proto.records import Usage

log = logging.getLogger("loopd.states")

_MAX_LOST = 1000


class StateKeeper:
    """What the slots of one model server hold, in the slots and on disk.

    Args:
        directory: `<home>/slots`.
        client: of the server.
        pool: its slots.
        table: returns `[model]` as it is now.
        short_of_disk: returns why so many more bytes may not be written, '' if they may.
    """

    def __init__(
        self,
        directory: Path,
        client: ModelClient,
        pool: SlotPool,
        *,
        table: Callable[[], ModelTable],
        short_of_disk: Callable[[int], str] = lambda _size_bytes: "",
    ) -> None:
        self._client, self._pool, self._table = client, pool, table
        self._store = StateStore(directory, client, table=table, short_of_disk=short_of_disk, on_pruned=self._on_pruned)
        self._lost: dict[str, SlotCondition] = {}
        self._idle_since_s: dict[int, float] = {}
        self._quiet_since_s = monotonic_s()
        self._tried: dict[int, Left] = {}
        self._wake = asyncio.Event()
        for slot, left in sorted(self._store.left.items(), key=lambda item: item[1].turn):
            pool.recall(slot, left)

    def serve(self, fit: Fit) -> None:
        """Take over what is served now."""
        self._store.serve(fit)
        self._wake.set()

    # --- before and after a request -----------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def hold(
        self, history: History, *, on_place: Callable[[int], None] = lambda _place: None
    ) -> AsyncIterator[tuple[int | None, SlotCondition]]:
        """Have a slot for one request, with what can be had of the history in it; give it back at the block's end.

        Yields:
            The slot, None where the server has none, and what was found in it.

        Raises:
            ModelError: the server does not answer.
        """
        mark = history.mark
        holding = self._pool.hold(mark.session, prefer=history.slot, kin=history.kin, mark=mark, on_place=on_place)
        slot = None
        try:
            async with holding as slot:
                yield slot, await self._prepare(slot, history)
        finally:
            if slot is not None:
                self._idle_since_s[slot] = self._quiet_since_s = monotonic_s()
                self._wake.set()

    def account(self, usage: Usage, condition: SlotCondition) -> None:
        """Learn from a finished request: what evaluating costs, and whether a restored state was of use (CASE 9)."""
        prompt, cached = usage.prompt_tokens, usage.cached_tokens
        if prompt is None or cached is None:
            return
        if usage.prefill_ms:
            self._store.speeds.evaluated(prompt - cached, usage.prefill_ms)
        if condition.kind == "restored" and usage.expected and not cached:
            what = f"{condition.tokens} tokens were restored, the request had {usage.expected} of them, none was used"
            self._store.give_up(what, roll_back=condition.tokens > usage.expected)
            self._wake.set()

    async def _prepare(self, slot: int | None, history: History) -> SlotCondition:
        """Look at a slot that is held, and put into it what can be had."""
        views = {view.id: view for view in await self._client.slots()} if slot is not None else {}
        if slot is None or slot not in views:
            return SlotCondition("unknown", "", "the server does not show its slots")
        view, session = views[slot], history.mark.session
        self._note_lost(views.values(), slot)
        found, here = self._look(slot, view, history)
        restored: tuple[State, int] | str = ""
        if here < max(1, history.expected):
            await self._make_way(slot, session)
            restored = await self._restore(slot, view, history, here)
        elif (left := self._pool.left(slot)) and left.mark.session != session:
            await self._make_way(slot, session)
        self._lost.pop(session, None)
        if history.rebased and history.expected:
            return SlotCondition("rebased", "", history.rebased)
        if here >= history.expected and isinstance(restored, str):
            return SlotCondition("ours", "", found.evidence, view.tokens)
        return _condition(restored, found, history)

    def _look(self, slot: int, view: SlotView, history: History) -> tuple[SlotCondition, int]:
        """Return what the slot is to the history, and how many of its tokens it is known to hold."""
        left, lost = self._pool.left(slot), self._lost.get(history.mark.session)
        found = self._pool.judge(view, history.mark.session, history.expected)
        if left is not None:
            here = shared_tokens(left, history)
            return (lost if lost and here < history.expected else found), here
        if lost:
            return lost, 0
        # loopd has started since: the length alone tells, and a state that surely has everything is better.
        return found, max(0, history.expected - 1) if found.kind == "ours" else 0

    def _note_lost(self, views: Iterable[SlotView], slot: int) -> None:
        """Forget what is gone from the slots, and remember for its session what happened."""
        for left, condition in self._pool.check(views, held=slot):
            saved = "" if self._store.is_saved(left) else f"; what {left.mark.session} had there was not saved"
            self._remember(
                left.mark.session,
                SlotCondition(condition.kind, condition.by, condition.evidence + saved, condition.tokens),
            )

    def _on_pruned(self, state: State, bound: str) -> None:
        why = f"its saved state of {state.tokens} tokens gave way to others ({bound})"
        self._remember(state.mark.session, SlotCondition("evicted", "", why))

    def _remember(self, session: str, condition: SlotCondition) -> None:
        self._lost.pop(session, None)
        self._lost[session] = condition
        if len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]

    async def _make_way(self, slot: int, session: str) -> None:
        """Save what is in a slot before it is lost; where that fails, remember why."""
        left = self._pool.left(slot)
        if left is None:
            return
        try:
            await self._store.save(slot, left, quick=True)
        except NotSaved as reason:
            evidence = f"session {session} was given slot {slot}, and what was in it was not saved: {reason}"
            self._remember(left.mark.session, SlotCondition("evicted", session, evidence))
        else:
            self._lost.pop(left.mark.session, None)

    async def _restore(self, slot: int, view: SlotView, history: History, here: int) -> tuple[State, int] | str:
        """Restore the best state into a slot that is held; return it and what it gives, or why none was ('': none)."""
        best = await self._store.find(history, here=here)
        if best is None:
            return ""
        state, shared = best
        if reason := self._store.why_not(state, shared - here):
            return reason
        self._pool.drop(slot)  # whatever happens now, it is not there any more
        if reason := await self._store.restore(slot, state):
            return reason
        self._pool.put(slot, state.mark, task=view.task, tokens=state.tokens)
        return best

    # --- while nobody asks --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Save slots that are idle, sync files, write the ledger; for ever."""
        while True:
            self._wake.clear()
            await self._write_down()
            due_s = [self._due_s(slot) for slot in self._waiting()]
            if self._store.unsynced:
                due_s.append(self._quiet_since_s + self._table().save_idle_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(due_s) - monotonic_s()) if due_s else None):
                    await self._wake.wait()
            for slot in self._waiting():
                if self._due_s(slot) <= monotonic_s():
                    await self._save_idle(slot)
            if self._quiet_since_s + self._table().save_idle_s <= monotonic_s():
                await self._store.sync()

    async def stop(self, within_s: float, hurry: asyncio.Event) -> None:
        """Save what is not saved, the dearest first; say what was skipped and what that will cost.

        Args:
            within_s: the time there is.
            hurry: set when it must end at once.
        """
        began_s = monotonic_s()
        unsaved = self._unsaved()
        told = asyncio.ensure_future(hurry.wait())
        for slot in sorted(unsaved, key=lambda slot: -unsaved[slot].tokens):
            saving = asyncio.ensure_future(self._save_idle(slot))
            left_s = within_s - (monotonic_s() - began_s)
            await asyncio.wait({saving, told}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not saving.done():
                saving.cancel()
                await asyncio.wait({saving})
                break
        told.cancel()
        skipped = self._unsaved()
        for left in skipped.values():
            cost_s = self._store.speeds.prefill_s(left.tokens)
            cost = "unknown" if cost_s is None else f"{cost_s:.1f}"
            log.warning("not_saved session=%s tokens=%d cost_s=%s", left.mark.session, left.tokens, cost)
        saved = len(unsaved) - len(skipped)
        log.info("states_saved slots=%d skipped=%d seconds=%.1f", saved, len(skipped), monotonic_s() - began_s)
        if not hurry.is_set():
            await self._store.sync()
        await self._write_down()

    async def forget(self, session: str) -> None:
        """Remove every state that holds text of a session that is deleted."""
        await self._store.forget(session)
        for slot, left in self._pool.free().items():
            if left.mark.session == session:
                self._pool.drop(slot)
        self._lost.pop(session, None)
        self._wake.set()

    def _unsaved(self) -> dict[int, Left]:
        return {slot: left for slot, left in self._pool.free().items() if not self._store.is_saved(left)}

    def _waiting(self) -> list[int]:
        """Return the slots that are to be saved: not those for which it was tried in vain."""
        if self._store.off:
            return []
        return [slot for slot, left in self._unsaved().items() if self._tried.get(slot) != left]

    def _due_s(self, slot: int) -> float:
        return self._idle_since_s.setdefault(slot, monotonic_s()) + self._table().save_idle_s

    async def _save_idle(self, slot: int) -> None:
        """Save a slot if nobody uses it and it is as it was left."""
        with self._pool.quiet(slot) as free:
            left = self._pool.left(slot)
            if not free or left is None:
                return
            try:
                self._note_lost(await self._client.slots(), slot)
                if self._pool.left(slot) == left:
                    await self._store.save(slot, left, quick=False)
            except (NotSaved, ModelError) as reason:
                log.warning("not_saved slot=%d session=%s reason=%r", slot, left.mark.session, str(reason))
                self._tried[slot] = left

    async def _write_down(self) -> None:
        if self._pool.total is not None:
            slots = {slot: left for slot in range(self._pool.total) if (left := self._pool.left(slot))}
            await self._store.write_down(slots)

    # --- for people ---------------------------------------------------------------------------------------------

    def slots(self) -> list[dict[str, Any]]:
        """Return for each slot whether it is in use, whose tokens it holds, and how many of those are on disk."""
        return [
            {**slot, "saved_tokens": self._store.saved_tokens(slot["session"]) if slot["session"] else None}
            for slot in self._pool.describe()
        ]

    def describe(self) -> dict[str, Any]:
        """Return what is on disk, its bounds, and what saving and restoring has cost since the start."""
        return self._store.describe()


def _condition(restored: tuple[State, int] | str, why: SlotCondition, history: History) -> SlotCondition:
    """Return what a slot that did not have the history is to it, after what was tried."""
    if isinstance(restored, str):
        if not restored or why.kind == "ours":
            return why
        return SlotCondition("not_restored", why.by, f"{why.evidence}; {restored}", why.tokens)
    state, shared = restored
    what = f"a saved state of {state.tokens} tokens was restored"
    if shared >= history.expected:
        return SlotCondition("restored", "", what, state.tokens)
    evidence = f"{why.evidence}; {what}, which has {shared} of the {history.expected} that were left"
    return SlotCondition(why.kind, why.by, evidence, state.tokens)
