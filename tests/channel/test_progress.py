"""What a newcomer is told of the step so far (SPEC 8)."""

from typing import Any

import pytest

from loopd.channel.progress import Progress
from loopd.proto.frames import (
    Accepted,
    Delta,
    Prefill,
    Queued,
    Reasoning,
    RecordFrame,
    ServerFrame,
    ToolStarted,
    UsageFrame,
)

ACCEPTED = Accepted(session="s", key="k", text="hello")
CALL = ToolStarted(session="s", call=1, name="find_tool", arguments="{}")
OTHER_CALL = ToolStarted(session="s", call=2, name="find_tool", arguments="{}")
USAGE = UsageFrame(session="s", prompt_tokens=1, cached_tokens=0, evaluated=1, loss=0, cause=None, seconds=1.0)


def delta(text: str) -> Delta:
    return Delta(session="s", text=text)


def reasoning(text: str) -> Reasoning:
    return Reasoning(session="s", text=text)


def prefill(processed: int) -> Prefill:
    return Prefill(session="s", cached=0, processed=processed, total=9)


def record(kind: str, **fields: Any) -> RecordFrame:
    return RecordFrame(session="s", epoch=0, line=2, record={"type": kind, **fields})


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ([], []),
        ([ACCEPTED], [ACCEPTED]),
        ([ACCEPTED, Queued(session="s", place=1), prefill(1), prefill(2)], [ACCEPTED, prefill(2)]),
        ([delta("a"), delta("b")], [delta("ab")]),
        ([delta("x"), reasoning("a"), reasoning("b")], [reasoning("ab"), delta("x")]),
        ([ACCEPTED, prefill(1), reasoning("a"), delta("b"), record("assistant")], [ACCEPTED]),
        ([delta("a"), record("user")], [delta("a")]),
        ([CALL, OTHER_CALL, record("tool_result", call=1)], [OTHER_CALL]),
        ([record("assistant"), CALL, USAGE], [CALL]),
    ],
)
def test_a_newcomer_is_told_what_no_record_holds_yet(seen: list[ServerFrame], told: list[ServerFrame]) -> None:
    progress = Progress()
    for frame in seen:
        progress.note(frame)
    assert progress.frames("s") == told
