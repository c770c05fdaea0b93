"""Approval requests over the channel: who is asked, when again, whose answer counts (SPEC 6, 8)."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from loopd.config import Config
from loopd.home import Home
from loopd.proto.frames import (
    ApprovalDecided,
    ApprovalRequest,
    Approve,
    Cancel,
    ErrorFrame,
    List,
    Reply,
    Say,
    ServerFrame,
)
from tests.channel.fakes import QUESTION_FRAME, Daemon, FakeEngine, RawClient, serving
from tests.channel.test_sessions import error_of, make, with_loop

TEXT = "write it"
ONCE = Approve(session="s", call=1, decision="once", ref="a")


@pytest.fixture
async def approver(daemon: Daemon) -> AsyncIterator[RawClient]:
    """A client that can approve, attached to a session whose next turn asks."""
    daemon.engine.ask(TEXT)
    async with daemon.client(can_approve=True) as client:
        await client.open("s")
        yield client


async def ask(client: RawClient) -> ApprovalRequest:
    """Begin the turn that asks, and return its question."""
    await client.send(Say(session="s", text=TEXT, key="k"))
    return await asked(client)


async def asked(client: RawClient) -> ApprovalRequest:
    request = (await client.until("approval_request"))[-1]
    assert isinstance(request, ApprovalRequest)
    return request


async def answer_to(client: RawClient) -> str:
    """Return how the client's request was answered."""
    while not isinstance(frame := await client.next(), Reply | ErrorFrame):
        assert frame is not None
    return frame.type


def decided(frames: list[ServerFrame]) -> ApprovalDecided:
    return next(frame for frame in frames if isinstance(frame, ApprovalDecided))


async def test_one_answers_and_every_client_sees_what_is_decided(daemon: Daemon, approver: RawClient) -> None:
    async with daemon.client(can_approve=True) as other, daemon.client() as bystander:
        await other.open("s")
        await bystander.open("s")
        assert await ask(approver) == await asked(other) == QUESTION_FRAME
        await other.send(ONCE)
        reply = (await other.until("reply"))[-1]
        assert reply == Reply(to="approve", data={"call": 1, "decision": "once"}, ref="a")
        expected = ApprovalDecided(
            session="s",
            call=1,
            name="files.write",
            decision="once",
            uid=os.getuid(),
            reason=f"by user {os.getuid()}",
        )
        for client in (approver, other, bystander):
            frames = await client.until("turn_end")
            assert decided(frames) == expected
            assert not any(isinstance(frame, ApprovalRequest) for frame in frames)
    answer = daemon.engine.answers[0]
    assert (answer.choice, answer.uid, answer.pid) == ("once", os.getuid(), os.getpid())


async def test_only_the_first_of_two_answers_counts(daemon: Daemon, approver: RawClient) -> None:
    async with daemon.client(can_approve=True) as other:
        await other.open("s")
        await ask(approver)
        await approver.send(ONCE, Approve(session="s", call=1, decision="deny", ref="b"))
        error = (await approver.until("error"))[-1]
        assert isinstance(error, ErrorFrame)
        assert (error.code, error.ref) == ("not_pending", "b")
        assert error.message == f"call 1 was already allowed once by user {os.getuid()}"
        await other.until("turn_end")
        assert (await error_of(other, ONCE)).code == "not_pending"
    assert [answer.choice for answer in daemon.engine.answers] == ["once"]


async def test_a_question_outlives_its_client_and_is_sent_again_at_attach(daemon: Daemon) -> None:
    daemon.engine.ask(TEXT)
    async with daemon.client(can_approve=True) as client:
        await client.open("s")
        await ask(client)
    async with daemon.client(can_approve=True) as client:
        history = await client.open("s")
        assert not any(isinstance(frame, ApprovalRequest) for frame in history)
        again = await asked(client)
        assert again == QUESTION_FRAME.model_copy(update={"seconds": again.seconds})
        assert again.seconds <= 300.0
        await client.send(ONCE)
        assert decided(await client.until("turn_end")).decision == "once"


async def test_a_client_that_cannot_approve_is_not_asked_and_its_answer_refused(
    daemon: Daemon, approver: RawClient
) -> None:
    async with daemon.client() as bystander:
        await ask(approver)
        await bystander.open("s")
        assert (await error_of(bystander, ONCE)).code == "not_permitted"
        await approver.send(ONCE)
        frames = await bystander.until("turn_end")
    assert not any(isinstance(frame, ApprovalRequest) for frame in frames)


