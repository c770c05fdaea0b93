"""The client's side: who is there, and what it answers (SPEC 8, 9)."""

import os
import socket
from pathlib import Path

import pytest

from loopd.channel.client import ChannelClient
from loopd.config import Config, parse_config
from loopd.errors import ConfigError, DaemonError, DaemonUnreachable
from loopd.home import Home
from loopd.proto.frames import (
    Read,
    Status,
)
from tests.channel.fakes import Daemon, FakeEngine, serving


async def test_connect_greets_and_tells_who_is_there(daemon: Daemon) -> None:
    client, welcome = await ChannelClient.connect(daemon.path)
    assert (welcome.release, welcome.uid) == ("1.2.3", os.getuid())
    await client.close()


async def test_nobody_there_says_what_to_start(root: Path) -> None:
    with pytest.raises(DaemonUnreachable, match=str(root)) as caught:
        await ChannelClient.connect(root / "nobody.sock")
    assert caught.value.hint == "start it: loopd serve"
    assert caught.value.exit_code == 3


async def test_a_socket_that_a_crash_left_is_nobody_there(root: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(root / "x.sock"))
    with pytest.raises(DaemonUnreachable):
        await ChannelClient.connect(root / "x.sock")


async def test_a_daemon_that_does_not_answer_is_given_up(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopd.channel.client._GREETING_S", 0.05)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(root / "x.sock"))
        stopped.listen()
        with pytest.raises(DaemonUnreachable, match="does not answer"):
            await ChannelClient.connect(root / "x.sock")


async def test_a_path_that_no_socket_can_have_is_a_configuration_error(root: Path) -> None:
    with pytest.raises(ConfigError):
        await ChannelClient.connect(root / ("x" * 108))


async def test_ask_gives_the_data_or_raises_the_daemons_error(daemon: Daemon) -> None:
    client, _ = await ChannelClient.connect(daemon.path)
    assert (await client.ask(Status()))["release"] == "1.2.3"
    with pytest.raises(DaemonError, match="no session x") as caught:
        await client.ask(Read(session="x"))
    assert (caught.value.code, caught.value.exit_code) == ("session_not_found", 1)
    await client.close()


async def test_a_daemon_full_of_clients_is_told_as_its_error(home: Home, config: Config, engine: FakeEngine) -> None:
    full = parse_config({"channel": config.channel.model_dump() | {"max_clients": 1}}, source="test")
    async with serving(home, full, engine) as daemon, daemon.client():
        with pytest.raises(DaemonError, match="max_clients"):
            await ChannelClient.connect(daemon.path)
