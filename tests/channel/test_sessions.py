"""Which sessions are open, who may remove one, what is refused (SPEC 2.2, 8)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from loopd.channel.live import Peer
from loopd.channel.sessions import Sessions
from loopd.config import Config, parse_config
from loopd.errors import AuditError, NotPermitted, SessionBusy, SessionNotFound
from loopd.home import Home
from loopd.proto.frames import (
    Cancel,
    ClientFrame,
    Compact,
    Delete,
    ErrorFrame,
    Fork,
    List,
    Read,
    RecordFrame,
    Reply,
    Say,
    Status,
    Tools,
    UsageOf,
    Why,
)
from loopd.session.store import Session
from tests.channel.fakes import BASELINE, PATIENCE_S, Daemon, FakeEngine, RawClient, serving

SOMEBODY = Peer(pid=1, uid=4711, gid=4711)


def with_loop(config: Config, **values: object) -> Config:
    return parse_config(
        {"channel": config.channel.model_dump(), "loop": {"min_free_bytes": 0, **values}}, source="test"
    )


async def error_of(client: RawClient, frame: ClientFrame) -> ErrorFrame:
    await client.send(frame)
    error = (await client.until("error"))[-1]
    assert isinstance(error, ErrorFrame)
    return error


async def talk(client: RawClient, session: str, *texts: str) -> None:
    await client.open(session, 0)
    for text in texts:
        await client.send(Say(session=session, text=text, key=f"key of {text}"))
        await client.until("turn_end")


def make(home: Home, config: Config, *ids: str, owner_uid: int = 0) -> None:
    for session_id in ids:
        Session.create(home, session_id, BASELINE, owner_uid=owner_uid, limits=config.loop).close()


def tear(home: Home, session_id: str) -> Path:
    log = home.sessions / session_id / "0.jsonl"
    log.write_bytes(log.read_bytes()[:-5])
    return log


# --- open and close ----------------------------------------------------------------------------------------------


async def test_an_idle_session_is_closed_after_its_time(home: Home, config: Config, engine: FakeEngine) -> None:
    async with serving(home, with_loop(config, close_idle_s=0.01), engine) as daemon:
        async with daemon.client() as client:
            await client.open("s")
            with pytest.raises(SessionBusy):
                Session.open(home, "s", limits=config.loop)
        async with daemon.client() as client, asyncio.timeout(PATIENCE_S):
            while (await client.ask(Status()))["sessions"]["open"]:
                pass
        Session.open(home, "s", limits=config.loop).close()


async def test_the_longest_idle_session_makes_room(home: Home, config: Config, engine: FakeEngine) -> None:
    async with serving(home, with_loop(config, max_open_sessions=2), engine) as daemon, daemon.client() as watcher:
        await watcher.open("watched")
        for session in ("a", "b", "c"):
            async with daemon.client() as client:
                await client.open(session)
                rows = (await client.ask(List()))["sessions"]
                assert {row["session"] for row in rows if row["open"]} == {"watched", session}


async def test_too_many_sessions_in_use_refuse_one_more(home: Home, config: Config, engine: FakeEngine) -> None:
    async with serving(home, with_loop(config, max_open_sessions=1), engine) as daemon, daemon.client() as client:
        await client.open("a")
        await client.send_bytes(b'{"type":"open","session":"b","create":true}\n')
        error = (await client.until("error"))[-1]
        assert isinstance(error, ErrorFrame)
        assert (error.code, error.session) == ("limit_reached", "b")


async def test_one_session_opened_by_many_at_once_is_opened_once(daemon: Daemon) -> None:
    async def join() -> int:
        async with daemon.client() as client:
            await client.open("s")
            return int((await client.ask(Status()))["sessions"]["open"])

    async with asyncio.TaskGroup() as tasks:
        joins = [tasks.create_task(join()) for _ in range(8)]
    assert {task.result() for task in joins} == {1}


async def test_who_opened_made_and_removed_is_audited(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.open("s")
    async with daemon.client() as client:
        await client.open("s")
        await client.ask(Fork(session="s", to="t"))
        await client.ask(Delete(session="t"))
    events = [fact["event"] for fact in daemon.engine.audited]
    assert events == ["session_created", "session_opened", "session_forked", "session_deleted"]
    assert all({"uid", "pid", "session"} <= fact.keys() for fact in daemon.engine.audited)


@pytest.mark.parametrize("frame", [Delete(session="s"), Fork(session="s", to="t")])
async def test_what_cannot_be_audited_is_not_done(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, frame: ClientFrame
) -> None:
    make(daemon.home, daemon.config, "s")

    async def broken(event: str, **facts: Any) -> None:
        raise AuditError("the audit log cannot be written")

    monkeypatch.setattr(daemon.engine, "audit", broken)
    async with daemon.client() as client:
        assert (await error_of(client, frame)).code == "audit"
        assert [row["session"] for row in (await client.ask(List()))["sessions"]] == ["s"]


async def test_a_session_that_became_read_only_is_reopened_by_the_next_say(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one")

        def broken(descriptor: int) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr("os.fdatasync", broken)
            await client.send(Say(session="s", text="two", key="k2"))
            end = (await client.until("turn_end"))[-1]
            assert end.model_dump()["code"] == "session_io"
        await client.send(Say(session="s", text="two", key="k2"))
        frames = await client.until("turn_end")
        assert frames[-1].model_dump()["reason"] == "completed"
        assert [frame.line for frame in frames if isinstance(frame, RecordFrame)] == [6, 7, 8, 9]


# --- refused -----------------------------------------------------------------------------------------------------


async def test_one_refused_session_is_listed_with_its_reason_and_the_rest_is_served(
    home: Home, config: Config, engine: FakeEngine
) -> None:
    make(home, config, "good", "bad")
    log = tear(home, "bad")
    async with serving(home, config, engine) as daemon, daemon.client() as client:
        refused = (await client.ask(Status()))["refused"]
        assert [row["session"] for row in refused] == ["bad"]
        assert refused[0]["reason"].startswith(f"{log}:1: ")
        rows = {row["session"]: row["refused"] for row in (await client.ask(List()))["sessions"]}
        assert rows["good"] is None
        assert str(log) in rows["bad"]
        await client.send_bytes(b'{"type":"open","session":"bad"}\n')
        error = (await client.until("error"))[-1]
        assert isinstance(error, ErrorFrame)
        assert (error.code, error.hint) == ("torn_log", "loopd session verify bad")
        await talk(client, "good", "hello")


async def test_a_session_that_was_mended_meanwhile_is_refused_no_longer(daemon: Daemon) -> None:
    make(daemon.home, daemon.config, "s")
    log = daemon.home.sessions / "s" / "0.jsonl"
    whole = log.read_bytes()
    tear(daemon.home, "s")
    async with daemon.client() as client:
        await client.send_bytes(b'{"type":"open","session":"s"}\n')
        await client.until("error")
        assert (await client.ask(Status()))["refused"]
        log.write_bytes(whole)
        assert (await client.ask(Status()))["refused"] == []
        assert await client.open("s")


async def test_read_gives_a_refused_session_up_to_its_bad_line(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "hello", "again")
        await client.send_bytes(b'{"type":"close","session":"s"}\n')
        await client.until("reply")
        await client.ask(Fork(session="s", to="t"))
        tear(daemon.home, "t")
        await client.send(Read(session="t", ref="r"))
        frames = await client.until("error")
        assert [frame.line for frame in frames if isinstance(frame, RecordFrame)] == list(range(1, 9))
        assert frames[-1].model_dump()["code"] == "torn_log"
        assert {frame.ref for frame in frames} == {"r"}


# --- requests for data ---------------------------------------------------------------------------------------------


async def test_read_gives_the_records_and_the_baseline(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "hello")
        await client.send(Read(session="s", start=3, ref="r"))
        frames = await client.until("reply")
    assert [frame.line for frame in frames if isinstance(frame, RecordFrame)] == [3, 4, 5]
    reply = frames[-1]
    assert isinstance(reply, Reply)
    assert reply.data["baseline"] == BASELINE.model_dump(mode="json")


async def test_list_names_sessions_by_their_first_words(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "What is the capital of France?", "And of Italy?")
        (row,) = (await client.ask(List()))["sessions"]
    assert (row["session"], row["title"]) == ("s", "What is the capital of France?")
    assert (row["open"], row["running"], row["clients"], row["refused"]) == (True, False, 1, None)


async def test_usage_is_the_table_of_the_specification(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one", "two", "three")
        table = await client.ask(UsageOf(session="s"))
    assert table.keys() == {"session", "requests", "total"}
    assert table["total"] == {
        "evaluated": 20,
        "floor": 20,
        "ratio": 1.0,
        "loss": 0,
        "max_loss": 0,
        "left_out": 1,
    }
    row = table["requests"][1]
    assert (row["epoch"], row["line"], row["evaluated"], row["floor"]) == (0, 8, 10, 10)
    assert not {"request_bytes", "request_sha256"} & row.keys()


async def test_why_says_each_request_in_words(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one", "two")
        first, second = (await client.ask(Why(session="s")))["requests"]
    assert "first request" in first["text"]
    assert second["text"] == "14 tokens should have been cached, 14 were: nothing was lost"


async def test_tools_and_status_hold_what_the_engine_says(daemon: Daemon) -> None:
    async with daemon.client() as client:
        assert (await client.ask(Tools()))[0]["port"] == "builtin"
        status = await client.ask(Status())
    assert status["model"]["alias"] == "fake"
    assert status["release"] == "1.2.3"
    assert status["disk"]["low"] is False


async def test_status_answers_while_the_model_server_does_not(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("loopd.channel.answers._ENGINE_S", 0.01)
    monkeypatch.setattr(daemon.engine, "status", wait)
    async with daemon.client() as client:
        status = await client.ask(Status())
    assert status["model"]["state"] == "unknown"
    assert status["sessions"]["total"] == 0


async def test_a_fork_goes_on_from_its_line(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await talk(client, "s", "one", "two")
        assert await client.ask(Fork(session="s", to="t", upto=5)) == {"session": "t", "parent": "s"}
        made = (await client.ask(Fork(session="s")))["session"]
        assert made not in {"s", "t"}
        await talk(client, "t", "three")
        await client.send(Read(session="t"))
        texts = [
            frame.record["text"]
            for frame in await client.until("reply")
            if isinstance(frame, RecordFrame) and frame.record["type"] == "user"
        ]
    assert texts == ["one", "three"]


@pytest.mark.parametrize(
    "frame",
    [
        Read(session="x"),
        UsageOf(session="x"),
        Why(session="x"),
        Fork(session="x"),
        Delete(session="x"),
        Cancel(session="x"),
    ],
)
async def test_what_is_asked_of_no_session_says_so(daemon: Daemon, frame: ClientFrame) -> None:
    async with daemon.client() as client:
        assert (await error_of(client, frame)).code == "session_not_found"


@pytest.mark.parametrize(
    "frame",
    [
        Read(session="../x"),
        UsageOf(session="../x"),
        Why(session="../x"),
        Fork(session="../x"),
        Fork(session="s", to="../x"),
        Delete(session="../x"),
        Cancel(session="../x"),
        Say(session="../x", text="hello", key="k"),
        Compact(session="../x"),
    ],
)
async def test_an_id_that_is_a_path_is_refused_everywhere(daemon: Daemon, frame: ClientFrame) -> None:
    async with daemon.client() as client:
        assert (await error_of(client, frame)).code == "usage"


# --- delete ------------------------------------------------------------------------------------------------------


async def test_delete_removes_the_session_and_tells_who_watches(daemon: Daemon) -> None:
    async with daemon.client() as watcher, daemon.client() as client:
        await watcher.open("s")
        await client.ask(Delete(session="s"))
        gone = await watcher.next()
        assert isinstance(gone, ErrorFrame)
        assert (gone.code, gone.session) == ("session_not_found", "s")
        assert not (daemon.home.sessions / "s").exists()
        assert (await watcher.open("s"))[0].model_dump()["created"]


async def test_a_session_with_a_turn_in_flight_is_not_removed(daemon: Daemon) -> None:
    gate = daemon.engine.hold("hello")
    async with daemon.client() as client:
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"))
        await daemon.engine.is_held()
        assert (await error_of(client, Delete(session="s"))).code == "busy"
        gate.set()
        await client.until("turn_end")


async def test_a_refused_session_can_be_removed(daemon: Daemon) -> None:
    make(daemon.home, daemon.config, "s")
    tear(daemon.home, "s")
    async with daemon.client() as client:
        await client.ask(Delete(session="s"))
        assert (await client.ask(List()))["sessions"] == []


@pytest.mark.parametrize(("uid", "allowed"), [(0, True), (1000, True), (4711, False)])
async def test_only_its_owner_and_root_may_remove_a_session(
    home: Home, config: Config, engine: FakeEngine, uid: int, allowed: bool
) -> None:
    make(home, config, "s", owner_uid=1000)
    async with asyncio.TaskGroup() as tasks:
        sessions = Sessions(home, config.loop, engine, tasks.create_task)
        if allowed:
            await sessions.delete("s", Peer(pid=1, uid=uid, gid=uid))
        else:
            with pytest.raises(NotPermitted, match="belongs to user 1000"):
                await sessions.delete("s", Peer(pid=1, uid=uid, gid=uid))
    assert (home.sessions / "s").exists() is not allowed


async def test_a_session_whose_first_line_is_bad_belongs_to_whose_its_files_are(
    home: Home, config: Config, engine: FakeEngine
) -> None:
    make(home, config, "s", owner_uid=4711)
    tear(home, "s")
    async with asyncio.TaskGroup() as tasks:
        sessions = Sessions(home, config.loop, engine, tasks.create_task)
        if home.path.stat().st_uid != SOMEBODY.uid:
            with pytest.raises(NotPermitted):
                await sessions.delete("s", SOMEBODY)
        with pytest.raises(SessionNotFound):
            await sessions.delete("t", SOMEBODY)


async def test_a_fork_belongs_to_whoever_asked(home: Home, config: Config, engine: FakeEngine) -> None:
    make(home, config, "s", owner_uid=1000)
    async with asyncio.TaskGroup() as tasks:
        sessions = Sessions(home, config.loop, engine, tasks.create_task)
        target = await sessions.fork(Fork(session="s", to="t"), SOMEBODY)
    session = Session.open(home, target, limits=config.loop)
    assert session.start.owner_uid == SOMEBODY.uid
    session.close()
