from typing import Any

import pytest

from loopd.config import LoopTable
from loopd.proto.records import Usage
from loopd.turn.limits import TEMPLATE_TOKENS, Stop, TurnLimits, answer_cut, context_stop, surely_fits

BEGAN_S = 1000.0


def limits(**table: Any) -> TurnLimits:
    return TurnLimits(LoopTable(**table), BEGAN_S)


def reason(stop: Stop | None) -> str | None:
    return stop.reason if stop else None


def test_the_step_after_the_last_allowed_one_ends_the_turn() -> None:
    turn = limits(max_steps=2)
    assert [reason(turn.step(BEGAN_S)) for _ in range(3)] == [None, None, "step_limit"]
    assert turn.step(BEGAN_S) == Stop("step_limit", "the turn used all its model requests (max_steps = 2)")


def test_the_tool_call_after_the_last_allowed_one_ends_the_turn() -> None:
    turn = limits(max_tool_calls=2)
    assert [reason(turn.call("t", f'{{"n":{n}}}')) for n in range(3)] == [None, None, "tool_limit"]
    assert turn.call("t", "{}") == Stop("tool_limit", "the turn used all its tool calls (max_tool_calls = 2)")


def test_no_tool_calls_may_be_allowed_at_all() -> None:
    assert reason(limits(max_tool_calls=0).call("t", "{}")) == "tool_limit"


@pytest.mark.parametrize(
    ("calls", "reasons"),
    [
        ([("t", "{}")] * 3, [None, None, "repeated_call"]),
        ([("t", '{"a":1,"b":2}'), ("t", '{"b":2, "a":1}'), ("t", '{"a": 1, "b": 2}')], [None, None, "repeated_call"]),
        ([("t", '{"a":'), ("t", '{"a":'), ("t", '{"a":')], [None, None, "repeated_call"]),
        ([("t", "{}"), ("t", "{}"), ("u", "{}"), ("t", "{}"), ("t", "{}")], [None] * 5),
        ([("t", '{"n":1}'), ("t", '{"n":2}'), ("t", '{"n":1}'), ("t", '{"n":2}')], [None] * 4),
        ([("t", '"\\ud800"')] * 3, [None, None, "repeated_call"]),
        ([("t", "[" * 100_000)] * 3, [None, None, "repeated_call"]),
    ],
    ids=["same", "same value", "same text", "another between", "other arguments", "surrogates", "deep"],
)
def test_the_same_call_three_times_running_ends_the_turn(
    calls: list[tuple[str, str]], reasons: list[str | None]
) -> None:
    turn = limits(max_same_call=3)
    assert [reason(turn.call(*call)) for call in calls] == reasons


def test_the_repeated_call_names_its_limit() -> None:
    turn = limits(max_same_call=2)
    turn.call("t", "{}")
    assert turn.call("t", "{}") == Stop(
        "repeated_call", "the model made the same call again and again (max_same_call = 2)"
    )


@pytest.mark.parametrize(("after_s", "ended"), [(0.0, False), (9.99, False), (10.0, True), (500.0, True)])
def test_the_wall_time_ends_the_turn(after_s: float, ended: bool) -> None:
    turn = limits(turn_timeout_s=10.0)
    stop = Stop("deadline", "the turn took all its time (turn_timeout_s = 10)") if ended else None
    assert turn.time(BEGAN_S + after_s) == stop
    assert turn.step(BEGAN_S + after_s) == stop
    assert turn.remaining_s(BEGAN_S + after_s) == pytest.approx(10.0 - after_s)


def test_a_wait_does_not_count_and_overlapping_waits_count_once() -> None:
    turn = limits(turn_timeout_s=10.0)
    turn.wait(BEGAN_S + 1)
    turn.wait(BEGAN_S + 50)
    assert turn.remaining_s(BEGAN_S + 90) == pytest.approx(9.0)
    turn.resume(BEGAN_S + 100)
    assert turn.remaining_s(BEGAN_S + 150) == pytest.approx(9.0)
    turn.resume(BEGAN_S + 201)
    assert turn.remaining_s(BEGAN_S + 203) == pytest.approx(7.0)
    turn.wait(BEGAN_S + 205)
    turn.resume(BEGAN_S + 305)
    assert turn.remaining_s(BEGAN_S + 305) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("completion_tokens", "message"),
    [
        (100, "the answer reached its length limit (max_completion_tokens = 100)"),
        (None, "the answer reached its length limit (max_completion_tokens = 100)"),
        (40, "the answer was cut after 40 tokens: the model's context is full"),
    ],
)
def test_a_cut_answer_tells_which_limit_cut_it(completion_tokens: int | None, message: str) -> None:
    assert answer_cut(LoopTable(max_completion_tokens=100), completion_tokens) == Stop("length", message)


def usage(prompt_tokens: int | None, completion_tokens: int | None) -> Usage:
    unknown: dict[str, Any] = dict.fromkeys(
        ("cached_tokens", "expected", "loss", "cause", "prefill_ms", "decode_ms", "first_token_ms", "slot")
    )
    return Usage(
        at="2026-12-01T00:00:00.000000Z",
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        request_bytes=0,
        request_sha256="sha256:" + "0" * 64,
        **unknown,
    )


@pytest.mark.parametrize(
    ("last", "new_bytes", "context_tokens", "sure"),
    [
        (None, 1000, 1000 + TEMPLATE_TOKENS + 1, True),
        (None, 1000, 1000 + TEMPLATE_TOKENS, False),
        (usage(3000, 100), 900, 4000 + TEMPLATE_TOKENS + 1, True),
        (usage(3000, 100), 900, 4000 + TEMPLATE_TOKENS, False),
        (usage(None, None), 1, 1_000_000, False),
        (usage(5, None), 1, 1_000_000, False),
    ],
)
def test_a_request_surely_fits_only_where_its_upper_bound_leaves_room(
    last: Usage | None, new_bytes: int, context_tokens: int, sure: bool
) -> None:
    assert surely_fits(last, new_bytes, context_tokens) is sure


@pytest.mark.parametrize(("prompt_tokens", "full"), [(4095, False), (4096, True), (5000, True)])
def test_a_counted_prompt_must_leave_room_for_an_answer(prompt_tokens: int, full: bool) -> None:
    stop = context_stop(prompt_tokens, 4096)
    assert reason(stop) == ("context_full" if full else None)
    if stop:
        assert f"needs {prompt_tokens} tokens and the model's context has 4096" in stop.message
