"""Greeting, bad frames, slow readers (SPEC 8, CASES 29)."""

import asyncio
import os

import pytest

from loopd.config import Config, parse_config
from loopd.home import Home
from loopd.proto.frames import (
    Close,
    Delta,
    ErrorFrame,
    Hello,
    Open,
    Opened,
    Say,
    ServerFrame,
    Status,
    Tools,
    TurnEndFrame,
    Welcome,
)
from loopd.session.store import Session
from tests.channel.fakes import PATIENCE_S, Daemon, FakeEngine, serving


def code_of(frame: ServerFrame | None) -> str:
    assert isinstance(frame, ErrorFrame), frame
    return frame.code


def with_channel(config: Config, **values: object) -> Config:
    return parse_config(
        config.model_dump(exclude={"channel", "tools"}) | {"channel": {"socket": config.channel.socket, **values}},
        source="test",
    )


async def test_hello_is_answered_with_version_release_and_uid(daemon: Daemon) -> None:
    async with daemon.bare() as client:
        await client.send(Hello(version=1, ref="h"))
        assert await client.next() == Welcome(version=1, release="1.2.3", uid=os.getuid(), ref="h")


async def test_another_version_is_told_so_and_the_connection_closed(daemon: Daemon) -> None:
    async with daemon.bare() as client:
        await client.send(Hello(version=99))
        assert code_of(await client.next()) == "version_mismatch"
        assert await client.next() is None


@pytest.mark.parametrize("first", [b'{"type":"status"}\n', b"garbage\n", b"x" * 2_000_000 + b"\n"])
async def test_anything_but_hello_first_ends_the_connection(daemon: Daemon, first: bytes) -> None:
    async with daemon.bare() as client:
        await client.send_bytes(first)
        assert code_of(await client.next()) in {"frame_invalid", "frame_too_large"}
        assert await client.next() is None


async def test_a_client_that_never_greets_is_closed(home: Home, config: Config, engine: FakeEngine) -> None:
    async with serving(home, with_channel(config, hello_timeout_s=0.05), engine) as daemon, daemon.bare() as client:
        await client.send_bytes(b'{"type":"hel')
        assert code_of(await client.next()) == "frame_invalid"
        assert await client.next() is None


async def test_the_connection_lives_on_after_bad_frames(daemon: Daemon) -> None:
    async with daemon.client() as client:
        for bad, code in (
            (b"x" * (2 * 1024 * 1024) + b"\n", "frame_too_large"),
            (b"\xff\xfe\n", "frame_invalid"),
            (b'{"type":"fly"}\n', "frame_invalid"),
            (b'{"type":"hello","version":1}\n', "frame_invalid"),
            (b'{"type":"say","session":"s","text":"x","key":"' + b"k" * 200 + b'"}\n', "frame_invalid"),
        ):
            await client.send_bytes(bad)
            assert code_of(await client.next()) == code
        await client.send_bytes(b'{"type":"sta')
        await client.send_bytes(b'tus"}\n')
        assert (await client.until("reply"))[-1].type == "reply"


async def test_an_error_carries_the_ref_of_its_request(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.send_bytes(b'{"type":"fly","ref":"7"}\n')
        error = await client.next()
        assert isinstance(error, ErrorFrame)
        assert error.ref == "7"


async def test_half_a_frame_disturbs_nobody(daemon: Daemon) -> None:
    async with daemon.client() as stuck, daemon.client() as client:
        await stuck.send_bytes(b'{"type":"open","session":"s"')
        assert (await client.ask(Status()))["clients"] == 2


async def test_a_client_too_many_is_told_so(home: Home, config: Config, engine: FakeEngine) -> None:
    async with serving(home, with_channel(config, max_clients=1), engine) as daemon, daemon.client() as first:
        async with daemon.bare() as second:
            assert code_of(await second.next()) == "limit_reached"
            assert await second.next() is None
        assert await first.ask(Tools())


async def test_a_place_is_free_again_when_a_client_has_left(home: Home, config: Config, engine: FakeEngine) -> None:
    async with serving(home, with_channel(config, max_clients=1), engine) as daemon:
        async with daemon.client():
            pass
        async with asyncio.timeout(PATIENCE_S):
            while True:
                async with daemon.bare() as client:
                    await client.send(Hello(version=1))
                    if isinstance(await client.next(), Welcome):
                        break


async def test_a_client_that_stops_reading_is_dropped_and_blocks_nobody(
    home: Home, config: Config, engine: FakeEngine
) -> None:
    flooded = asyncio.Event()

    async def flood(session: Session, text: str, key: str, emit: object, approvals: object) -> TurnEndFrame:
        assert callable(emit)
        for _ in range(200):
            emit(Delta(session=session.id, text="x" * 10_000))
            await asyncio.sleep(0)
        flooded.set()
        return TurnEndFrame(session=session.id, key=key, reason="completed", recorded=False, text=text)

    engine.run_turn = flood  # type: ignore[method-assign]
    async with (
        serving(home, with_channel(config, client_buffer_bytes=65_536), engine) as daemon,
        daemon.client() as slow,
        daemon.client() as quick,
    ):
        await slow.open("s")
        await quick.open("s")
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(quick.until("turn_end"))
            await quick.send(Say(session="s", text="go", key="k"))
            await asyncio.wait_for(flooded.wait(), PATIENCE_S)
        assert sum(frame.type == "delta" for frame in reading.result()) == 200
        seen = await slow.until("error")
        assert code_of(seen[-1]) == "slow_consumer"
        assert await slow.next() is None


async def test_history_waits_for_a_client_that_does_not_read(daemon: Daemon) -> None:
    """Far more history than any buffer holds comes whole, however late it is read."""
    answer = "y" * 40_000
    async with daemon.client() as writer:
        await writer.open("s", 0)
        for number in range(60):
            await writer.send(Say(session="s", text=answer, key=f"k{number}"))
            await writer.until("turn_end")
    async with daemon.client() as late, daemon.client() as other:
        await late.send(Open(session="s"))
        assert (await other.ask(Status()))["sessions"]["open"] == 1
        history = await late.until("caught_up")
    assert sum(frame.type == "record" for frame in history) == 1 + 60 * 4


async def test_close_detaches(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.open("s")
        await client.ask(Close(session="s"))
        await client.send(Say(session="s", text="x", key="k"))
        assert code_of((await client.until("error"))[-1]) == "frame_invalid"


async def test_opening_twice_on_one_connection_sends_the_history_again(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.open("s")
        opened = (await client.open("s"))[0]
        assert isinstance(opened, Opened)
        assert not opened.created


async def test_an_internal_error_is_answered_and_the_connection_lives_on(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: str) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr(daemon.engine, "tools", fail)
    async with daemon.client() as client:
        await client.send(Tools(ref="t"))
        error = await client.next()
        assert isinstance(error, ErrorFrame)
        assert (error.code, error.ref) == ("internal", "t")
        assert await client.ask(Status())
