import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loopd.config import LoopTable
from loopd.errors import (
    BaselineError,
    EncodeError,
    ReplayViolation,
    SessionBusy,
    SessionExists,
    SessionNotFound,
    SessionReadOnly,
    SessionRefused,
    TornLog,
    UsageError,
)
from loopd.home import Home
from loopd.proto.canonical import canonical, sha256
from loopd.proto.records import SessionStart, encode_record
from loopd.session.replay import Request, replay, tool_call
from loopd.session.store import Session, dir_for, make, sweep
from tests.session.builders import (
    AT,
    CLOCK,
    FIND,
    LIMITS,
    answer,
    closing,
    create,
    end,
    give,
    log_of,
    make_baseline,
    records_of,
    reopen,
    result,
    say,
    say_with_tool,
    step,
    usage,
    user,
)
from tests.session.crash import killed_at


def test_a_new_session_has_its_start_and_nothing_else(home: Home, session: Session) -> None:
    assert sorted(path.name for path in dir_for(home, "s1").iterdir()) == ["0.baseline.json", "0.jsonl"]
    assert (session.id, session.epoch, session.lines, session.next_call, session.title) == ("s1", 0, 1, 1, "")
    assert session.size_bytes == log_of(home).stat().st_size
    assert isinstance(session.start, SessionStart)
    assert (session.start.owner_uid, session.start.slot) == (1000, 0)
    assert session.start.baseline == session.baseline.sha256() == make_baseline().sha256()
    assert session.open_turn is None
    assert session.last_usage is None
    assert not session.read_only


def test_only_the_owner_may_read_a_session(home: Home, session: Session) -> None:
    directory = dir_for(home, session.id)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


@pytest.mark.parametrize("session_id", ["", "A", "a/b", "..", "-a", "a" * 65, "a\n", "ä"])
def test_an_id_is_checked_before_it_touches_a_path(home: Home, session_id: str) -> None:
    with pytest.raises(UsageError):
        dir_for(home, session_id)
    with pytest.raises(UsageError):
        create(home, session_id)
    with pytest.raises(UsageError):
        Session.open(home, session_id, limits=LIMITS)


def test_a_session_is_not_made_twice(home: Home, session: Session) -> None:
    say(session)
    with pytest.raises(SessionExists):
        create(home)
    assert len(records_of(session)) == 5


def test_of_two_that_make_a_session_at_once_one_gets_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    create(home).close()
    answers = iter([False, True])
    monkeypatch.setattr(os.path, "lexists", lambda _path: next(answers))
    with pytest.raises(SessionExists):
        create(home)
    assert [path.name for path in home.sessions.iterdir()] == ["s1"]


def test_a_session_that_is_not_there_is_not_found(home: Home) -> None:
    with pytest.raises(SessionNotFound):
        Session.open(home, "s1", limits=LIMITS)
    dir_for(home, "s1").mkdir()
    with pytest.raises(SessionNotFound):
        Session.open(home, "s1", limits=LIMITS)


def test_a_crash_in_create_leaves_no_session_or_a_whole_one(home: Home) -> None:
    point, outcomes = 0, set()
    while killed_at(point, lambda: create(home)):
        sweep(home)
        there = dir_for(home, "s1").exists()
        outcomes.add(there)
        assert [path.name for path in home.sessions.iterdir()] == (["s1"] if there else [])
        if there:
            session = Session.open(home, "s1", limits=LIMITS)
            say(session)
            session.close()
            for path in dir_for(home, "s1").iterdir():
                path.unlink()
            dir_for(home, "s1").rmdir()
        point += 1
    assert outcomes == {True, False}


