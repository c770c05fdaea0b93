"""Who uses which slot of the model server, in what order, and what is in it (SPEC 4.1, 4.4).

All sessions share one baseline, the very shape that llama.cpp's own choice of a slot handles worst, so loopd owns
the slots: a session stays in the slot that holds its cache, and before each request the slot is looked at. What is
found there is the evidence when tokens turn out to be lost. Saving and restoring is the keeper's (`keeper.py`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loopd.errors import ModelError
from loopd.model.client import ModelClient, SlotView
from loopd.model.states import Left, Mark

_LOOK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class SlotCondition:
    """What a slot is to a session just before its request.

    Attributes:
        kind: `ours` as the session left it; `restored` a state of the session was put there; `cold` empty, or the
            server started anew; `foreign` somebody else was in it; `evicted` loopd gave it away and could not keep
            what was in it; `not_restored` a state is there and was of no use; `rebased` the session has another
            baseline than what was cached; `unknown` the server does not show.
        by: the session that was in it, '' where it was none of loopd's.
        evidence: what shows it, in words.
        tokens: that the slot holds; 0 where that is not known.
    """

    kind: Literal["ours", "restored", "cold", "foreign", "evicted", "not_restored", "rebased", "unknown"]
    by: str
    evidence: str
    tokens: int = 0


class _Waiter:
    def __init__(self, mark: Mark, prefer: int | None, kin: str, on_place: Callable[[int], None]) -> None:
        self.mark = mark
        self.prefer = prefer
        self.kin = kin
        self.on_place = on_place
        self.place = 0
        self.granted: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()


class SlotPool:
    """The slots of one model server, one request at a time to each, first come, first served.

    A server that shows no slots (`total` None) is not queued for: it decides by itself. `process` is the server that
    runs now (`ServerFacts`): what another one had in its slots is gone, whatever this one shows.
    """

    def __init__(self, total: int | None, client: ModelClient) -> None:
        self.total = total
        self.process = ""
        self._client = client
        self._busy: set[int] = set()
        self._left: dict[int, Left] = {}
        self._queue: list[_Waiter] = []
        self._turn = 0

    @contextlib.asynccontextmanager
    async def hold(
        self,
        session_id: str,
        *,
        prefer: int | None = None,
        kin: str = "",
        mark: Mark | None = None,
        on_place: Callable[[int], None] = lambda _place: None,
    ) -> AsyncIterator[int | None]:
        """Have a slot for one request; give it back at the end of the block.

        Args:
            session_id: the session that asks; it gets the slot it used last unless another session was in it since.
            prefer: the slot that its log names, for the first request after loopd started.
            kin: a session whose slot does as well as one of its own.
            mark: where the session stands; kept with what is left in the slot.
            on_place: is called with the place in the queue (1 is next) whenever it changes; never if none waits.
        """
        mark = mark or Mark(session=session_id, epoch=0, line=0, baseline="")
        slot = await self._acquire(_Waiter(mark, prefer, kin, on_place))
        if slot is None:
            yield None
            return
        try:
            yield slot
        finally:
            try:
                await self._note(slot, mark)
            finally:
                self._free(slot)

    @contextlib.contextmanager
    def quiet(self, slot: int) -> Iterator[bool]:
        """Take a slot for a moment without a request; False if it is in use."""
        if slot in self._busy:
            yield False
            return
        self._busy.add(slot)
        try:
            yield True
        finally:
            self._free(slot)

    def left(self, slot: int) -> Left | None:
        """Return how the slot was left; None where loopd does not know."""
        return self._left.get(slot)

    def free(self) -> Mapping[int, Left]:
        """Return what is in the slots that are not in use, the longest unused first."""
        known = sorted(self._left.items(), key=lambda item: item[1].turn)
        return {slot: left for slot, left in known if slot not in self._busy}

    def put(self, slot: int, mark: Mark, *, task: int | None, tokens: int) -> None:
        """Note what was restored into a slot that is held."""
        self.recall(slot, Left(mark=mark, task=task, tokens=tokens, turn=0, process=self.process))

    def recall(self, slot: int, left: Left) -> None:
        """Note how a slot was left, as it may have been before loopd started; its `turn` is counted anew."""
        self._turn += 1
        self._left[slot] = left.model_copy(update={"turn": self._turn})

    def drop(self, slot: int) -> None:
        """Forget what is in a slot."""
        self._left.pop(slot, None)

    def check(self, views: Iterable[SlotView], *, held: int | None = None) -> list[tuple[Left, SlotCondition]]:
        """Forget what is not in its slot any more; return it with what happened to it.

        Args:
            views: the slots as the server shows them.
            held: a slot in use whose request was not sent yet.
        """
        gone = []
        for view in views:
            left = self._left.get(view.id)
            if left is None or (view.id in self._busy and view.id != held) or self._is_intact(view, left):
                continue
            condition = self._judge(view, left, left.mark.session, left.tokens)
            if condition.kind == "ours":  # it grew without a request
                condition = SlotCondition("foreign", "", condition.evidence, view.tokens)
            gone.append((left, condition))
            self.drop(view.id)
        return gone

    def _free(self, slot: int) -> None:
        self._busy.remove(slot)
        self._dispatch()

    def resize(self, total: int | None) -> None:
        """Take over the number of slots that the server has now; it may have been started with another one."""
        self.total = total
        self._left = {slot: left for slot, left in self._left.items() if slot < (total or 0)}
        self._dispatch()

    def describe(self) -> list[dict[str, Any]]:
        """Return for each slot whether it is in use, and which session used it last with how many tokens."""
        return [
            {
                "slot": slot,
                "busy": slot in self._busy,
                "session": self._left[slot].mark.session if slot in self._left else None,
                "tokens": self._left[slot].tokens if slot in self._left else None,
            }
            for slot in range(self.total or 0)
        ]

    async def look(self, slot: int | None, session_id: str, expected: int) -> SlotCondition:
        """Look at the slot just before a request of the session that holds it.

        Args:
            slot: as `hold` gave it.
            session_id: the session.
            expected: tokens that its last request left behind (SPEC 4.3).

        Raises:
            ModelError: the server does not answer.
        """
        view = None if slot is None else await self._view(slot)
        if view is None:
            return SlotCondition("unknown", "", "the server does not show its slots")
        return self.judge(view, session_id, expected)

    def judge(self, view: SlotView, session_id: str, expected: int) -> SlotCondition:
        """Tell what a slot, as the server shows it, is to the session (as `look`)."""
        return self._judge(view, self._left.get(view.id), session_id, expected)

    def _judge(self, view: SlotView, left: Left | None, session_id: str, expected: int) -> SlotCondition:
        if view.task is None:
            return SlotCondition("cold", "", f"slot {view.id} was not used since the model server started")
        task = left.task if left is not None else None
        # Where loopd itself has started since, only the length can tell.
        if left is not None and (self._is_gone(left) or (task is not None and view.task < task)):
            evidence = f"slot {view.id} is at task {view.task}, was at {task}: the model server started anew"
            return SlotCondition("cold", "", evidence)
        if task is not None and view.task > task:
            evidence = f"another client's task {view.task} ran in slot {view.id}, which now holds {view.tokens} tokens"
            return SlotCondition("foreign", "", evidence)
        if left is not None and left.mark.session != session_id:
            by = left.mark.session
            return SlotCondition("foreign", by, f"session {by} used slot {view.id} last", view.tokens)
        evidence = f"slot {view.id} holds {view.tokens} tokens, {expected} were left in it"
        if view.tokens >= expected:  # more after a cancel
            return SlotCondition("ours", "", evidence, view.tokens)
        return SlotCondition("foreign" if view.tokens else "cold", "", evidence, view.tokens)

    def _is_gone(self, left: Left) -> bool:
        return "" not in (left.process, self.process) and left.process != self.process

    def _is_intact(self, view: SlotView, left: Left) -> bool:
        same = view.task is not None and (view.task, view.tokens) == (left.task, left.tokens)
        return same and not self._is_gone(left)

    async def _view(self, slot: int) -> SlotView | None:
        return next((view for view in await self._client.slots() if view.id == slot), None)

    async def _note(self, slot: int, mark: Mark) -> None:
        """Remember how the request left the slot; if the slot did not move, nothing was sent."""
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                view = await self._view(slot)
        except (ModelError, TimeoutError):
            return  # the next look will find it cold or changed, and say so
        before = self._left.get(slot)
        if view is None or view.task is None:
            self.drop(slot)
        elif before is None or before.task != view.task:
            self.put(slot, mark, task=view.task, tokens=view.tokens)

    # --- the queue --------------------------------------------------------------------------------------------

    async def _acquire(self, waiter: _Waiter) -> int | None:
        self._queue.append(waiter)
        self._dispatch()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._queue.remove(waiter)
            elif (slot := waiter.granted.result()) is not None:
                self._busy.remove(slot)
            self._dispatch()
            raise

    def _dispatch(self) -> None:
        """Give the free slots to those who have waited longest, and tell the others their new place."""
        for waiter in list(self._queue):
            if self.total is None:
                self._grant(waiter, None)
            elif (slot := self._slot_for(waiter, set(range(self.total)) - self._busy)) is not None:
                self._busy.add(slot)
                self._grant(waiter, slot)
        for place, waiter in enumerate(self._queue, start=1):
            if waiter.place != place:
                waiter.place = place
                waiter.on_place(place)

    def _grant(self, waiter: _Waiter, slot: int | None) -> None:
        self._queue.remove(waiter)
        waiter.granted.set_result(slot)

    def _slot_for(self, waiter: _Waiter, free: set[int]) -> int | None:
        """Return the free slot that the waiter should have now: its own and no other, else the longest unused."""
        wanted = (waiter.mark.session, waiter.kin)
        own = min(
            (slot for slot, left in self._left.items() if left.mark.session in wanted),
            key=lambda slot: wanted.index(self._left[slot].mark.session),
            default=None,
        )
        if own is None and waiter.prefer is not None and waiter.prefer not in self._left:
            own = waiter.prefer if waiter.prefer < (self.total or 0) else None
        if own is not None:
            return own if own in free else None
        return min(free, key=lambda slot: (self._left[slot].turn if slot in self._left else 0, slot), default=None)
