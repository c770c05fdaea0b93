"""The socket file, and the stop in bounded time (SPEC 8, 4.4; CASES 30, 31)."""

import asyncio
import grp
import os
import socket
import stat
from pathlib import Path

import pytest

from loopd.channel import socketfile
from loopd.clock import monotonic_s
from loopd.config import Config, parse_config
from loopd.errors import ChannelError, ConfigError
from loopd.home import Home
from loopd.proto.frames import Open, Say, TurnEndFrame
from loopd.session import reader
from loopd.session.store import Session
from tests.channel.fakes import BASELINE, PATIENCE_S, FakeEngine, RawClient, serving


def test_the_socket_is_for_its_owner_only(root: Path) -> None:
    with socketfile.bind(root / "x.sock", group=""):
        assert stat.S_IMODE((root / "x.sock").stat().st_mode) == 0o600


def test_a_group_may_connect_where_one_is_configured(root: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    with socketfile.bind(root / "x.sock", group=group):
        found = (root / "x.sock").stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, os.getgid())


def test_an_unknown_group_is_a_configuration_error(root: Path) -> None:
    with pytest.raises(ConfigError, match="no group"):
        socketfile.bind(root / "x.sock", group="no-such-group")


def test_a_socket_that_a_crash_left_is_replaced(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(root / "x.sock"))
    with socketfile.bind(root / "x.sock", group=""), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(root / "x.sock"))


def test_a_socket_that_is_listened_on_is_not_taken(root: Path) -> None:
    with (
        socketfile.bind(root / "x.sock", group=""),
        pytest.raises(ChannelError, match="another process listens"),
    ):
        socketfile.bind(root / "x.sock", group="")


def test_a_regular_file_at_the_path_is_kept(root: Path) -> None:
    (root / "x.sock").write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        socketfile.bind(root / "x.sock", group="")
    assert (root / "x.sock").read_text() == "precious"


def test_a_path_that_no_socket_can_have_is_refused(root: Path) -> None:
    path = root / ("x" * 108)
    with pytest.raises(ConfigError, match="107"):
        socketfile.bind(path, group="")


def test_a_directory_that_cannot_be_made_is_one_line(root: Path) -> None:
    (root / "file").write_text("")
    with pytest.raises(ChannelError, match="cannot listen on"):
        socketfile.bind(root / "file" / "x.sock", group="")


def test_only_our_own_socket_file_is_removed(root: Path) -> None:
    path = root / "x.sock"
    path.write_text("another")
    socketfile.unlink(path, path.stat().st_ino + 1)
    assert path.exists()
    socketfile.unlink(path, path.stat().st_ino)
    assert not path.exists()


async def test_the_socket_file_is_gone_after_the_stop(home: Home, config: Config, engine: FakeEngine) -> None:
    async with serving(home, config, engine) as daemon:
        assert daemon.path.is_socket()
    assert not daemon.path.exists()


async def test_a_stop_cancels_turns_and_leaves_good_logs(home: Home, config: Config, engine: FakeEngine) -> None:
    engine.hold("hello")
    async with serving(home, config, engine) as daemon:
        client = RawClient(*await asyncio.open_unix_connection(daemon.path))
        await client.send_bytes(b'{"type":"hello","version":1}\n')
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"))
        await engine.is_held()
        began_s = monotonic_s()
    assert monotonic_s() - began_s < 5
    async with asyncio.timeout(PATIENCE_S):
        while frame := await client.next():
            assert frame.type != "turn_end", "a text without a record is the client's to say again"
    await client.close()
    assert not reader.verify(home, "s").faults
    Session.open(home, "s", limits=config.loop).close()


async def test_a_stop_ends_within_its_time_with_a_client_that_does_not_read_and_a_turn_that_does_not_end(
    home: Home, config: Config, engine: FakeEngine
) -> None:
    async def stubborn(session: Session, text: str, key: str, emit: object, approvals: object) -> TurnEndFrame:
        engine.waiting.release()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()
        raise AssertionError

    engine.run_turn = stubborn  # type: ignore[method-assign]
    short = parse_config(
        {"channel": config.channel.model_dump(), "loop": {"stop_timeout_s": 4.0, "min_free_bytes": 0}}, source="test"
    )
    async with serving(home, short, engine) as daemon:
        client = RawClient(*await asyncio.open_unix_connection(daemon.path))
        await client.send_bytes(b'{"type":"hello","version":1}\n')
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"))
        await engine.is_held()
        await client.send_bytes(b'{"type":"status"}\n' * 5000)
        began_s = monotonic_s()
    assert monotonic_s() - began_s < 4.0
    await client.close()


@pytest.mark.parametrize("what", ["baseline", "admit"])
async def test_a_stop_ends_what_waits_for_the_model_server(
    home: Home, config: Config, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def wait(*_: object) -> None:
        engine.waiting.release()
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, what, wait)
    short = parse_config(
        {"channel": config.channel.model_dump(), "loop": {"stop_timeout_s": 4.0, "min_free_bytes": 0}}, source="test"
    )
    Session.create(home, "old", BASELINE, owner_uid=0, limits=short.loop).close()
    async with serving(home, short, engine) as daemon:
        client = RawClient(*await asyncio.open_unix_connection(daemon.path))
        await client.send_bytes(b'{"type":"hello","version":1}\n{"type":"open","session":"old"}\n')
        await client.until("caught_up")
        await client.send(Say(session="old", text="x", key="k") if what == "admit" else Open(session="s", create=True))
        await engine.is_held()
        began_s = monotonic_s()
    assert monotonic_s() - began_s < 4.0
    await client.close()
    Session.open(home, "old", limits=short.loop).close()


async def test_a_reload_changes_the_limits_of_what_is_opened_next(
    home: Home, config: Config, engine: FakeEngine
) -> None:
    async with serving(home, config, engine) as daemon, daemon.client() as client:
        await client.open("s")
        daemon.server.reconfigure(
            parse_config({"channel": config.channel.model_dump(), "loop": {"max_open_sessions": 1}}, source="test")
        )
        await client.send_bytes(b'{"type":"open","session":"t","create":true}\n')
        assert (await client.until("error"))[-1].type == "error"