def test_a_sweep_leaves_what_is_being_made_alone(home: Home) -> None:
    draft, leftover = home.sessions / ".create-s1-00000000", home.refused / ".repair-s2-00000000"
    draft.mkdir()
    leftover.mkdir()
    (leftover / "0.jsonl").write_bytes(b"half")
    script = (
        "import fcntl, os, sys\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(draft)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"locked\n"
        assert sweep(home) == [leftover.name]
        maker.communicate()
    assert sweep(home) == [draft.name]


def test_a_sweep_leaves_alone_what_is_no_directory(home: Home, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (home.sessions / ".editor.swp").write_text("somebody's")
    (home.sessions / ".link").symlink_to(elsewhere)
    assert sweep(home) == []
    assert sorted(path.name for path in home.sessions.iterdir()) == [".editor.swp", ".link"]


def test_a_session_has_one_writer_among_all_processes(home: Home, session: Session) -> None:
    with pytest.raises(SessionBusy):
        Session.open(home, "s1", limits=LIMITS)
    session.close()
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from loopd.config import LoopTable\n"
        "from loopd.home import Home\n"
        "from loopd.session.store import Session\n"
        "session = Session.open(Home(Path(sys.argv[1])), 's1', limits=LoopTable())\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(home.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(SessionBusy):
            Session.open(home, "s1", limits=LIMITS)
        other.kill()
        other.communicate()
    Session.open(home, "s1", limits=LIMITS).close()


def test_what_was_appended_is_there_after_reopening(home: Home, session: Session) -> None:
    say(session, "First question\nwith a second line", key="k1")
    say_with_tool(session)
    session.append(*step(session, "And now?", CLOCK, FIND, key="k3"))
    give(session)
    records = records_of(session)
    numbers = (session.size_bytes, session.lines, session.next_call)
    facts = (session.title, dict(session.keys), session.last_usage, session.open_turn)
    with reopened(session, home) as again:
        assert records_of(again) == records
        assert (again.size_bytes, again.lines, again.next_call) == numbers
        assert (again.title, dict(again.keys), again.last_usage, again.open_turn) == facts
        assert again.title == "First question"
        assert again.keys == {"k1": 2, "key-5": 6, "k3": 13}
        assert again.request(None).messages == replay(again.baseline, records)


def test_records_can_be_read_from_any_line_to_any_line(session: Session) -> None:
    say_with_tool(session)
    everything = list(session.records())
    assert [line for line, _ in everything] == list(range(1, session.lines + 1))
    assert list(session.records(3)) == everything[2:]
    assert list(session.records(3, 5)) == everything[2:4]
    assert list(session.records(3, 99)) == everything[2:]
    assert list(session.records(99)) == []


def test_each_batch_is_one_write_and_one_sync(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("write", "fdatasync"):
        monkeypatch.setattr(os, name, _noted(name, calls))
    say_with_tool(session)
    assert calls == ["write", "fdatasync"] * 3


def test_a_record_exists_in_memory_only_after_the_sync(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = os.fdatasync

    def sync(descriptor: int) -> None:
        seen.append(session.lines)
        real(descriptor)

    monkeypatch.setattr(os, "fdatasync", sync)
    say(session)
    assert seen == [1]
    assert session.lines == 5


def test_open_syncs_before_it_believes_what_it_read(
    home: Home, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(session)
    session.close()
    calls: list[str] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, _noted(name, calls))
    Session.open(home, "s1", limits=LIMITS).close()
    assert calls == ["fdatasync", "fsync", "fsync"]


def test_append_after_close_is_refused(session: Session) -> None:
    batch = step(session, "hello")
    session.close()
    session.close()
    assert session.read_only
    with pytest.raises(SessionReadOnly, match="closed"):
        session.append(*batch)


def test_an_append_that_is_no_batch_writes_nothing(home: Home, session: Session) -> None:
    size = log_of(home).stat().st_size
    for records in ((user("a", "k"),), (answer("a"), usage(session.request("a"))), (result(1, CLOCK),), (end(),), ()):
        with pytest.raises(EncodeError):
            session.append(*records)
    assert log_of(home).stat().st_size == size
    say(session)


def test_a_record_that_is_too_large_writes_nothing_and_names_the_limit(home: Home) -> None:
    limits = LoopTable(max_record_bytes=65_536)
    session = Session.create(home, "s1", make_baseline(), owner_uid=0, limits=limits)
    size = session.size_bytes
    with pytest.raises(EncodeError, match="max_record_bytes = 65536"):
        session.append(*step(session, "x" * 65_536))
    assert log_of(home).stat().st_size == session.size_bytes == size
    say(session)
    session.close()


def test_a_lone_surrogate_writes_nothing(home: Home, session: Session) -> None:
    size = session.size_bytes
    request = session.request("a")
    for text in ("\ud800", "a\udfff"):
        with pytest.raises(EncodeError, match="surrogate"):
            session.append(user(text, "k"), answer("b"), usage(request))
    assert log_of(home).stat().st_size == session.size_bytes == size


def test_call_numbers_go_on_where_the_log_ends(home: Home, session: Session) -> None:
    say_with_tool(session)
    assert session.next_call == 2
    with reopened(session, home) as again:
        assert again.next_call == 2
        say_with_tool(again)
        assert again.next_call == 3


def test_the_same_call_id_in_two_turns_is_two_calls(session: Session) -> None:
    again = tool_call(CLOCK.id, "call_tool", '{"name":"device"}')
    say_with_tool(session, "one", CLOCK)
    session.append(*step(session, "two", again, again))
    turn = session.open_turn
    assert turn is not None
    assert [number for number, _ in turn.pending] == [2, 3]
    give(session, "first")
    give(session, "second")
    session.append(*step(session, None), end())
    results = [record for record in records_of(session) if record.type == "tool_result"]
    assert [(it.call, it.id, it.content) for it in results] == [
        (1, "call_0", "ok"),
        (2, "call_0", "first"),
        (3, "call_0", "second"),
    ]


def test_a_turn_without_an_end_is_ended_with_results_that_say_so(home: Home, session: Session) -> None:
    session.append(*step(session, "Two things", CLOCK, FIND, key="k1"))
    give(session, "one")
    with reopened(session, home) as again:
        turn = again.open_turn
        assert turn is not None
        assert (turn.key, turn.line, turn.pending) == ("k1", 2, ((2, FIND),))
        again.append(result(2, FIND, "(outcome unknown: interrupted)"))
        turn = again.open_turn
        assert turn is not None
        assert turn.after_result
        again.append(closing(), end("interrupted"))
        assert again.open_turn is None
        say(again)


def test_a_clock_that_steps_back_changes_nothing(home: Home, session: Session) -> None:
    say(session)
    earlier = "2001-01-01T00:00:00.000000Z"
    batch = [record.model_copy(update={"at": earlier}) for record in step(session, "an hour ago")]
    session.append(*batch, end())
    with reopened(session, home) as again:
        assert [record.at for record in records_of(again)][1:] == [AT] * 4 + [earlier] * 3 + [AT]
        say(again)


def test_a_request_that_was_recorded_otherwise_stops_the_next_also_after_reopening(
    home: Home, session: Session
) -> None:
    session.append(user("a", "k"), answer("b"), usage(Request([], 1, "sha256:" + "0" * 64)), end())
    with pytest.raises(ReplayViolation):
        session.request("next")
    with reopened(session, home) as again, pytest.raises(ReplayViolation):
        again.request("next")


def test_only_new_messages_are_hashed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    say(session, "x" * 100_000)
    baseline = session.baseline
    monkeypatch.setattr(type(baseline), "encoded", None)
    request = session.request("short")
    assert request.request_bytes > 100_000
    assert len(request.messages) == 4


@pytest.mark.parametrize("change", [{"version": 9}, {"hostname": "pi"}, {"arguments": "xml"}])
def test_a_baseline_that_this_release_does_not_know_is_refused_by_name(home: Home, change: dict[str, Any]) -> None:
    data = canonical(json.loads(make_baseline().encoded()) | change)
    start = SessionStart(at=AT, version=1, epoch=0, slot=0, baseline=sha256(data), owner_uid=0)
    os.close(make(home, "s1", data, [encode_record(start)]))
    with pytest.raises(BaselineError, match=next(iter(change))):
        Session.open(home, "s1", limits=LIMITS)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_baseline_that_is_no_file_is_refused_with_its_path(
    home: Home, session: Session, make: Callable[[Path], None]
) -> None:
    session.close()
    path = dir_for(home, "s1") / "0.baseline.json"
    path.unlink()
    make(path)
    with pytest.raises(SessionRefused, match=str(path)):
        Session.open(home, "s1", limits=LIMITS)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[]", None])
def test_a_baseline_that_is_not_the_logs_is_refused(home: Home, session: Session, damage: bytes | None) -> None:
    path = dir_for(home, "s1") / "0.baseline.json"
    session.close()
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    with pytest.raises(BaselineError, match=r"0\.baseline\.json") as caught:
        Session.open(home, "s1", limits=LIMITS)
    assert caught.value.exit_code == 4


def test_a_baseline_without_a_log_is_removed_at_the_next_open(home: Home, session: Session) -> None:
    session.close()
    orphan = dir_for(home, "s1") / "1.baseline.json"
    orphan.write_bytes(b"half of a base")
    again = Session.open(home, "s1", limits=LIMITS)
    assert not orphan.exists()
    assert again.epoch == 0
    again.close()


def test_a_torn_log_is_refused_with_path_line_offset_and_kind(home: Home, session: Session) -> None:
    say(session)
    good = session.size_bytes
    session.close()
    with log_of(home).open("ab") as file:
        file.write(b'{"type":"user"}\n')
    with pytest.raises(TornLog) as caught:
        Session.open(home, "s1", limits=LIMITS)
    fault = caught.value
    assert str(fault).startswith(f"{log_of(home)}:6: ")
    assert (fault.line, fault.offset, fault.kind) == (6, good, "unknown_record")
    assert (fault.good_lines, fault.good_bytes) == (5, good)
    assert "loopd session verify s1" in fault.hint
    create(home, "s2").close()


def test_memory_holds_bytes_and_offsets_only(session: Session) -> None:
    say(session)
    assert isinstance(vars(session)["_at"].offsets, array)
    assert all(isinstance(message, bytes) for message in session.request(None).messages)


def _noted(name: str, calls: list[str]) -> Callable[..., Any]:
    real = getattr(os, name)

    def call(*args: Any) -> Any:
        calls.append(name)
        return real(*args)

    return call


@contextmanager
def reopened(session: Session, home: Home) -> Iterator[Session]:
    again = reopen(session, home)
    yield again
    again.close()
