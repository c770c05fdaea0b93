"""The saved states of one model server, kept within their bounds: save, restore, prune, give up (SPEC 4.4)."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from loopd.clock import monotonic_s, now
from loopd.config import ModelTable
from loopd.errors import ModelError
from loopd.model.client import ModelClient
from loopd.model.statefiles import StateFiles, Useless
from loopd.model.states import (
    Fit,
    History,
    Left,
    Speeds,
    State,
    choose,
    find,
    is_saved,
    superseded,
    to_prune,
    wants_baseline,
)

log = logging.getLogger("loopd.states")


class NotSaved(Exception):
    """Why a slot was not saved, in words. Not an error: the tokens are evaluated again, at a cost."""


class StateStore:
    """The states under `<home>/slots`.

    Args:
        directory: where they are; the server must save there as well.
        client: of the server.
        table: returns `[model]` as it is now.
        short_of_disk: returns why so many more bytes may not be written, '' if they may.
        on_pruned: is told of a state that fits and gave way to others.

    Attributes:
        fit: what the server has now; None before that is known.
        speeds: what prefill and restore cost here.
    """

    def __init__(
        self,
        directory: Path,
        client: ModelClient,
        *,
        table: Callable[[], ModelTable],
        short_of_disk: Callable[[int], str],
        on_pruned: Callable[[State, str], None],
    ) -> None:
        self._client, self._table, self._short_of_disk, self._on_pruned = client, table, short_of_disk, on_pruned
        self._files = StateFiles(directory)
        self._ledger = self._written = self._files.load()
        self._off = ""
        self._saving = asyncio.Lock()
        self._totals = dict.fromkeys(("saves", "saved_bytes", "save_s", "restores", "restored_bytes", "restore_s"), 0.0)
        self.fit: Fit | None = None
        self.speeds = Speeds()

    @property
    def left(self) -> Mapping[int, Left]:
        """How the slots were left when the ledger was last written."""
        return self._ledger.slots

    @property
    def off(self) -> str:
        """Why nothing can be saved; '' if it can."""
        if self.fit is None:
            return "it is not known what the server has"
        useless = self._ledger.useless
        return self._off or (useless.restore if useless else "")

    def serve(self, fit: Fit) -> None:
        """Take over what is served now. States of anything else stay on disk until room is needed, unused."""
        self.fit, self._off = fit, ""
        if self._ledger.useless and self._ledger.useless.fit != fit:
            self._ledger = self._ledger.model_copy(update={"useless": None})

    def is_saved(self, left: Left) -> bool:
        """Tell whether what a slot holds is on disk as it is."""
        return self.fit is not None and is_saved(self._files.states.values(), self.fit, left)

    def give_up(self, what: str, *, roll_back: bool) -> None:
        """Stop restoring for this model: at all, or (`roll_back`) what it would have to drop tokens from."""
        if self.fit is None:
            return
        useless = self._ledger.useless or Useless(fit=self.fit)
        useless = useless.model_copy(update={"roll_back" if roll_back else "restore": what})
        self._ledger = self._ledger.model_copy(update={"useless": useless})
        log.warning("restore_given_up model=%s reason=%r", self.fit.model.alias, what)

    # --- saving -------------------------------------------------------------------------------------------------

    async def save(self, slot: int, left: Left, *, quick: bool) -> None:
        """Save what is in a slot that nobody uses, unless it is saved already.

        Args:
            slot: the slot.
            left: what is in it.
            quick: a turn waits: the file is synced later, and no state for new sessions is made.

        Raises:
            NotSaved: why not.
        """
        async with self._saving:
            if self.off or self.fit is None:
                raise NotSaved(self.off)
            if not is_saved(self._files.states.values(), self.fit, left):
                await self._save_as("session", slot, left, self.fit)
            if not quick and wants_baseline(self._files.states.values(), self.fit, left):
                await self._save_as("baseline", slot, left, self.fit)

    async def _save_as(self, kind: Literal["session", "baseline"], slot: int, left: Left, fit: Fit) -> None:
        began_s = monotonic_s()
        name = State.named(kind, left.mark, left.tokens)
        await self._make_room(int(left.tokens * self.speeds.bytes_per_token))
        size = await self._write(slot, name, left.tokens)
        self._ledger = self._ledger.model_copy(update={"serial": self._ledger.serial + 1})
        state = State(
            name=name,
            kind=kind,
            fit=fit,
            mark=left.mark,
            tokens=left.tokens,
            size_bytes=size,
            serial=self._ledger.serial,
            boot=self._files.boot,
        )
        try:
            await asyncio.to_thread(self._files.add, state)
            for old in superseded(list(self._files.states.values()), state):
                await self._replace(old, fit)
        except OSError as error:
            raise NotSaved(f"{error.filename}: {error.strerror}") from error
        await self._make_room(0)
        if name not in self._files.states:
            raise NotSaved(f"{size:,} bytes are more than max_states_bytes = {self._table().max_states_bytes:,} allows")
        seconds = monotonic_s() - began_s
        self._count("save", size, seconds)
        log.info(
            "saved session=%s kind=%s tokens=%d bytes=%d ms=%.0f",
            left.mark.session,
            kind,
            left.tokens,
            size,
            seconds * 1000,
        )

    async def _write(self, slot: int, name: str, tokens: int) -> int:
        """Have the server write the file; return its size."""
        try:
            await asyncio.to_thread(self._files.prepare, name)
            saved = await self._client.save_slot(slot, self._files.file_name(name))
        except ModelError as error:
            if "slot-save-path" in error.message:
                self._off = f"the server saves no states: {error.message}"
            raise NotSaved(error.message) from error
        except OSError as error:
            raise NotSaved(f"{error.filename}: {error.strerror}") from error
        size = await asyncio.to_thread(self._files.size_bytes, name)
        if size is None:
            self._off = f"the server does not save into {self._files.directory}"
            raise NotSaved(self._off)
        self._ledger = self._ledger.model_copy(
            update={"day": now()[:10], "day_bytes": self._written_today() + saved.size_bytes}
        )
        if saved.tokens != tokens or not size:
            await asyncio.to_thread(self._files.remove, name)
            raise NotSaved(f"the server wrote {saved.tokens} of {tokens} tokens, {size} bytes")
        self.speeds.bytes_per_token = size / tokens
        return size

    async def _replace(self, old: State, fit: Fit) -> None:
        """Take away a state that a newer one replaces; a short one becomes what new sessions start from."""
        if old.kind == "session" and old.fit == fit and wants_baseline(self._files.states.values(), fit, old):
            kept = await asyncio.to_thread(self._files.become_baseline, old)
            for other in superseded(list(self._files.states.values()), kept):
                await asyncio.to_thread(self._files.remove, other.name)
        else:
            await asyncio.to_thread(self._files.remove, old.name)

    async def _make_room(self, size_bytes: int) -> None:
        """Remove what must go before `size_bytes` more are written.

        Raises:
            NotSaved: the day's bytes are used up, or the disk is full.
        """
        table = self._table()
        if size_bytes and self._written_today() + size_bytes > table.max_states_day_bytes:
            raise NotSaved(f"max_states_day_bytes = {table.max_states_day_bytes:,} are written today")
        states = list(self._files.states.values())
        for state in to_prune(states, self.fit, table.max_states_bytes - size_bytes):
            await asyncio.to_thread(self._files.remove, state.name)
            log.info("pruned session=%s kind=%s tokens=%d", state.mark.session, state.kind, state.tokens)
            if state.kind == "session" and state.fit == self.fit:
                self._on_pruned(state, f"max_states_bytes = {table.max_states_bytes:,}")
        if size_bytes and (short := self._short_of_disk(size_bytes)):
            raise NotSaved(short)

    def _written_today(self) -> int:
        return self._ledger.day_bytes if self._ledger.day == now()[:10] else 0

    def _count(self, what: Literal["save", "restore"], size_bytes: int, seconds: float) -> None:
        self._totals[f"{what}s"] += 1
        self._totals[f"{what}d_bytes"] += size_bytes
        self._totals[f"{what}_s"] += seconds

    # --- restoring ----------------------------------------------------------------------------------------------

    async def find(self, history: History, *, here: int) -> tuple[State, int] | None:
        """Return the state that gives the history most, and how much of it; None if none gives more than `here`."""
        if self.fit is None:
            return None
        useless = self._ledger.useless
        rolls_back = not (useless and useless.roll_back)
        while best := choose(self._files.states.values(), history, self.fit, here=here, rolls_back=rolls_back):
            state = best[0]
            if await asyncio.to_thread(self._files.size_bytes, state.name) == state.size_bytes:
                return best
            await asyncio.to_thread(self._files.remove, state.name)  # somebody took it away
        return None

    def why_not(self, state: State, gain_tokens: int) -> str:
        """Say why a state should not be restored; '' if it should."""
        if self._ledger.useless and self._ledger.useless.restore:
            return f"states are not restored with this model: {self._ledger.useless.restore}"
        return self.speeds.slower_restored(state, gain_tokens)

    async def restore(self, slot: int, state: State) -> str:
        """Restore a state into a slot that is held; say why that failed, '' if it did not. A bad one is removed."""
        began_s = monotonic_s()
        try:
            restored = await self._client.restore_slot(slot, self._files.file_name(state.name))
        except ModelError as error:
            await asyncio.to_thread(self._files.remove, state.name)
            return f"its state of {state.tokens} tokens was not taken: {error.message}"
        if restored.tokens != state.tokens:
            await asyncio.to_thread(self._files.remove, state.name)
            return f"{restored.tokens} of {state.tokens} tokens were restored"
        seconds = monotonic_s() - began_s
        self.speeds.restored(state.size_bytes, restored.ms)
        self._count("restore", state.size_bytes, seconds)
        log.info("restored slot=%d state=%s tokens=%d ms=%.0f", slot, state.name, state.tokens, seconds * 1000)
        return ""

    # --- the rest -----------------------------------------------------------------------------------------------

    @property
    def unsynced(self) -> bool:
        """Whether a power cut would take a state with it."""
        return any(state.boot for state in self._files.states.values())

    async def sync(self) -> None:
        """Sync what was saved in a hurry."""
        with contextlib.suppress(OSError):
            for name in [state.name for state in self._files.states.values() if state.boot]:
                await asyncio.to_thread(self._files.sync, name)

    async def write_down(self, slots: Mapping[int, Left]) -> None:
        """Write the ledger: how the slots were left, what was written today, what was given up."""
        self._ledger = self._ledger.model_copy(update={"slots": dict(slots)})
        if self._ledger == self._written:
            return
        try:
            await asyncio.to_thread(self._files.keep, self._ledger)
        except OSError as error:
            log.warning("ledger path=%s reason=%r", error.filename, error.strerror)
        self._written = self._ledger

    async def forget(self, session: str) -> None:
        """Remove every state that holds text of a session."""
        for state in find(list(self._files.states.values()), session):
            await asyncio.to_thread(self._files.remove, state.name)

    def saved_tokens(self, session: str) -> int | None:
        """Return how many tokens of a session are on disk; None for none."""
        states = find(self._files.states.values(), session)
        return max((state.tokens for state in states if state.kind == "session"), default=None)

    def describe(self) -> dict[str, Any]:
        """Return what is on disk, its bounds, and what saving and restoring has cost since the start."""
        table, useless = self._table(), self._ledger.useless
        states = sorted(self._files.states.values(), key=lambda state: -state.serial)
        return {
            "state": "off" if self.off else "on",
            "reason": self.off or (useless.roll_back if useless else "") or None,
            "count": len(states),
            "disk_bytes": sum(state.size_bytes for state in states),
            "max_disk_bytes": table.max_states_bytes,
            "written_today_bytes": self._written_today(),
            "max_written_today_bytes": table.max_states_day_bytes,
            **{name: round(value, 3) if name.endswith("_s") else int(value) for name, value in self._totals.items()},
            "list": [
                {
                    "kind": state.kind,
                    "session": state.mark.session,
                    "epoch": state.mark.epoch,
                    "line": state.mark.line,
                    "tokens": state.tokens,
                    "bytes": state.size_bytes,
                    "fits": state.fit == self.fit,
                }
                for state in states
            ],
        }
