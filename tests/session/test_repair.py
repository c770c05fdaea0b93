import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loopd.errors import SessionBusy, SessionExists, SessionIoError, SessionNotFound, TornLog, UsageError
from loopd.home import Home
from loopd.session import reader
from loopd.session.repair import fork, repair
from loopd.session.store import Session, dir_for, sweep
from tests.session.builders import (
    CLOCK,
    FIND,
    LIMITS,
    create,
    end,
    give,
    log_of,
    make_baseline,
    records_of,
    say,
    say_with_tool,
    step,
)
from tests.session.crash import killed_at
from tests.session.test_reader import write_epoch


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def torn(home: Home) -> dict[str, bytes]:
    """A session `s1` with two turns, the second cut in its answer; returns its files."""
    session = create(home)
    say(session)
    say(session, "second")
    session.close()
    lines = log_of(home).read_bytes().splitlines(keepends=True)
    log_of(home).write_bytes(b"".join(lines[:6]) + lines[6][:30])
    return files_of(dir_for(home, "s1"))


def test_repair_keeps_the_whole_original_and_cuts_before_the_bad_batch(home: Home, torn: dict[str, bytes]) -> None:
    repaired = repair(home, "s1")
    assert repaired is not None
    assert (repaired.id, repaired.epoch, repaired.lines) == ("s1", 0, 5)
    assert repaired.fault.startswith(f"{log_of(home)}:7: ")
    assert repaired.kept.parent == home.refused
    assert repaired.kept.name.startswith("s1-2")
    assert files_of(repaired.kept) == torn
    assert torn["0.jsonl"].startswith(log_of(home).read_bytes())
    session = Session.open(home, "s1", limits=LIMITS)
    assert session.lines == 5
    say(session, "goes on")
    session.close()


def test_repair_of_a_good_session_changes_nothing(home: Home, session: Session) -> None:
    say(session)
    session.close()
    before = files_of(dir_for(home, "s1"))
    assert repair(home, "s1") is None
    assert files_of(dir_for(home, "s1")) == before
    assert list(home.refused.iterdir()) == []


def test_repair_waits_for_no_one_and_finds_no_one(home: Home, session: Session) -> None:
    with pytest.raises(SessionBusy):
        repair(home, "s1")
    with pytest.raises(SessionNotFound):
        repair(home, "s2")
    with pytest.raises(UsageError):
        repair(home, "../s1")


@pytest.mark.parametrize("damaged", ["0.jsonl", "0.baseline.json"])
def test_a_session_without_anything_good_is_set_aside_whole(home: Home, damaged: str) -> None:
    create(home).close()
    (dir_for(home, "s1") / damaged).write_bytes(b"\0" * 100)
    before = files_of(dir_for(home, "s1"))
    repaired = repair(home, "s1")
    assert repaired is not None
    assert (repaired.epoch, repaired.lines) == (None, 0)
    assert files_of(repaired.kept) == before
    assert not dir_for(home, "s1").exists()


def test_a_newest_epoch_without_anything_good_gives_way_to_the_one_before(home: Home, session: Session) -> None:
    say(session)
    session.close()
    write_epoch(home, 1)
    (dir_for(home, "s1") / "1.jsonl").write_bytes(b"half")
    before = files_of(dir_for(home, "s1"))
    repaired = repair(home, "s1")
    assert repaired is not None
    assert (repaired.epoch, repaired.lines) == (0, 5)
    assert files_of(repaired.kept) == before
    assert sorted(files_of(dir_for(home, "s1"))) == ["0.baseline.json", "0.jsonl"]
    Session.open(home, "s1", limits=LIMITS).close()


