"""A conversation over more than one connection (SPEC 8, 9; CASES 18)."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from loopd.channel.conversation import Conversation
from loopd.config import Config
from loopd.errors import DaemonError, DaemonUnreachable
from loopd.home import Home
from loopd.proto.frames import (
    CaughtUp,
    ErrorFrame,
    Opened,
    RecordFrame,
    ServerFrame,
    TurnEndFrame,
    Welcome,
)
from tests.channel.fakes import PATIENCE_S, FakeEngine, serving


async def until(frames: AsyncIterator[ServerFrame], kind: type[ServerFrame]) -> list[ServerFrame]:
    seen: list[ServerFrame] = []
    async with asyncio.timeout(PATIENCE_S):
        async for frame in frames:
            seen.append(frame)
            if isinstance(frame, kind):
                break
    return seen


async def test_a_conversation_that_is_cut_goes_on_and_runs_nothing_twice(
    home: Home, config: Config, engine: FakeEngine
) -> None:
    """The daemon ends in mid-step: nothing is recorded, and the text runs once when it is back."""
    engine.hold("hello")
    lost = asyncio.Event()
    conversation = Conversation(Path(config.channel.socket), "s", reconnect_s=PATIENCE_S, on_lost=lost.set)
    async with aclosing(conversation), aclosing(conversation.frames()) as frames:
        async with serving(home, config, engine):
            seen = await until(frames, CaughtUp)
            assert isinstance(seen[0], Welcome)
            assert isinstance(seen[1], Opened)
            await conversation.say("hello", "k")
            await engine.is_held()
        engine.gates.clear()
        async with serving(home, config, engine):
            again = await until(frames, TurnEndFrame)
    assert lost.is_set()
    assert engine.ran == ["hello", "hello"]
    assert [frame.line for frame in again if isinstance(frame, RecordFrame)] == [2, 3, 4, 5]
    assert isinstance(again[-1], TurnEndFrame)
    assert again[-1].reason == "completed"


async def test_a_turn_whose_end_was_not_seen_is_sent_again_and_not_run(
    home: Home, config: Config, engine: FakeEngine
) -> None:
    gate = engine.hold("hello")
    conversation = Conversation(Path(config.channel.socket), "s", reconnect_s=PATIENCE_S)
    async with (
        aclosing(conversation),
        aclosing(conversation.frames()) as frames,
        serving(home, config, engine) as daemon,
    ):
        await until(frames, CaughtUp)
        await conversation.say("hello", "k")
        await engine.is_held()
        async with daemon.client() as other:
            await other.open("s")
            for connection in list(daemon.server._connections):
                if connection._peer.pid == os.getpid() and connection._watched:
                    connection.abort()
                    break
            gate.set()
            again = await until(frames, TurnEndFrame)
    assert engine.ran == ["hello"]
    assert isinstance(again[-1], TurnEndFrame)
    assert (again[-1].reason, again[-1].recorded) == ("completed", True)


async def test_a_daemon_that_does_not_come_back_is_given_up(home: Home, config: Config, engine: FakeEngine) -> None:
    conversation = Conversation(Path(config.channel.socket), "s", reconnect_s=0.2)
    async with aclosing(conversation), aclosing(conversation.frames()) as frames:
        async with serving(home, config, engine):
            await until(frames, CaughtUp)
        with pytest.raises(DaemonUnreachable):
            await until(frames, TurnEndFrame)


async def test_a_text_that_was_refused_is_not_said_again(home: Home, config: Config, engine: FakeEngine) -> None:
    conversation = Conversation(Path(config.channel.socket), "s", reconnect_s=PATIENCE_S)
    async with aclosing(conversation), aclosing(conversation.frames()) as frames:
        engine.refusal = DaemonError("disk_low", "full")
        async with serving(home, config, engine):
            await until(frames, CaughtUp)
            await conversation.say("hello", "k")
            error = (await until(frames, ErrorFrame))[-1]
            assert isinstance(error, ErrorFrame)
            assert (error.code, error.ref) == ("disk_low", "k")
        engine.refusal = None
        async with serving(home, config, engine):
            await until(frames, CaughtUp)
    assert engine.ran == []
