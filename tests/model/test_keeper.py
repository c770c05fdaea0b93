"""Slots that give way and come back: nothing is lost, and where it must be, the cause is the right one."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from loopd.config import ModelTable
from loopd.model.account import account
from loopd.model.client import ModelClient
from loopd.model.keeper import StateKeeper
from loopd.model.scripted import ScriptedServer
from loopd.model.slots import SlotCondition, SlotPool
from loopd.model.states import Ancestor, History, Mark
from loopd.proto.records import Cause, Usage
from tests.model.conftest import Start
from tests.model.requests import assistant, ignore, left_by, request, usage_of, user
from tests.model.test_account import Baseline
from tests.model.test_states import FIT

PATIENCE_S = 20.0
NEVER_S = 1000.0


@dataclass
class Line:
    """One session, as its log would have it."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    usage: Usage | None = None
    expected: int = 0
    lines: int = 1
    parent: Ancestor | None = None
    fresh: bool = False


@dataclass
class Said:
    slot: int | None
    condition: SlotCondition
    expected: int
    loss: int
    cause: Cause | None


class Desk:
    """A daemon's worth of sessions over one scripted server; `reopen` is a restart of loopd."""

    def __init__(self, server: ScriptedServer, client: ModelClient, **table: Any) -> None:
        self.server, self.client = server, client
        self.table = ModelTable(**{"save_idle_s": NEVER_S, **table})
        self.lines: dict[str, Line] = {}
        self.short_of_disk = ""
        self.reopen()

    def reopen(self) -> None:
        self.pool = SlotPool(self.server.script.slots, self.client)
        self.keeper = StateKeeper(
            Path(self.server.script.states),
            self.client,
            self.pool,
            table=lambda: self.table,
            short_of_disk=lambda _size: self.short_of_disk,
        )
        self.keeper.serve(FIT)

    def fork(self, source: str, target: str) -> None:
        line = self.lines[source]
        parent = Ancestor(source, 0, line.lines, line.expected)
        self.lines[target] = Line([*line.messages], line.usage, line.expected, line.lines, parent, fresh=True)

    async def say(self, session: str, text: str = "", **hold: Any) -> Said:
        line = self.lines.setdefault(session, Line())
        messages = [*line.messages, user(text or f"{session} has more to say")]
        history = History(
            mark=Mark(session=session, epoch=0, line=line.lines, baseline="x"),
            expected=line.expected,
            slot=line.usage.slot if line.usage else None,
            parent=line.parent,
            kin=line.parent.session if line.parent and line.fresh else "",
            **hold,
        )
        self.pool.process = (await self.client.facts()).process
        async with self.keeper.hold(history) as (slot, condition):
            asked = request(*messages, slot=slot)
            done = await self.client.complete(asked, ignore)
        expected, loss, cause = await account(
            self.client, Baseline(), line.usage, asked.messages, done.reported, condition
        )
        usage = usage_of(asked, done).model_copy(update={"expected": expected, "loss": loss, "prefill_ms": 1.0})
        self.keeper.account(usage, condition)
        line.messages, line.usage = [*messages, assistant(done.text)], usage
        line.expected, line.lines, line.fresh = left_by(done), line.lines + 4, False
        assert expected is not None
        assert loss is not None
        return Said(slot, condition, expected, loss, cause)

    async def stop(self, *, within_s: float = PATIENCE_S, hurry: bool = False) -> None:
        told = asyncio.Event()
        if hurry:
            told.set()
        await self.keeper.stop(within_s, told)

    @asynccontextmanager
    async def idling(self) -> AsyncIterator[None]:
        """Let the keeper work while nobody asks."""
        task = asyncio.create_task(self.keeper.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def saved(self, count: int) -> None:
        """Wait until so many states are on disk."""
        await self.until(lambda: self.states()["count"] >= count)

    async def written_down(self) -> None:
        """Wait until the ledger has how the last request left its slot."""
        task = max(slot.task or 0 for slot in self.server.slots)
        await self.until(lambda: any(f'"task":{task},' in path.read_text() for path in self.files("ledger.json")))

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not done():  # noqa: ASYNC110 - files have no event to wait for
                await asyncio.sleep(0)

    def files(self, pattern: str) -> list[Path]:
        return sorted(Path(self.server.script.states).glob(pattern))

    def states(self) -> dict[str, Any]:
        return self.keeper.describe()

    def transfers(self, action: str) -> list[str]:
        return [name for done, _slot, name in self.server.transfers if done == action]


Open = Callable[..., Awaitable[Desk]]


@pytest.fixture
async def desk(start: Start, tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def opened(*steps: dict[str, Any], table: dict[str, Any] | None = None, **script: Any) -> Desk:
            (tmp_path / "slots").mkdir()
            server, client = await start(*steps, **{"states": str(tmp_path / "slots"), **script})
            return Desk(server, client, **(table or {}))

        yield opened
        await stack.aclose()


@pytest.mark.parametrize(("sessions", "slots"), [(2, 1), (8, 1), (2, 2), (8, 2)])
async def test_sessions_that_alternate_lose_nothing(desk: Open, sessions: int, slots: int) -> None:
    it = await desk(slots=slots)
    for _ in range(4):
        for session in "abcdefgh"[:sessions]:
            assert (await it.say(session)).loss == 0
    assert it.states()["restores"] == (0 if sessions <= slots else 3 * sessions)


async def test_a_fork_and_its_parent_alternate_without_loss(desk: Open) -> None:
    it = await desk(slots=2)
    await it.say("a")
    await it.say("a")
    it.fork("a", "f")
    for session in ("f", "a", "f", "a", "a", "f"):
        assert (await it.say(session)).loss == 0


async def test_a_fork_begins_where_its_parent_was_also_when_the_parent_went_on(desk: Open) -> None:
    it = await desk()
    await it.say("a")
    it.fork("a", "f")
    await it.say("a", "a longer one that the fork does not have")
    await it.say("b")
    said = await it.say("f")
    assert (said.loss, said.condition.kind) == (0, "restored")


async def test_a_new_session_on_a_cold_server_starts_from_the_baseline(desk: Open) -> None:
    it = await desk()
    await it.say("a", "hi")
    await it.say("a", "a very much longer text than the first, so that the first is kept for those who come new")
    await it.stop()
    it.server.restart()
    it.reopen()
    said = await it.say("b", "hello")
    assert said.condition.kind == "restored"
    assert it.transfers("restore") == [name for name in it.transfers("restore") if name.startswith("b.")] != []


async def test_a_planned_stop_saves_what_is_in_the_slots_and_nothing_twice(desk: Open) -> None:
    it = await desk(slots=2)
    for session in "abc":
        await it.say(session)
    await it.stop()
    saves = it.transfers("save")
    await it.stop()
    assert it.transfers("save") == saves
    it.server.restart()
    it.reopen()
    for session in "abc":
        assert (await it.say(session)).loss == 0


@pytest.mark.parametrize("how", ["hurry", "no-time"])
async def test_what_a_stop_skips_is_said_with_its_cost(desk: Open, caplog: pytest.LogCaptureFixture, how: str) -> None:
    it = await desk()
    await it.say("a")
    with caplog.at_level("INFO"):
        await it.stop(hurry=how == "hurry", within_s=0 if how == "no-time" else PATIENCE_S)
    assert "not_saved session=a" in caplog.text
    assert "cost_s=0.0" in caplog.text
    assert "skipped=1" in caplog.text


async def test_a_slot_is_saved_when_it_has_been_idle_and_not_before(desk: Open) -> None:
    it = await desk(table={"save_idle_s": 0.001})
    async with it.idling():
        await it.say("a")
        await it.saved(2)
    assert {item["kind"] for item in it.states()["list"]} == {"session", "baseline"}
    it.server.restart()
    said = await it.say("a")
    assert (said.loss, said.condition.kind) == (0, "restored")


async def test_what_an_eviction_left_unsynced_is_synced_in_a_quiet_moment(desk: Open) -> None:
    it = await desk()
    await it.say("a")
    await it.say("b")
    assert [path.read_text().count('"boot": ""') for path in it.files("s.a.*.json")] == [0]
    it.table = ModelTable(save_idle_s=0.001)
    async with it.idling():
        await it.until(lambda: [path.read_text().count('"boot": ""') for path in it.files("s.a.*.json")] == [1])


async def test_nothing_is_saved_while_a_request_is_in_the_slot(desk: Open) -> None:
    it = await desk({"text": "one"}, {"text": "two", "gate": "here"}, table={"save_idle_s": 0.001})
    await it.say("a")
    async with it.idling(), asyncio.TaskGroup() as group:
        turn = group.create_task(it.say("a"))
        await it.server.gate("here").reached.wait()
        busy = len(it.server.transfers)
        for _ in range(200):
            await asyncio.sleep(0)
        assert len(it.server.transfers) == busy
        it.server.gate("here").open()
        await turn
        await it.saved(2)


async def test_a_restart_of_loopd_alone_restores_nothing(desk: Open) -> None:
    it = await desk(slots=2)
    for session in "ab":
        await it.say(session)
    await it.stop()
    it.reopen()
    for session in "ba":
        said = await it.say(session)
        assert (said.loss, said.condition.kind) == (0, "ours")
    assert it.transfers("restore") == []


async def test_a_killed_loopd_finds_what_it_had_saved(desk: Open) -> None:
    it = await desk()
    async with it.idling():
        for session in "abab":
            await it.say(session)
        await it.written_down()
    it.reopen()
    assert [(await it.say(session)).loss for session in "abab"] == [0] * 4


async def test_a_killed_server_is_the_cause_and_what_was_saved_before_is_used(desk: Open) -> None:
    it = await desk()
    await it.say("a")
    await it.stop()
    await it.say("a")
    it.server.restart()
    said = await it.say("a")
    assert said.cause is not None
    assert said.cause.name == "server_restarted"
    assert "not saved" in said.cause.evidence
    assert "a saved state of" in said.cause.evidence
    assert 0 < said.loss < said.expected


@pytest.mark.parametrize("strangers", [1, 3], ids=["looking-just-as-it-was-left", "counting-further"])
async def test_a_restarted_server_that_others_used_since_is_told_from_a_taken_slot(desk: Open, strangers: int) -> None:
    it = await desk()
    await it.say("a")
    it.server.restart()
    for _ in range(strangers):
        await it.client.complete(request(user("z has more to say")), ignore)
    said = await it.say("a")
    assert said.cause is not None
    assert said.cause.name == "server_restarted"
    assert said.loss > 0


@pytest.mark.parametrize("saved", [False, True])
async def test_a_foreign_request_is_the_cause_unless_the_state_was_saved(desk: Open, *, saved: bool) -> None:
    it = await desk()
    await it.say("a")
    if saved:
        await it.stop()
    await it.client.complete(request(user("I am somebody else " * 9)), ignore)
    said = await it.say("a")
    if saved:
        assert (said.loss, said.condition.kind) == (0, "restored")
    else:
        assert said.cause is not None
        assert said.cause.name == "slot_taken"
        assert "another client's task" in said.cause.evidence


async def test_a_foreign_request_before_loopd_is_back_is_seen(desk: Open) -> None:
    it = await desk()
    await it.say("a")
    await it.stop()
    await it.client.complete(request(user("I am somebody else " * 9)), ignore)
    it.reopen()
    said = await it.say("a")
    assert (said.loss, said.condition.kind) == (0, "restored")


@pytest.mark.parametrize("bound", ["day", "disk", "free", "server"])
async def test_a_session_whose_state_could_not_be_saved_is_evicted(desk: Open, bound: str) -> None:
    it = await desk(states="") if bound == "server" else await desk()
    await it.say("a")
    await it.say("b")
    match bound:
        case "day":
            it.table = ModelTable(max_states_day_bytes=0)
        case "disk":
            it.table = ModelTable(max_states_bytes=0)
        case "free":
            it.short_of_disk = "3 bytes are free on the disk"
        case _:
            pass
    await it.say("a")
    said = await it.say("b")
    assert said.cause is not None
    assert said.cause.name == "evicted"
    words = {"day": "max_states_day_bytes", "disk": "max_states_bytes", "free": "3 bytes", "server": "slot-save-path"}
    assert words[bound] in said.cause.evidence
    if bound == "server":
        assert it.states()["state"] == "off"


async def test_a_state_that_was_pruned_is_named_as_evicted(desk: Open) -> None:
    it = await desk()
    for session in "abc":
        await it.say(session)
    it.table = ModelTable(max_states_bytes=max(item["bytes"] for item in it.states()["list"]))
    await it.say("d")
    said = await it.say("a")
    assert said.cause is not None
    assert said.cause.name == "evicted"
    assert "gave way to others" in said.cause.evidence


async def test_disk_use_and_the_day_s_bytes_are_bounded_and_shown(desk: Open) -> None:
    it = await desk()
    await it.say("a")
    await it.say("b")
    one = it.states()["disk_bytes"]
    it.table = ModelTable(max_states_bytes=2 * one + 40, max_states_day_bytes=10 * one)
    for session in "abcdefg" * 3:
        await it.say(session)
        assert it.states()["disk_bytes"] <= it.states()["max_disk_bytes"]
    shown = it.states()
    assert one < shown["written_today_bytes"] <= shown["max_written_today_bytes"]
    assert shown["saved_bytes"] == shown["written_today_bytes"]


@pytest.mark.parametrize("spoil", ["torn", "other-tokens", "deleted"])
async def test_a_state_that_cannot_be_used_is_dropped_and_said(desk: Open, spoil: str) -> None:
    it = await desk()
    await it.say("a")
    await it.say("b")
    (file,) = it.files("s.a.*.bin")
    match spoil:
        case "torn":
            file.write_bytes(b"x" * file.stat().st_size)
        case "other-tokens":
            file.write_text(file.read_text().replace(",", " ", 1))
        case _:
            file.unlink()
    said = await it.say("a")
    assert said.cause is not None
    assert said.cause.name == ("slot_taken" if spoil == "deleted" else "state_not_restored")
    assert "a" not in {item["session"] for item in it.states()["list"] if item["kind"] == "session"}


async def test_a_restored_state_of_no_use_is_noticed_and_given_up(desk: Open) -> None:
    it = await desk(restores=False)
    await it.say("a")
    await it.say("b")
    first = await it.say("a")
    assert first.cause is not None
    assert first.cause.name == "state_not_restored"
    assert "used none of it" in first.cause.evidence
    assert it.states()["state"] == "off"
    restores = len(it.transfers("restore"))
    second = await it.say("b")
    assert second.cause is not None
    assert second.cause.name in {"evicted", "state_not_restored"}
    assert len(it.transfers("restore")) == restores
    await it.stop()
    it.reopen()
    assert it.states()["state"] == "off"
    it.keeper.serve(FIT.model_copy(update={"build": "newer"}))
    assert it.states()["state"] == "on"


async def test_a_model_that_cannot_roll_back_is_noticed(desk: Open) -> None:
    it = await desk({"text": "one"}, {"text": "two"}, {"text": "x", "gate": "here"}, rolls_back=False)
    await it.say("a")
    await it.say("a")
    cancelled = asyncio.create_task(it.say("a", "a question that is taken back"))
    await it.server.gate("here").reached.wait()
    cancelled.cancel()
    await asyncio.wait({cancelled})
    said = await it.say("a", "another one")
    assert said.cause is not None
    assert said.cause.name == "cannot_roll_back"


async def test_a_state_is_not_restored_over_something_newer(desk: Open) -> None:
    it = await desk()
    await it.say("a")
    await it.stop()
    await it.say("a")
    assert (await it.say("a")).condition.kind == "ours"
    assert it.transfers("restore") == []


async def test_states_of_another_build_stay_unused(desk: Open) -> None:
    it = await desk()
    await it.say("a")
    await it.say("b")
    it.keeper.serve(FIT.model_copy(update={"build": "newer"}))
    await it.say("a")
    assert it.transfers("restore") == []


async def test_a_server_that_comes_back_with_another_number_of_slots_gets_the_states(desk: Open) -> None:
    it = await desk(slots=3)
    for session in "abc":
        await it.say(session)
    await it.stop()
    it.server.script = it.server.script.model_copy(update={"slots": 1})
    it.server.restart()
    it.pool.resize(1)
    assert [(await it.say(session)).loss for session in "cab"] == [0] * 3


@pytest.mark.parametrize("fresh", [False, True], ids=["a-used-server", "a-fresh-server"])
async def test_a_state_that_was_restored_for_a_turn_that_sent_nothing_is_not_trusted(
    desk: Open, *, fresh: bool
) -> None:
    it = await desk()
    await it.say("a")
    await it.say("b")
    await it.stop()
    if fresh:
        it.server.restart()
    line = it.lines["a"]
    history = History(Mark(session="a", epoch=0, line=line.lines, baseline="x"), line.expected)
    async with it.keeper.hold(history) as (_, condition):
        assert condition.kind == "restored"
    it.server.restart()
    for session in "ab":
        said = await it.say(session)
        assert (said.loss, said.condition.kind) == (0, "restored")


async def test_an_eviction_that_is_cancelled_changes_nothing(desk: Open) -> None:
    it = await desk({"text": "one"}, {"text": "two", "prefill_gate": "here"})
    await it.say("a")
    turn = asyncio.create_task(it.say("b"))
    await it.server.gate("here").reached.wait()
    turn.cancel()
    await asyncio.wait({turn})
    assert (await it.say("a")).loss == 0
    assert (await it.say("b")).loss == 0


async def test_a_deleted_session_leaves_no_state_behind(desk: Open) -> None:
    it = await desk()
    await it.say("a")
    await it.stop()
    assert it.states()["count"] == 2
    await it.keeper.forget("a")
    assert it.states()["count"] == 0
    assert it.files("*.bin") == []


async def test_a_rebased_fork_names_the_change_of_its_baseline(desk: Open) -> None:
    it = await desk()
    await it.say("a")
    await it.client.complete(request(user("another model's template " * 5)), ignore)
    said = await it.say("a", rebased="forked with another baseline")
    assert said.cause is not None
    assert (said.cause.name, said.cause.evidence) == ("model_changed", "forked with another baseline")
