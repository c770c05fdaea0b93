"""A disk that is full, fails, or takes only a part: what is in memory is on disk, and nothing half-written stays."""

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from loopd.errors import SessionIoError, SessionReadOnly
from loopd.home import Home
from loopd.session import reader
from loopd.session.store import Session
from tests.session.builders import LIMITS, create, log_of, records_of, reopen, say, step
from tests.session.crash import killed_at

Fail = Callable[..., list[str]]


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Make calls of one function of `os` fail with an errno, or write half; return the calls of all three."""
    calls: list[str] = []
    real = {name: getattr(os, name) for name in ("write", "fdatasync", "ftruncate")}

    def arm(**faults: int) -> list[str]:
        for name in real:
            monkeypatch.setattr(os, name, breaking(name, faults.get(name)))
        return calls

    def breaking(name: str, fault: int | None) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls.append(name)
            if name == "write" and fault is not None:
                written = real[name](args[0], args[1][: len(args[1]) // 2])
                if fault == 0:
                    return written
            if fault:
                raise OSError(fault, os.strerror(fault))
            return real[name](*args)

        return call

    return arm


@pytest.fixture
def with_a_turn(session: Session) -> Session:
    say(session)
    return session


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO, 0])
def test_a_failed_or_short_write_is_taken_back_and_the_session_goes_on(
    home: Home, with_a_turn: Session, fail: Fail, fault: int
) -> None:
    session, before = with_a_turn, log_of(home).read_bytes()
    batch = step(session, "second")
    calls = fail(write=fault)
    with pytest.raises(SessionIoError, match=str(log_of(home))):
        session.append(*batch)
    assert calls == ["write", "ftruncate", "fdatasync"]
    assert log_of(home).read_bytes() == before
    assert (session.lines, session.size_bytes, session.read_only) == (5, len(before), False)
    fail()
    session.append(*batch)
    again = reopen(session, home)
    assert again.lines == 8
    again.close()


@pytest.mark.parametrize("second", ["ftruncate", "fdatasync"])
def test_a_write_that_cannot_be_taken_back_makes_the_session_read_only(
    home: Home, with_a_turn: Session, fail: Fail, second: str
) -> None:
    session = with_a_turn
    batch = step(session, "second")
    fail(write=errno.ENOSPC, **{second: errno.EIO})
    with pytest.raises(SessionIoError, match="write"):
        session.append(*batch)
    calls = fail()
    calls.clear()
    assert session.read_only
    with pytest.raises(SessionReadOnly, match="cannot undo"):
        session.append(*batch)
    assert calls == []
    assert session.lines == len(records_of(session)) == 5
    assert session.request("still readable").messages


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EIO])
def test_a_failed_sync_makes_the_session_read_only_and_is_not_retried(
    home: Home, with_a_turn: Session, fail: Fail, fault: int
) -> None:
    session, before = with_a_turn, log_of(home).read_bytes()
    batch = step(session, "second")
    calls = fail(fdatasync=fault)
    with pytest.raises(SessionIoError, match="sync") as caught:
        session.append(*batch)
    assert caught.value.errno == fault
    assert calls == ["write", "fdatasync", "ftruncate"]
    assert session.read_only
    assert session.lines == 5
    with pytest.raises(SessionReadOnly, match="sync"):
        session.append(*batch)
    assert calls == ["write", "fdatasync", "ftruncate"]
    fail()
    assert log_of(home).read_bytes() == before
    again = reopen(session, home)
    again.append(*batch)
    again.close()


def test_a_failed_sync_that_cannot_be_cut_back_says_both(with_a_turn: Session, fail: Fail) -> None:
    batch = step(with_a_turn, "second")
    fail(fdatasync=errno.EIO, ftruncate=errno.EROFS)
    with pytest.raises(SessionIoError):
        with_a_turn.append(*batch)
    with pytest.raises(SessionReadOnly, match="cut back"):
        with_a_turn.append(*batch)


def test_a_failed_append_in_one_session_does_not_touch_another(home: Home, with_a_turn: Session, fail: Fail) -> None:
    other = create(home, "s2")
    fail(fdatasync=errno.EIO)
    with pytest.raises(SessionIoError):
        say(with_a_turn)
    fail()
    say(other)
    assert not other.read_only
    other.close()


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """Let the kernel take no file beyond `size_bytes`, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("room", [0, 1, 100])
def test_when_the_kernel_takes_no_more_the_log_ends_at_a_record_and_goes_on_later(
    home: Home, with_a_turn: Session, room: int
) -> None:
    session, before = with_a_turn, log_of(home).read_bytes()
    batch = step(session, "second")
    with room_for(len(before) + room), pytest.raises(SessionIoError, match=str(log_of(home))):
        session.append(*batch)
    assert log_of(home).read_bytes() == before
    session.append(*batch)
    assert session.lines == 8


def test_a_crash_in_an_append_leaves_the_log_before_it_or_after_it(home: Home, with_a_turn: Session) -> None:
    before = log_of(home).read_bytes()
    with_a_turn.close()
    point, outcomes = 0, set()

    def append() -> None:
        session = Session.open(home, "s1", limits=LIMITS)
        session.append(*step(session, "second"))

    while killed_at(point, append):
        session = Session.open(home, "s1", limits=LIMITS)
        outcomes.add(session.lines)
        session.close()
        log_of(home).write_bytes(before)
        point += 1
    assert outcomes == {5, 8}


def test_a_session_that_cannot_be_made_leaves_nothing_behind(home: Home) -> None:
    with room_for(100), pytest.raises(SessionIoError, match=r"\.json"):
        create(home)
    assert list(home.sessions.iterdir()) == []
    create(home).close()


@pytest.mark.parametrize(
    ("name", "nth"), [("mkdir", 0), ("fsync", 0), ("fsync", 1), ("fsync", 2), ("fsync", 3), ("rename", 0)]
)
def test_whatever_fails_while_a_session_is_made_leaves_nothing_behind(
    home: Home, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    real, calls = getattr(os, name), 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    monkeypatch.setattr(os, name, broken)
    with pytest.raises(SessionIoError, match=str(home.sessions)):
        create(home)
    monkeypatch.undo()
    assert list(home.sessions.iterdir()) == []
    create(home).close()


@pytest.mark.parametrize("failing", ["fsync", "fdatasync"])
def test_open_fails_where_what_it_would_read_cannot_be_synced(
    home: Home, with_a_turn: Session, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    with_a_turn.close()

    def broken(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, failing, broken)
    with pytest.raises(SessionIoError, match="sync"):
        Session.open(home, "s1", limits=LIMITS)
    monkeypatch.undo()
    Session.open(home, "s1", limits=LIMITS).close()


def test_verify_and_reading_work_on_a_full_disk(home: Home, with_a_turn: Session) -> None:
    with_a_turn.close()
    with room_for(0):
        assert reader.verify(home, "s1").faults == ()
        assert len(list(reader.read_records(home, "s1"))) == 5
        assert [summary.refused for summary in reader.summaries(home)] == [None]
        session = Session.open(home, "s1", limits=LIMITS)
        assert session.lines == 5
        session.close()
