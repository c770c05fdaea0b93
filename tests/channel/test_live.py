"""Sessions over the channel: history, live stream, keys, cancels (SPEC 8)."""

import pytest

from loopd.errors import DiskLow, ModelChanged, ModelUnavailable
from loopd.proto.frames import (
    Accepted,
    Cancel,
    CaughtUp,
    Delta,
    ErrorFrame,
    Open,
    Opened,
    RecordFrame,
    Say,
    ServerFrame,
    TurnEndFrame,
)
from loopd.session.store import Session
from tests.channel.fakes import BASELINE, Daemon, RawClient, step


def kinds(frames: list[ServerFrame]) -> list[str]:
    return [frame.type for frame in frames]


def lines(frames: list[ServerFrame]) -> list[int]:
    return [frame.line for frame in frames if isinstance(frame, RecordFrame)]


def end_of(frames: list[ServerFrame]) -> TurnEndFrame:
    end = frames[-1]
    assert isinstance(end, TurnEndFrame)
    return end


async def say(client: RawClient, text: str, key: str, session: str = "s") -> list[ServerFrame]:
    await client.send(Say(session=session, text=text, key=key, ref=f"ref-{key}"))
    return await client.until("turn_end")


async def refused(client: RawClient, text: str, key: str) -> ErrorFrame:
    await client.send(Say(session="s", text=text, key=key, ref="r"))
    error = (await client.until("error"))[-1]
    assert isinstance(error, ErrorFrame)
    assert (error.session, error.ref) == ("s", "r")
    return error


async def test_a_turn_is_accepted_streamed_recorded_and_ended(daemon: Daemon) -> None:
    async with daemon.client() as client:
        opened, *_, caught_up = await client.open("s")
        assert isinstance(opened, Opened)
        assert (opened.created, opened.running, opened.lines) == (True, False, 1)
        assert isinstance(caught_up, CaughtUp)
        assert caught_up.line == 1
        frames = await say(client, "hello", "k1")
    assert kinds(frames) == [
        "accepted", "prefill", "delta", "delta", "record", "record", "record", "usage", "record", "turn_end",
    ]  # fmt: skip
    assert frames[0] == Accepted(session="s", key="k1", text="hello", ref="ref-k1")
    assert lines(frames) == [2, 3, 4, 5]
    assert end_of(frames) == TurnEndFrame(session="s", key="k1", reason="completed", recorded=True, ref="ref-k1")


