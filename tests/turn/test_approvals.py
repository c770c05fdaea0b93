"""Questions and answers by themselves, without a turn."""

import asyncio

import pytest

from loopd.errors import NotPending
from loopd.proto.frames import ApprovalDecided, ApprovalRequest, Choice, ServerFrame
from loopd.tools.port import Tool
from loopd.turn.approvals import Answer, Approvals

PATIENCE_S = 20.0
TOOL = Tool("write", "Write a file.", {"type": "object"}, effect="write")


def question(call: int = 3, seconds: float = 300.0) -> ApprovalRequest:
    return ApprovalRequest(
        session="s", call=call, name="files.write", arguments="{}", effect="write", rule="r", seconds=seconds
    )


class Asked:
    """A question that waits."""

    def __init__(self, *, reachable: bool = True) -> None:
        self.approvals = Approvals(lambda: reachable)
        self.frames: list[ServerFrame] = []

    async def begin(self, request: ApprovalRequest | None = None) -> asyncio.Task[Answer]:
        shown = asyncio.Event()

        def emit(frame: ServerFrame) -> None:
            self.frames.append(frame)
            shown.set()

        task = asyncio.ensure_future(self.approvals.ask(request or question(), emit))
        await asyncio.wait_for(shown.wait(), PATIENCE_S)
        return task

    def decided(self) -> ApprovalDecided:
        decided = self.frames[-1]
        assert isinstance(decided, ApprovalDecided)
        return decided


@pytest.mark.parametrize(
    ("choice", "allows", "words"),
    [
        ("once", True, "allowed once by user 7"),
        ("session", True, "allowed for the session by user 7"),
        ("deny", False, "denied by user 7"),
    ],
)
async def test_an_answer_ends_the_question_and_everybody_is_told(choice: Choice, allows: bool, words: str) -> None:
    asked = Asked()
    task = await asked.begin()
    asked.approvals.answer(3, choice, uid=7, pid=77)
    answer = await asyncio.wait_for(task, PATIENCE_S)
    assert answer == Answer(choice, "by user 7", 7, 77)
    assert (answer.allows, str(answer)) == (allows, words)
    assert asked.frames == [
        question(),
        ApprovalDecided(session="s", call=3, name="files.write", decision=choice, uid=7, reason="by user 7"),
    ]
    assert asked.approvals.pending() == []


async def test_the_second_of_two_answers_at_the_same_moment_is_told_who_was_quicker() -> None:
    asked = Asked()
    task = await asked.begin()
    asked.approvals.answer(3, "deny", uid=7, pid=77)
    for _ in range(2):
        with pytest.raises(NotPending, match="call 3 was already denied by user 7"):
            asked.approvals.answer(3, "once", uid=8, pid=88)
        assert not (await task).allows


async def test_what_waits_for_nothing_cannot_be_answered() -> None:
    asked = Asked()
    with pytest.raises(NotPending, match="call 4 waits for no approval"):
        asked.approvals.answer(4, "once", uid=7, pid=77)


async def test_nobody_to_ask_is_a_denial_without_a_question() -> None:
    asked = Asked(reachable=False)
    answer = await asked.approvals.ask(question(), asked.frames.append)
    assert str(answer) == "denied: nobody was there who could allow it"
    assert asked.frames == []


async def test_no_answer_in_time_is_a_denial() -> None:
    asked = Asked()
    answer = await asyncio.wait_for(await asked.begin(question(seconds=0.01)), PATIENCE_S)
    assert str(answer) == "denied: nobody answered within 0.01 s (approval_timeout_s)"
    assert (asked.decided().decision, asked.decided().uid) == ("deny", None)
    with pytest.raises(NotPending, match="already denied: nobody answered"):
        asked.approvals.answer(3, "once", uid=7, pid=77)


async def test_a_cancel_is_a_denial_that_everybody_is_told() -> None:
    asked = Asked()
    task = await asked.begin()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (asked.decided().decision, asked.decided().reason) == ("deny", "the turn was cancelled")
    assert asked.approvals.pending() == []


async def test_what_waits_is_shown_again_with_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    monkeypatch.setattr("loopd.turn.approvals.monotonic_s", lambda: 1000.0)
    task = await asked.begin()
    monkeypatch.setattr("loopd.turn.approvals.monotonic_s", lambda: 1100.0)
    assert asked.approvals.pending() == [question(seconds=200.0)]
    monkeypatch.setattr("loopd.turn.approvals.monotonic_s", lambda: 1301.0)
    assert asked.approvals.pending() == [question(seconds=0.0)]
    asked.approvals.answer(3, "once", uid=7, pid=77)
    assert asked.approvals.pending() == []
    assert (await task).allows


def test_a_grant_is_for_that_very_tool() -> None:
    approvals = Approvals(lambda: True)
    answer = Answer("session", "by user 7", 7, 77)
    approvals.grant("files.write", TOOL, answer)
    assert (
        approvals.granted("files.write", Tool("write", "Write a file.", {"type": "object"}, effect="write")) == answer
    )
    assert approvals.granted("files.remove", TOOL) is None
    assert approvals.granted("files.write", Tool("write", "Send it away.", {}, effect="write")) is None
