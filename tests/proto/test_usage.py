import pytest

from loopd.proto.records import Usage
from loopd.proto.usage import expected_tokens, loss_tokens, rows, total

HASH = "sha256:" + "a" * 64


def usage(prompt: int | None, completion: int | None, cached: int | None, expected: int | None = None) -> Usage:
    return Usage(
        at="2026-12-01T14:00:00.000000Z",
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        expected=expected,
        loss=loss_tokens(expected, cached),
        cause=None,
        prefill_ms=None,
        decode_ms=None,
        first_token_ms=None,
        slot=0,
        request_bytes=0,
        request_sha256=HASH,
    )


@pytest.mark.parametrize(
    ("previous", "prompt_tokens", "expected"),
    [
        (None, 32, 0),
        (usage(32, 16, 0), 65, 47),
        (usage(65, 14, 47), 93, 78),
        (usage(93, 8, 78), 116, 100),
        (usage(32, 16, 0), 40, 39),
        (usage(32, 0, 0), 40, 31),
        (usage(None, None, None), 40, 0),
        (usage(32, None, 0), 40, 0),
        (usage(32, 16, 0), None, None),
        (None, None, None),
    ],
)
def test_expected_is_what_the_request_before_left_behind(
    previous: Usage | None, prompt_tokens: int | None, expected: int | None
) -> None:
    assert expected_tokens(previous, prompt_tokens) == expected


@pytest.mark.parametrize(
    ("expected", "cached", "loss"), [(47, 47, 0), (47, 40, 7), (47, 50, 0), (0, 0, 0), (None, 3, None), (3, None, None)]
)
def test_loss_is_what_should_have_been_cached_and_was_not(
    expected: int | None, cached: int | None, loss: int | None
) -> None:
    assert loss_tokens(expected, cached) == loss


def table_of(*usages: Usage, epoch: int = 0) -> list[tuple[int, int, Usage]]:
    return [(epoch, 4 * (number + 1), it) for number, it in enumerate(usages)]


def test_a_conversation_without_loss_evaluates_its_floor() -> None:
    table = rows(table_of(usage(32, 16, 0, 0), usage(65, 14, 47, 47), usage(93, 8, 78, 78), usage(116, 12, 100, 100)))
    assert [(row.evaluated, row.floor, row.counted) for row in table] == [
        (32, 32, False),
        (18, 18, True),
        (15, 15, True),
        (16, 16, True),
    ]
    sums = total(table)
    assert (sums.evaluated, sums.floor, sums.ratio, sums.loss, sums.max_loss, sums.left_out) == (49, 49, 1.0, 0, 0, 1)


def test_losses_are_summed_and_the_largest_is_named() -> None:
    sums = total(rows(table_of(usage(32, 16, 0, 0), usage(65, 14, 40, 47), usage(93, 8, 0, 78))))
    assert (sums.evaluated, sums.floor, sums.loss, sums.max_loss) == (25 + 93, 18 + 15, 7 + 78, 78)
    assert sums.ratio == round(118 / 33, 4)


@pytest.mark.parametrize(
    ("usages", "counted"),
    [
        ([usage(10, 5, 0, 0)], [False]),
        ([usage(10, 5, 0, 0), usage(15, 5, 14, 14)], [False, True]),
        ([usage(10, 5, 0, 0), usage(14, 5, 13, 13)], [False, False]),
        ([usage(10, 5, 0, 0), usage(None, None, None), usage(30, 5, 0, 0)], [False, False, False]),
        ([usage(10, 5, 0, 0), usage(20, 5, None, 14)], [False, False]),
        ([usage(10, 5, 0, 0), usage(20, None, 14, 14), usage(30, 5, 0, 0)], [False, True, False]),
    ],
)
def test_first_requests_and_those_that_cannot_be_compared_are_left_out(
    usages: list[Usage], counted: list[bool]
) -> None:
    table = rows(table_of(*usages))
    assert [row.counted for row in table] == counted
    assert total(table).left_out == counted.count(False)


def test_the_first_request_of_each_epoch_is_left_out() -> None:
    first, second = usage(10, 5, 0, 0), usage(20, 5, 14, 14)
    table = rows([*table_of(first, second), *table_of(first, second, epoch=1)])
    assert [row.counted for row in table] == [False, True, False, True]


def test_nothing_counted_has_no_ratio() -> None:
    assert total([]).ratio is None
    assert total(rows(table_of(usage(10, 5, 0, 0)))).ratio is None


def test_a_row_has_the_fields_of_the_command() -> None:
    (row,) = rows(table_of(usage(10, 5, 0, 0)))
    assert set(row.as_json()) == {
        "at", "prompt_tokens", "completion_tokens", "cached_tokens", "expected", "loss", "cause", "prefill_ms",
        "decode_ms", "first_token_ms", "slot", "epoch", "line", "evaluated", "floor", "counted",
    }  # fmt: skip
