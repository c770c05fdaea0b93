from loopd.tools.counts import Counts

AT = "2026-12-01T14:00:00.000123Z"


def test_a_tool_that_was_never_called_has_no_calls() -> None:
    assert Counts().describe("a.b") == {"calls": 0, "failed": 0, "last_failure": None, "failed_at": None}


def test_calls_and_failures_are_counted_by_tool_and_the_last_failure_is_kept() -> None:
    counts = Counts()
    for name in ("a.b", "a.b", "a.c"):
        counts.began(name)
    counts.failed("a.b", "the first", AT)
    counts.failed("a.b", "the second\nline", AT)
    assert counts.describe("a.b") == {"calls": 2, "failed": 2, "last_failure": "the second line", "failed_at": AT}
    assert counts.describe("a.c")["failed"] == 0


def test_a_long_failure_is_cut() -> None:
    counts = Counts()
    counts.failed("a.b", "x" * 10_000_000, AT)
    assert len(counts.describe("a.b")["last_failure"]) == 300