async def test_history_is_sent_from_the_record_that_was_asked_for(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.open("s")
        await say(client, "hello", "k1")
        await say(client, "again", "k2")
    for start, expected in ((1, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (6, [6, 7, 8, 9]), (0, []), (10, [])):
        async with daemon.client() as client:
            assert lines(await client.open("s", start)) == expected


async def test_long_history_comes_in_order_and_whole(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.open("s", 0)
        for number in range(40):
            await say(client, f"text {number}", f"k{number}")
        history = await client.open("s", 1)
    assert lines(history) == list(range(1, 162))


async def test_an_unknown_session_is_not_made_unless_asked(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.send(Open(session="nope", ref="r"))
        error = (await client.until("error"))[-1]
        assert isinstance(error, ErrorFrame)
        assert (error.code, error.ref, error.session) == ("session_not_found", "r", "nope")
        await client.send(Open())
        opened = (await client.until("opened"))[-1]
        assert isinstance(opened, Opened)
        assert opened.created


async def test_an_id_that_is_a_path_is_refused(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.send(Open(session="../../etc", create=True))
        error = (await client.until("error"))[-1]
        assert isinstance(error, ErrorFrame)
        assert error.code == "usage"


async def test_a_client_that_joins_in_mid_step_gets_the_text_so_far(daemon: Daemon) -> None:
    gate = daemon.engine.hold("hello")
    async with daemon.client() as first, daemon.client() as second:
        await first.open("s")
        await first.send(Say(session="s", text="hello", key="k"))
        await daemon.engine.is_held()
        history = await second.open("s")
        assert isinstance(history[0], Opened)
        assert history[0].running
        gate.set()
        joined = await second.until("turn_end")
        seen = await first.until("turn_end")
    assert joined[0] == Accepted(session="s", key="k", text="hello")
    assert "".join(frame.text for frame in joined if isinstance(frame, Delta)) == "HELLO"
    assert lines(joined) == lines(seen) == [2, 3, 4, 5]


async def test_a_client_that_leaves_changes_nothing(daemon: Daemon) -> None:
    gate = daemon.engine.hold("hello")
    async with daemon.client() as watcher:
        await watcher.open("s")
        async with daemon.client() as leaver:
            await leaver.open("s")
            await leaver.send(Say(session="s", text="hello", key="k"))
            await daemon.engine.is_held()
        gate.set()
        assert end_of(await watcher.until("turn_end")).reason == "completed"


async def test_a_second_turn_is_busy_while_one_is_in_flight(daemon: Daemon) -> None:
    gate = daemon.engine.hold("hello")
    async with daemon.client() as client:
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"))
        await daemon.engine.is_held()
        error = await refused(client, "other", "k2")
        assert error.code == "busy"
        assert "bxctl cancel s" in error.hint
        gate.set()
        await client.until("turn_end")
    assert daemon.engine.ran == ["hello"]


async def test_many_sessions_run_at_once_on_one_connection(daemon: Daemon) -> None:
    gate = daemon.engine.hold("hello")
    async with daemon.client() as client:
        await client.open("s")
        await client.open("t")
        await client.send(Say(session="s", text="hello", key="k"))
        await daemon.engine.is_held()
        assert end_of(await say(client, "there", "k", session="t")).session == "t"
        gate.set()
        assert end_of(await client.until("turn_end")).session == "s"


# --- keys -------------------------------------------------------------------------------------------------------


async def test_a_key_in_flight_attaches(daemon: Daemon) -> None:
    gate = daemon.engine.hold("hello")
    async with daemon.client() as first, daemon.client() as second:
        await first.open("s")
        await first.send(Say(session="s", text="hello", key="k"))
        await daemon.engine.is_held()
        await second.open("s")
        await second.send(Say(session="s", text="hello", key="k", ref="again"))
        await second.until("accepted")
        accepted = (await second.until("accepted"))[-1]
        assert accepted.ref == "again"
        gate.set()
        assert end_of(await second.until("turn_end")).ref == "again"
    assert daemon.engine.ran == ["hello"]


async def test_a_recorded_turn_is_sent_again_with_its_end(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.open("s")
        await say(client, "hello", "k")
        await say(client, "other", "k2")
    async with daemon.client() as client:
        await client.open("s", 0)
        again = await say(client, "hello", "k")
    assert lines(again) == [2, 3, 4, 5]
    assert end_of(again) == TurnEndFrame(session="s", key="k", reason="completed", recorded=True, ref="ref-k")
    assert daemon.engine.ran == ["hello", "other"]


@pytest.mark.parametrize("in_flight", [True, False])
async def test_a_key_with_another_text_is_reused(daemon: Daemon, in_flight: bool) -> None:
    gate = daemon.engine.hold("hello")
    async with daemon.client() as client:
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"))
        await daemon.engine.is_held()
        if not in_flight:
            gate.set()
            await client.until("turn_end")
        assert (await refused(client, "other", "k")).code == "key_reused"
        gate.set()


async def leave_unended(daemon: Daemon) -> None:
    """Write what a crash between a step and the turn's end leaves."""
    session = Session.create(daemon.home, "s", BASELINE, owner_uid=0, limits=daemon.config.loop)
    session.append(*step(session, "hello", "k", "HELLO"))
    session.close()


async def test_a_turn_without_its_end_is_ended_and_sent_and_nothing_runs(daemon: Daemon) -> None:
    await leave_unended(daemon)
    async with daemon.client() as client:
        await client.open("s", 0)
        frames = await say(client, "hello", "k")
    assert end_of(frames).reason == "interrupted"
    assert end_of(frames).recorded
    assert daemon.engine.ran == []


async def test_a_turn_without_its_end_is_ended_before_another_key_runs(daemon: Daemon) -> None:
    await leave_unended(daemon)
    async with daemon.client() as client:
        await client.open("s")
        frames = await say(client, "next", "k2")
    assert lines(frames) == [5, 6, 7, 8, 9]
    first = frames[0]
    assert isinstance(first, RecordFrame)
    assert first.record["reason"] == "interrupted"
    assert end_of(frames).reason == "completed"


# --- ends that are not completed ----------------------------------------------------------------------------------


async def test_a_cancel_gives_the_text_back_and_the_key_may_run_again(daemon: Daemon) -> None:
    gate = daemon.engine.hold("hello")
    async with daemon.client() as client:
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"))
        await daemon.engine.is_held()
        assert await client.ask(Cancel(session="s")) == {"cancelled": True}
        end = end_of(await client.until("turn_end"))
        assert (end.reason, end.recorded, end.text) == ("cancelled", False, "hello")
        assert await client.ask(Cancel(session="s")) == {"cancelled": False}
        gate.set()
        assert end_of(await say(client, "hello", "k")).reason == "completed"


async def test_a_cancel_right_behind_the_say_ends_the_turn(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"), Cancel(session="s"))
        end = end_of(await client.until("turn_end"))
        assert (end.reason, end.recorded, end.text) == ("cancelled", False, "hello")
        assert end_of(await say(client, "hello", "k")).reason == "completed"


@pytest.mark.parametrize(
    ("failure", "reason", "code"),
    [
        (ModelUnavailable("no server at unix:/x", hint="loopd model serve"), "model_error", "model_unavailable"),
        (ValueError("a fault of ours"), "interrupted", "internal"),
    ],
)
async def test_a_turn_that_fails_ends_with_the_reason_and_the_text(
    daemon: Daemon, failure: Exception, reason: str, code: str
) -> None:
    daemon.engine.failure = failure
    async with daemon.client() as client:
        await client.open("s")
        end = end_of(await say(client, "hello", "k"))
        assert (end.reason, end.code, end.recorded, end.text) == (reason, code, False, "hello")
        daemon.engine.failure = None
        assert end_of(await say(client, "hello", "k")).reason == "completed"


async def test_a_turn_that_is_not_admitted_is_an_error_and_was_not_accepted(daemon: Daemon) -> None:
    daemon.engine.refusal = ModelChanged("the model is another", hint="bxctl fork s --new-baseline")
    async with daemon.client() as client:
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"))
        error = await client.next()
        assert isinstance(error, ErrorFrame)
        assert (error.code, error.hint) == ("model_changed", "bxctl fork s --new-baseline")


async def test_a_turn_that_is_not_admitted_leaves_recorded_keys_answerable(daemon: Daemon) -> None:
    async with daemon.client() as client:
        await client.open("s")
        await say(client, "hello", "k")
        daemon.engine.refusal = DiskLow("3 bytes are free")
        assert (await refused(client, "more", "k2")).code == "disk_low"
        assert end_of(await say(client, "hello", "k")).recorded
        daemon.engine.refusal = None
        assert end_of(await say(client, "more", "k2")).reason == "completed"


async def test_a_say_to_a_session_that_is_not_open_here_is_refused(daemon: Daemon) -> None:
    async with daemon.client() as client:
        assert (await refused(client, "hello", "k")).code == "frame_invalid"


async def test_a_record_that_was_durable_when_the_turn_was_cancelled_is_shown(daemon: Daemon) -> None:
    """The cancel comes behind the append and before its frames."""

    async def run_turn(session: Session, text: str, key: str, emit: object, approvals: object) -> TurnEndFrame:
        session.append(*step(session, text, key, "HELLO"))
        daemon.engine.waiting.release()
        await daemon.engine.hold(text).wait()
        raise AssertionError

    daemon.engine.run_turn = run_turn  # type: ignore[method-assign]
    async with daemon.client() as client:
        await client.open("s")
        await client.send(Say(session="s", text="hello", key="k"))
        await daemon.engine.is_held()
        await client.send(Cancel(session="s"))
        frames = await client.until("turn_end")
    assert lines(frames) == [2, 3, 4]
    assert (end_of(frames).reason, end_of(frames).recorded, end_of(frames).text) == ("cancelled", True, None)
