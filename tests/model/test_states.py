"""Which saved state a conversation gets back, and which ones go first."""

import pytest

from loopd.model.states import (
    Ancestor,
    Fit,
    History,
    Left,
    Mark,
    Speeds,
    State,
    choose,
    is_saved,
    shared_tokens,
    superseded,
    to_prune,
    wants_baseline,
)
from loopd.proto.model_identity import ModelIdentity

FIT = Fit(model=ModelIdentity(alias="m", sha256=None, size=1), template="t", build="b", context_tokens=100)
OTHER_BUILD = FIT.model_copy(update={"build": "b2"})


def mark(session: str = "a", line: int = 5, epoch: int = 0, baseline: str = "x") -> Mark:
    return Mark(session=session, epoch=epoch, line=line, baseline=baseline)


def left(session: str = "a", tokens: int = 50, line: int = 5, **more: object) -> Left:
    return Left(mark=mark(session, line, **more), task=1, tokens=tokens, turn=1)  # type: ignore[arg-type]


def state(
    session: str = "a",
    tokens: int = 50,
    line: int = 5,
    *,
    kind: str = "session",
    fit: Fit = FIT,
    serial: int = 1,
    size: int = 10,
    baseline: str = "x",
    epoch: int = 0,
) -> State:
    return State(
        name=f"{kind}-{session}-{tokens}-{serial}",
        kind=kind,  # type: ignore[arg-type]
        fit=fit,
        mark=mark(session, line, epoch, baseline),
        tokens=tokens,
        size_bytes=size,
        serial=serial,
    )


def history(session: str = "a", expected: int = 50, **more: object) -> History:
    return History(mark=mark(session, 9), expected=expected, **more)  # type: ignore[arg-type]


FORK = history("f", 30, parent=Ancestor("a", 0, 7, 30))


@pytest.mark.parametrize(
    ("contents", "of", "shared"),
    [
        (left(tokens=50), history(expected=50), 50),
        (left(tokens=70), history(expected=50), 50),
        (left(tokens=30), history(expected=50), 30),
        (left("b"), history(), 1),
        (left("b", baseline="y"), history(), 0),
        (left(baseline="y"), history(), 0),
        (left(epoch=1), history(), 1),
        (left(tokens=30, line=3), FORK, 30),
        (left(tokens=20, line=3), FORK, 20),
        (left(tokens=80, line=7), FORK, 30),
        (left(tokens=80, line=9), history("f", 60, parent=Ancestor("a", 0, 7, 30)), 30),
        (left("f", tokens=60), history("f", 60, parent=Ancestor("a", 0, 7, 30)), 60),
        (left("g", tokens=60), FORK, 1),
        (left(), history(expected=0), 1),
    ],
    ids=[
        "as-it-was-left",
        "more-after-a-cancel",
        "an-older-request",
        "another-session",
        "another-baseline",
        "a-fork-with-a-new-baseline",
        "another-epoch",
        "the-parent-before-the-fork",
        "the-parent-long-before-the-fork",
        "the-parent-after-the-fork",
        "the-parent-of-a-fork-that-went-on",
        "the-fork-itself",
        "a-sibling",
        "before-the-first-request",
    ],
)
def test_what_contents_share_with_a_history(contents: Left, of: History, shared: int) -> None:
    assert shared_tokens(contents, of) == shared


@pytest.mark.parametrize(
    ("states", "here", "chosen"),
    [
        ([], 0, None),
        ([state(tokens=50)], 0, 50),
        ([state(tokens=50)], 50, None),
        ([state(tokens=40)], 45, None),
        ([state(tokens=40, serial=2), state(tokens=50)], 0, 50),
        ([state(tokens=50, fit=OTHER_BUILD)], 0, None),
        ([state(tokens=50, baseline="y")], 0, None),
        ([state("b", tokens=20)], 0, 20),
        ([state("b", tokens=20)], 1, None),
        ([state("b", tokens=60), state("c", tokens=20, kind="baseline")], 0, 20),
        ([state("b", tokens=60), state(tokens=10)], 0, 10),
    ],
    ids=[
        "none",
        "its-own",
        "the-slot-has-it-all",
        "the-slot-has-more",
        "the-longest-of-its-own",
        "of-another-build",
        "of-another-baseline",
        "somebody-else's-has-the-baseline",
        "the-slot-has-the-baseline-too",
        "the-shortest-with-the-baseline",
        "its-own-before-a-stranger's",
    ],
)
def test_the_state_that_gives_most_is_chosen(states: list[State], here: int, chosen: int | None) -> None:
    best = choose(states, history(expected=50), FIT, here=here)
    assert (best[0].tokens if best else None) == chosen


@pytest.mark.parametrize(("tokens", "chosen"), [(50, True), (40, True), (51, False)])
def test_a_model_that_cannot_roll_back_gets_no_state_with_more_than_its_history(tokens: int, *, chosen: bool) -> None:
    best = choose([state(tokens=tokens)], history(expected=50), FIT, here=0, rolls_back=False)
    assert (best is not None) == chosen


def test_what_does_not_fit_goes_first_then_the_baselines_then_the_oldest() -> None:
    states = [
        state("new", serial=4),
        state("old", serial=2),
        state("b", serial=3, kind="baseline"),
        state("gone", serial=5, fit=OTHER_BUILD),
    ]
    order = [item.mark.session for item in to_prune(states, FIT, 0)]
    assert order == ["gone", "b", "old", "new"]
    assert [item.mark.session for item in to_prune(states, FIT, 25)] == ["gone", "b"]
    assert to_prune(states, FIT, 40) == []


def test_a_newer_state_replaces_those_of_the_same_session_alone() -> None:
    new = state(tokens=60, serial=9)
    kept = [state("b"), state(kind="baseline")]
    assert superseded([state(tokens=50), state(tokens=20, epoch=1), new, *kept], new) == [
        state(tokens=50),
        state(tokens=20, epoch=1),
    ]


@pytest.mark.parametrize(
    ("states", "wanted"),
    [
        ([], True),
        ([state(kind="baseline", tokens=50)], False),
        ([state(kind="baseline", tokens=101)], True),
        ([state(kind="baseline", baseline="y")], True),
        ([state(kind="baseline", fit=OTHER_BUILD)], True),
        ([state(kind="session")], True),
    ],
)
def test_a_baseline_has_one_short_state(states: list[State], *, wanted: bool) -> None:
    assert wants_baseline(states, FIT, left(tokens=50)) == wanted


def test_contents_are_saved_when_the_same_request_and_length_are_on_disk() -> None:
    assert is_saved([state()], FIT, left())
    assert not is_saved([state()], FIT, left(tokens=51))
    assert not is_saved([state()], FIT, left(line=9))
    assert not is_saved([state()], OTHER_BUILD, left())
    assert not is_saved([state(kind="baseline")], FIT, left())


def test_a_restore_is_left_out_only_where_it_is_surely_slower() -> None:
    speeds = Speeds()
    big = state(size=1000)
    assert speeds.slower_restored(big, 40) == ""
    speeds.evaluated(100, 100)
    speeds.restored(1000, 50)
    assert "restoring 50 tokens takes 0.05 s here, evaluating 40 0.04 s" in speeds.slower_restored(big, 40)
    assert speeds.slower_restored(big, 60) == ""
    speeds.restored(1000, 20)
    assert speeds.slower_restored(big, 40) == ""
    assert speeds.prefill_s(50) == 0.05