async def test_where_nobody_is_attached_who_can_approve_it_is_denied_at_once(daemon: Daemon) -> None:
    daemon.engine.ask(TEXT)
    async with daemon.client() as bystander, daemon.client(can_approve=True) as elsewhere:
        await elsewhere.open("t")
        await bystander.open("s")
        await bystander.send(Say(session="s", text=TEXT, key="k"))
        await bystander.until("turn_end")
    assert str(daemon.engine.answers[0]) == "denied: nobody was there who could allow it"


async def test_an_answer_needs_no_attached_client(daemon: Daemon, approver: RawClient) -> None:
    await ask(approver)
    async with daemon.client(can_approve=True) as other:
        assert await other.ask(ONCE) == {"call": 1, "decision": "once"}
    await approver.until("turn_end")


async def test_time_that_is_over_denies_and_says_so(daemon: Daemon, approver: RawClient) -> None:
    daemon.engine.ask(TEXT, seconds=0.01)
    await ask(approver)
    frame = decided(await approver.until("turn_end"))
    assert (frame.decision, frame.uid) == ("deny", None)
    assert "nobody answered within 0.01 s" in frame.reason


async def test_a_cancel_denies_what_waits(daemon: Daemon, approver: RawClient) -> None:
    await ask(approver)
    await approver.send(Cancel(session="s"))
    frame = decided(await approver.until("turn_end"))
    assert (frame.decision, frame.reason) == ("deny", "the turn was cancelled")
    assert daemon.engine.answers == []


async def test_a_stop_ends_a_turn_that_waits(home: Home, config: Config, engine: FakeEngine) -> None:
    engine.ask(TEXT)
    async with serving(home, config, engine) as daemon, daemon.client(can_approve=True) as client:
        await client.open("s")
        await ask(client)
    await engine.turn_has_ended()
    assert engine.answers == []


async def test_who_finds_the_session_busy_is_told_that_it_waits_for_an_approval(
    daemon: Daemon, approver: RawClient
) -> None:
    await ask(approver)
    error = await error_of(approver, Say(session="s", text="something else", key="other"))
    assert error.code == "busy"
    assert "waits for an approval" in error.message
    assert "bxctl approve s" in error.hint


async def test_the_list_of_sessions_shows_which_one_waits(daemon: Daemon, approver: RawClient) -> None:
    async def asking() -> list[bool]:
        return [row["asking"] for row in (await approver.ask(List()))["sessions"]]

    assert await asking() == [False]
    await ask(approver)
    assert await asking() == [True]
    await approver.send(ONCE)
    await approver.until("turn_end")
    assert await asking() == [False]


@pytest.mark.parametrize(("session", "code"), [("t", "not_pending"), ("none", "session_not_found"), ("/", "usage")])
async def test_an_answer_that_nobody_asked_for_is_refused(
    daemon: Daemon, approver: RawClient, session: str, code: str
) -> None:
    make(daemon.home, daemon.config, "t")
    assert (await error_of(approver, Approve(session=session, call=1, decision="once"))).code == code
    assert (await error_of(approver, Approve(session="s", call=1, decision="once"))).code == "not_pending"


async def test_what_was_allowed_for_the_session_ends_with_it(home: Home, config: Config, engine: FakeEngine) -> None:
    seen: list[object] = []
    run_turn = engine.run_turn

    async def look(*arguments: object) -> object:
        seen.append(arguments[-1])
        return await run_turn(*arguments)  # type: ignore[arg-type]  # passed on as they came

    engine.run_turn = look  # type: ignore[method-assign,assignment]
    async with serving(home, with_loop(config, max_open_sessions=1), engine) as daemon:
        for session in ("s", "s", "t", "s"):
            async with daemon.client() as client:
                await client.open(session)
                await client.send(Say(session=session, text="hello", key=f"k{len(seen)}"))
                await client.until("turn_end")
    first, again, _, later = seen
    assert first is again
    assert first is not later


async def test_two_clients_that_answer_at_the_same_moment_get_one_yes_and_one_error(
    daemon: Daemon, approver: RawClient
) -> None:
    async with daemon.client(can_approve=True) as other:
        await other.open("s")
        await ask(approver)
        await asked(other)
        await asyncio.gather(approver.send(ONCE), other.send(ONCE.model_copy(update={"decision": "deny"})))
        assert sorted([await answer_to(approver), await answer_to(other)]) == ["error", "reply"]
        await approver.until("turn_end")
    assert len(daemon.engine.answers) == 1
