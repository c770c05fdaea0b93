"""Compaction on the channel: who may, what watchers see, and what a key or a place of an earlier epoch means."""

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from loopd.channel.conversation import Conversation
from loopd.channel.live import LiveSession, Peer
from loopd.config import Config
from loopd.errors import NotCompacted, NotPermitted
from loopd.home import Home
from loopd.proto.frames import (
    Cancel,
    CaughtUp,
    Compact,
    Delete,
    ErrorFrame,
    Fork,
    Open,
    Opened,
    Read,
    RecordFrame,
    Reply,
    Say,
    ServerFrame,
    TurnEndFrame,
)
from loopd.session.store import Session
from tests.channel.fakes import BASELINE, PATIENCE_S, QUESTION, Daemon, FakeEngine, RawClient, serving
from tests.channel.test_conversation import until
from tests.channel.test_sessions import error_of, talk


def places(frames: list[ServerFrame]) -> list[tuple[int, int]]:
    return [(frame.epoch, frame.line) for frame in frames if isinstance(frame, RecordFrame)]


async def compact(client: RawClient, session: str = "s") -> dict[str, Any]:
    reply: dict[str, Any] = await client.ask(Compact(session=session))
    return reply


async def say_again(client: RawClient, text: str, session: str = "s") -> list[ServerFrame]:
    await client.send(Say(session=session, text=text, key=f"key of {text}", ref="again"))
    return await client.until("turn_end")


async def test_the_cost_is_told_and_nothing_is_done(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one")
        cost = await client.ask(Compact(session="s", estimate=True))
        assert (cost["epoch"], cost["summary_tokens"]) == (0, 512)
        assert places(await client.open("s", 1))[-1] == (0, 5)


async def test_every_watcher_sees_the_new_epoch_begin_and_the_next_turn_in_it(daemon: Daemon) -> None:
    async with daemon.client() as client, daemon.client() as watcher:
        await talk(client, "s", "one")
        await watcher.open("s", 0)
        assert (await compact(client))["epoch"] == 1
        await say_again(client, "two")
        seen = await watcher.until("turn_end")
    assert [frame.type for frame in seen][:2] == ["compacting", "record"]
    assert places(seen) == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]


async def test_a_session_must_be_open_and_ones_own(daemon: Daemon, engine: FakeEngine, home: Home) -> None:
    async with daemon.client() as client:
        assert (await error_of(client, Compact(session="s"))).code == "frame_invalid"
    session = Session.create(home, "theirs", BASELINE, owner_uid=4711, limits=daemon.config.loop)
    async with asyncio.TaskGroup() as tasks:
        live = LiveSession(session, engine, lambda it: it, tasks.create_task, lambda _live: None)
        watcher = Watcher()
        for estimate in (True, False):
            with pytest.raises(NotPermitted, match="belongs to user 4711, and this is user 4712"):
                await live.compact(watcher, Compact(session="theirs", estimate=estimate), Peer(1, 4712, 4712))
        await live.compact(watcher, Compact(session="theirs"), Peer(1, 4711, 4711))
        assert live.task is not None
        await live.task
        assert session.epoch == 1
    session.close()


class Watcher:
    can_approve = False

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def send(self, line: bytes) -> None:
        self.lines.append(line)

    async def deliver(self, line: bytes) -> None:
        self.lines.append(line)


async def test_nothing_else_runs_meanwhile_and_a_cancel_changes_nothing(daemon: Daemon) -> None:
    daemon.engine.hold(QUESTION)
    async with daemon.client() as client, daemon.client() as other:
        await talk(client, "s", "one")
        await talk(other, "s")
        await client.send(Compact(session="s", ref="c"))
        await daemon.engine.is_held()
        for frame in (Say(session="s", text="two", key="k2"), Compact(session="s"), Delete(session="s")):
            error = await error_of(other, frame)
            assert (error.code, "compaction in flight" in error.message) == ("busy", True)
        assert await other.ask(Cancel(session="s")) == {"cancelled": True}
        cancelled = (await client.until("error"))[-1]
        assert isinstance(cancelled, ErrorFrame)
        assert (cancelled.code, cancelled.ref) == ("cancelled", "c")
        assert places(await say_again(client, "two")) == [(0, 6), (0, 7), (0, 8), (0, 9)]


async def test_a_turn_in_flight_is_not_disturbed(daemon: Daemon) -> None:
    gate = daemon.engine.hold("hello")
    async with daemon.client() as client:
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"))
        await daemon.engine.is_held()
        assert (await error_of(client, Compact(session="s"))).code == "busy"
        gate.set()
        await client.until("turn_end")