def test_two_originals_of_one_moment_are_both_kept(
    home: Home, torn: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loopd.session.repair.now", lambda: "2026-12-01T14:00:00.000000Z")
    repair(home, "s1")
    log_of(home).write_bytes(torn["0.jsonl"])
    repair(home, "s1")
    assert sorted(path.name for path in home.refused.iterdir()) == [
        "s1-20261201T140000.000000Z",
        "s1-20261201T140000.000000Z-2",
    ]


@pytest.mark.parametrize("name", ["mkdir", "open", "fsync", "rename"])
def test_a_repair_that_the_disk_does_not_take_changes_nothing(
    home: Home, torn: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(os, name)

    def full(*args: object, **more: object) -> object:
        target = str(Path(f"/proc/self/fd/{args[0]}").readlink()) if isinstance(args[0], int) else str(args[0])
        if str(home.refused) in target:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **more)

    monkeypatch.setattr(os, name, full)
    with pytest.raises(SessionIoError, match=f"{home.refused}.*No space"):
        repair(home, "s1")
    monkeypatch.undo()
    assert files_of(dir_for(home, "s1")) == torn
    sweep(home)
    assert repair(home, "s1") is not None


def test_a_crash_anywhere_in_repair_loses_nothing_and_a_second_repair_ends_it(
    home: Home, torn: dict[str, bytes]
) -> None:
    point, cut = 0, 0
    while killed_at(point, lambda: repair(home, "s1")):
        kept = [files_of(path) for path in home.refused.glob("s1-*")]
        if files_of(dir_for(home, "s1")) == torn:
            assert repair(home, "s1") is not None
            kept = [files_of(path) for path in home.refused.glob("s1-*")]
        cut += len(kept)
        assert kept
        assert all(it == torn for it in kept)
        sweep(home)
        assert not list(home.refused.glob(".*"))
        assert reader.verify(home, "s1").faults == ()
        restore(home, torn)
        point += 1
    assert point > 20
    assert cut > point


def test_a_crash_while_a_session_is_set_aside_loses_nothing(home: Home) -> None:
    create(home).close()
    log_of(home).write_bytes(b"")
    broken = files_of(dir_for(home, "s1"))
    point = 0
    while killed_at(point, lambda: repair(home, "s1")):
        places = [path for path in [*home.refused.iterdir(), *home.sessions.iterdir()] if path.is_dir()]
        assert [files_of(place) for place in places] == [broken]
        restore(home, broken)
        point += 1


def restore(home: Home, files: dict[str, bytes]) -> None:
    for place in home.refused.iterdir():
        shutil.rmtree(place)
    dir_for(home, "s1").mkdir(mode=0o700, exist_ok=True)
    for name, data in files.items():
        (dir_for(home, "s1") / name).write_bytes(data)


# --- fork -----------------------------------------------------------------------------------------------------


def test_a_fork_has_its_own_start_and_its_parents_lines_byte_for_byte(home: Home, session: Session) -> None:
    say_with_tool(session)
    last_usage = session.last_usage
    say(session, "second")
    assert fork(home, "s1", "s2", upto=8, owner_uid=1001) == 8
    theirs, ours = (log_of(home, it).read_bytes().splitlines(keepends=True) for it in ("s1", "s2"))
    assert ours[1:] == theirs[1:8]
    other = Session.open(home, "s2", limits=LIMITS)
    assert other.start.parent is not None
    assert (other.start.parent.id, other.start.parent.epoch, other.start.parent.line) == ("s1", 0, 8)
    assert other.start.parent.baseline is None
    assert (other.start.owner_uid, other.start.version, other.epoch) == (1001, session.start.version, 0)
    assert other.baseline == session.baseline
    assert (other.next_call, other.title, other.last_usage) == (2, "What time is it?", last_usage)
    say(other, "elsewhere")
    say(session, "here")
    other.close()
    assert reader.verify(home, "s2").faults == ()


def test_a_fork_without_a_line_has_all_whole_batches_also_of_a_live_session(home: Home, session: Session) -> None:
    say(session)
    session.append(*step(session, "open", CLOCK, FIND))
    give(session)
    assert fork(home, "s1", "s2", owner_uid=0) == session.lines
    other = Session.open(home, "s2", limits=LIMITS)
    assert records_of(other)[1:] == records_of(session)[1:]
    assert other.open_turn == session.open_turn
    other.close()


@pytest.mark.parametrize(
    ("upto", "is_good"), [(1, True), (2, False), (3, False), (4, True), (5, True), (6, False), (7, True), (9, False)]
)
def test_a_fork_ends_at_the_end_of_a_batch(home: Home, session: Session, upto: int, is_good: bool) -> None:
    session.append(*step(session, "one", CLOCK))
    give(session)
    session.append(*step(session, None), end())
    if is_good:
        assert fork(home, "s1", "s2", upto=upto, owner_uid=0) == upto
        assert reader.verify(home, "s2").lines == upto
    else:
        with pytest.raises(UsageError, match=f"line {upto} of .* does not end a batch") as caught:
            fork(home, "s1", "s2", upto=upto, owner_uid=0)
        assert "--upto" in caught.value.hint
        assert not dir_for(home, "s2").exists()


def test_a_fork_is_a_way_out_of_a_torn_log(home: Home, torn: dict[str, bytes]) -> None:
    with pytest.raises(TornLog) as caught:
        fork(home, "s1", "s2", owner_uid=0)
    assert fork(home, "s1", "s2", upto=caught.value.good_lines, owner_uid=0) == 5
    with pytest.raises(TornLog):
        fork(home, "s1", "s3", upto=7, owner_uid=0)
    assert files_of(dir_for(home, "s1")) == torn
    session = Session.open(home, "s2", limits=LIMITS)
    say(session, "goes on")
    session.close()


def test_a_fork_replaces_nothing(home: Home, session: Session) -> None:
    with pytest.raises(SessionExists):
        fork(home, "s1", "s1", owner_uid=0)
    with pytest.raises(SessionNotFound):
        fork(home, "s2", "s3", owner_uid=0)
    with pytest.raises(UsageError):
        fork(home, "s1", "S 2", owner_uid=0)


def test_a_fork_with_a_new_baseline_is_checked_from_its_own_first_request(home: Home, session: Session) -> None:
    say(session)
    other = make_baseline(system_prompt="Another prompt")
    fork(home, "s1", "s2", owner_uid=0, baseline=other)
    forked = Session.open(home, "s2", limits=LIMITS)
    assert forked.baseline == other
    assert forked.start.parent is not None
    assert forked.start.parent.baseline == session.baseline.sha256()
    assert forked.last_usage == session.last_usage
    fork(home, "s2", "s3", owner_uid=0)
    say(forked, "second")
    forked.close()
    fork(home, "s2", "s4", owner_uid=0)
    for session_id in ("s2", "s3", "s4"):
        assert reader.verify(home, session_id).faults == ()
        again = Session.open(home, session_id, limits=LIMITS)
        say(again, "third")
        again.close()


def test_a_fork_of_a_later_epoch_goes_on_with_its_calls_and_keys(home: Home, session: Session) -> None:
    session.close()
    write_epoch(home, 1, next_call=9, keys=("old",))
    with opened(home, "s1") as later:
        say_with_tool(later)
    fork(home, "s1", "s2", owner_uid=0)
    with opened(home, "s2") as forked:
        assert (forked.epoch, forked.next_call) == (0, 10)
        assert forked.keys == {"old": 0, "key-1-1": 2}
        assert forked.start.parent is not None
        assert forked.start.parent.epoch == 1


def test_a_crash_in_fork_leaves_no_fork_or_a_whole_one(home: Home, session: Session) -> None:
    say(session)
    point, outcomes = 0, set()
    while killed_at(point, lambda: fork(home, "s1", "s2", owner_uid=0)):
        sweep(home)
        there = dir_for(home, "s2").exists()
        outcomes.add(there)
        if there:
            assert reader.verify(home, "s2").lines == 5
            reader.delete(home, "s2")
        point += 1
    assert outcomes == {True, False}


@contextmanager
def opened(home: Home, session_id: str) -> Iterator[Session]:
    session = Session.open(home, session_id, limits=LIMITS)
    yield session
    session.close()