async def test_a_failure_is_answered_and_the_epoch_goes_on(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one")
        daemon.engine.failure = NotCompacted("the model wrote nothing", hint="again")
        for estimate in (True, False):
            error = await error_of(client, Compact(session="s", estimate=estimate, ref="c"))
            assert (error.code, error.hint, error.ref) == ("not_compacted", "again", "c")
        daemon.engine.failure = None
        assert places(await say_again(client, "two"))[0] == (0, 6)


async def test_it_goes_on_without_the_client_that_asked(daemon: Daemon) -> None:
    gate = daemon.engine.hold(QUESTION)
    async with daemon.client() as watcher:
        await talk(watcher, "s", "one")
        async with daemon.client() as leaver:
            await leaver.open("s", 0)
            await leaver.send(Compact(session="s"))
            await daemon.engine.is_held()
        gate.set()
        assert places(await watcher.until("record")) == [(1, 1)]


async def test_a_key_of_an_earlier_epoch_is_answered_from_its_records(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one", "two")
        await compact(client)
        await talk(client, "s", "three")
        await compact(client)
        again = await say_again(client, "two")
        assert places(again) == [(0, 6), (0, 7), (0, 8), (0, 9)]
        assert again[-1] == TurnEndFrame(session="s", key="key of two", reason="completed", recorded=True, ref="again")
        assert places(await say_again(client, "three")) == [(1, 2), (1, 3), (1, 4), (1, 5)]
        assert (await error_of(client, Say(session="s", text="other", key="key of one"))).code == "key_reused"
    assert daemon.engine.ran == ["one", "two", "three"]


async def test_a_fork_does_not_run_a_key_whose_turn_only_its_parent_has(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one")
        await compact(client)
        await client.ask(Fork(session="s", to="t"))
        await client.open("t", 0)
        error = await error_of(client, Say(session="t", text="one", key="key of one"))
        assert (error.code, "before session t was forked" in error.message) == ("key_reused", True)
    assert daemon.engine.ran == ["one"]


async def test_a_client_that_was_away_gets_the_rest_of_the_old_epoch_and_the_new_one(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one")
        await compact(client)
        await talk(client, "s", "two")
        await client.send(Open(session="s", start=4, epoch=0))
        seen = await client.until("caught_up")
        assert places(seen) == [(0, 4), (0, 5), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
        assert isinstance(seen[0], Opened)
        assert (seen[0].epoch, seen[0].lines) == (1, 5)
        await client.send(Open(session="s", start=99, epoch=0))
        assert places(await client.until("caught_up")) == [(1, line) for line in range(1, 6)]
        await client.send(Open(session="s", start=2, epoch=7))
        assert places(await client.until("caught_up")) == [(1, line) for line in range(2, 6)]


async def test_a_conversation_that_is_cut_goes_on_over_the_end_of_its_epoch(
    home: Home, config: Config, engine: FakeEngine
) -> None:
    conversation = Conversation(Path(config.channel.socket), "s", reconnect_s=PATIENCE_S)
    async with aclosing(conversation), aclosing(conversation.frames()) as frames:
        async with serving(home, config, engine):
            await until(frames, CaughtUp)
            await conversation.say("one", "k1")
            await until(frames, TurnEndFrame)
        async with serving(home, config, engine) as daemon, daemon.client() as other:
            await until(frames, CaughtUp)
            await other.open("s", 0)
            await compact(other)
            await conversation.say("two", "k2")
            assert places(await until(frames, TurnEndFrame)) == [(1, line) for line in range(1, 6)]
        async with serving(home, config, engine) as daemon, daemon.client() as other:
            seen = await until(frames, CaughtUp)
            assert places(seen) == []


@pytest.mark.parametrize(
    ("wanted", "start", "expected"),
    [
        ("newest", 1, [(1, 1)]),
        ("all", 1, [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 1)]),
        ("all", 4, [(0, 4), (0, 5), (1, 1)]),
        (0, 4, [(0, 4), (0, 5)]),
    ],
)
async def test_any_epoch_is_read(daemon: Daemon, wanted: Any, start: int, expected: list[tuple[int, int]]) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one")
        await compact(client)
        await client.send(Read(session="s", epoch=wanted, start=start))
        seen = await client.until("reply")
        assert places(seen) == expected
        assert isinstance(seen[-1], Reply)
        assert (seen[-1].data["epoch"], seen[-1].data["baseline"]["system_prompt"]) == (expected[-1][0], "Be brief.")


async def test_a_torn_newest_epoch_does_not_hide_the_ones_before(daemon: Daemon, home: Home) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one")
        await compact(client)
    (home.sessions / "t").mkdir()
    for path in (home.sessions / "s").iterdir():
        (home.sessions / "t" / path.name).write_bytes(path.read_bytes() + b'{"half' * (path.name == "1.jsonl"))
    async with daemon.client() as client:
        await client.send(Read(session="t", epoch=0))
        assert len(places(await client.until("reply"))) == 5
        await client.send(Read(session="t", epoch="all"))
        seen = await client.until("error")
        assert places(seen)[-1] == (1, 1)
        assert isinstance(seen[-1], ErrorFrame)
        assert seen[-1].code == "torn_log"
