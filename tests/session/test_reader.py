import errno
import os
import shutil
from pathlib import Path

import pytest

from loopd.errors import SessionBusy, SessionIoError, SessionNotFound, SessionRefused, UsageError
from loopd.home import Home
from loopd.proto.records import FORMAT_VERSION, Parent, SessionStart, encode_record
from loopd.session import files, reader
from loopd.session.replay import Request
from loopd.session.store import Session, dir_for, make, sweep
from tests.session.builders import (
    AT,
    LIMITS,
    answer,
    create,
    end,
    log_of,
    make_baseline,
    records_of,
    say,
    say_with_tool,
    step,
    usage,
    user,
)
from tests.session.crash import killed_at


def write_epoch(home: Home, epoch: int, **facts: object) -> None:
    """Write a whole later epoch of `s1`, as the end of a compaction leaves it."""
    baseline = make_baseline(system_prompt=f"epoch {epoch}")
    values = {"at": AT, "version": FORMAT_VERSION, "epoch": epoch, "slot": 0, "owner_uid": 1000}
    start = SessionStart.model_validate(values | {"baseline": baseline.sha256()} | facts)
    (dir_for(home, "s1") / f"{epoch}.baseline.json").write_bytes(baseline.encoded())
    (dir_for(home, "s1") / f"{epoch}.jsonl").write_bytes(encode_record(start))


def test_a_live_session_is_read_without_its_lock_up_to_its_last_whole_batch(home: Home, session: Session) -> None:
    say_with_tool(session)
    expected = list(session.records())
    with log_of(home).open("ab") as file:
        file.write(b"".join(encode_record(record) for record in step(session, "half")[:2]) + b'{"at":')
    assert list(reader.read_records(home, "s1")) == expected
    assert list(reader.read_records(home, "s1", 4)) == expected[3:]
    assert list(reader.read_records(home, "s1", 99)) == []


def test_a_refused_session_is_read_up_to_its_bad_line(home: Home, session: Session) -> None:
    say(session)
    expected = list(session.records())
    batch = step(session, "half")
    session.close()
    with log_of(home).open("ab") as file:
        file.write(encode_record(batch[0]) + b'{"at":\n' + encode_record(batch[2]))
    assert list(reader.read_records(home, "s1", unclosed=True)) == [*expected, (6, batch[0])]
    assert list(reader.read_records(home, "s1")) == expected


def test_what_is_not_there_is_not_found(home: Home, session: Session) -> None:
    for read in (reader.verify, reader.usages, reader.delete):
        with pytest.raises(SessionNotFound):
            read(home, "s2")
        with pytest.raises(UsageError):
            read(home, "../s1")
    with pytest.raises(SessionNotFound):
        list(reader.read_records(home, "s2"))
    with pytest.raises(SessionNotFound, match="epoch 7"):
        list(reader.read_records(home, session.id, epoch=7))


def test_usages_come_from_all_epochs_and_a_summary_belongs_to_the_epoch_before(home: Home, session: Session) -> None:
    say_with_tool(session)
    session.close()
    summary = usage(Request([], 0, "sha256:" + "0" * 64), 99, 9)
    write_epoch(home, 1, parent=Parent(id="s1", epoch=0, line=8), next_call=2, keys=("old",), summary_usage=summary)
    again = Session.open(home, "s1", limits=LIMITS)
    assert (again.epoch, again.next_call, dict(again.keys), again.last_usage) == (1, 2, {"old": 0}, None)
    say(again)
    assert [(epoch, line, it.prompt_tokens) for epoch, line, it in reader.usages(home, "s1")] == [
        (0, 4, 20),
        (0, 7, 20),
        (0, 8, 99),
        (1, 4, 20),
    ]
    assert [summary.title for summary in reader.summaries(home)] == ["What time is it?"]
    assert [line for line, _ in reader.read_records(home, "s1", epoch=0)] == list(range(1, 9))
    assert reader.verify(home, "s1").epochs == 2
    again.close()


def test_verify_counts_what_is_good(home: Home, session: Session) -> None:
    say_with_tool(session)
    verdict = reader.verify(home, "s1")
    assert (verdict.faults, verdict.epochs, verdict.lines, verdict.open_turn) == ((), 1, 8, False)
    assert verdict.size_bytes == session.size_bytes
    session.append(*step(session, "open"))
    assert reader.verify(home, "s1").open_turn


def test_verify_looks_again_before_it_calls_a_batch_torn(
    home: Home, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = b"".join(encode_record(record) for record in [*step(session, "being written"), end()])
    with log_of(home).open("ab", buffering=0) as file:
        file.write(batch[:100])
        monkeypatch.setattr(reader, "_pause", lambda: file.write(batch[100:]))
        verdict = reader.verify(home, "s1")
    assert verdict.faults == ()
    assert verdict.lines == 5


def test_verify_reports_a_history_that_was_not_sent_so(home: Home, session: Session) -> None:
    session.append(user("a", "k"), answer("b"), usage(Request([], 1, "sha256:" + "0" * 64)), end())
    (fault,) = reader.verify(home, "s1").faults
    assert "does not begin with the last request" in str(fault)
    assert fault.exit_code == 4


def test_verify_reports_a_baseline_that_is_not_the_logs(home: Home, session: Session) -> None:
    (dir_for(home, "s1") / "0.baseline.json").write_bytes(b"{}")
    (fault,) = reader.verify(home, "s1").faults
    assert "0.baseline.json" in str(fault)


def test_reading_changes_nothing(home: Home, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    say(session)
    session.close()
    for name in ("write", "ftruncate", "fsync", "fdatasync", "rename", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, None)
    reader.verify(home, "s1")
    reader.summaries(home)
    reader.usages(home, "s1")


def test_a_list_has_the_one_written_last_first(home: Home) -> None:
    for number, text in enumerate(["first", "second\nline", "x" * 100_000]):
        session = create(home, f"s{number}")
        say(session, text)
        session.close()
        os.utime(log_of(home, f"s{number}"), (1000 + number, 1000 + number))
    (home.sessions / ".create-x").mkdir()
    (home.sessions / "Not an id").mkdir()
    listed = reader.summaries(home)
    assert [(it.id, it.title[:8], it.modified, it.owner_uid, it.refused) for it in listed] == [
        ("s2", "x" * 8, 1002.0, 1000, None),
        ("s1", "second", 1001.0, 1000, None),
        ("s0", "first", 1000.0, 1000, None),
    ]
    assert [it.size_bytes for it in listed] == [log_of(home, it.id).stat().st_size for it in listed]


def test_a_title_may_be_cut_in_the_middle_of_a_character(home: Home, session: Session) -> None:
    for shift in range(4):
        other = create(home, f"t{shift}")
        say(other, "a" * shift + "🕒" * 2000)
        other.close()
    titles = {it.id: it.title for it in reader.summaries(home)}
    assert [titles[f"t{shift}"][:5] for shift in range(4)] == ["🕒" * 5, "a🕒🕒🕒🕒", "aa🕒🕒🕒", "aaa🕒🕒"]
    assert titles["s1"] == ""


def test_a_second_line_that_is_damaged_gives_no_title(home: Home, session: Session) -> None:
    say(session)
    for line in (b"nonsense", b"[]", b'{"text":5}', b"", b"\xff"):
        lines = log_of(home).read_bytes().splitlines(keepends=True)
        log_of(home).write_bytes(b"".join([lines[0], line + b"\n", *lines[2:]]))
        assert [it.title for it in reader.summaries(home)] == [""]


def test_a_list_shows_what_is_refused_and_goes_on(home: Home, session: Session) -> None:
    say(session)
    for session_id in ("cut", "half", "start", "bare"):
        other = create(home, session_id)
        say(other)
        other.close()
    log_of(home, "cut").write_bytes(log_of(home, "cut").read_bytes()[:-1])
    log_of(home, "half").write_bytes(b"".join(log_of(home, "half").read_bytes().splitlines(keepends=True)[:3]))
    log_of(home, "start").write_bytes(b"nonsense\n")
    log_of(home, "bare").unlink()
    refused = {it.id: it.refused for it in reader.summaries(home)}
    assert refused["s1"] is None
    assert "newline" in str(refused["cut"])
    assert "assistant" in str(refused["half"])
    assert "not JSON" in str(refused["start"])
    assert "no log" in str(refused["bare"])


def test_a_deleted_session_is_gone_and_an_open_one_stays(home: Home, session: Session) -> None:
    with pytest.raises(SessionBusy):
        reader.delete(home, "s1")
    session.close()
    reader.delete(home, "s1")
    assert list(home.sessions.iterdir()) == []
    create(home).close()


def test_a_crash_in_delete_leaves_a_whole_session_or_none(home: Home) -> None:
    create(home).close()
    point, outcomes = 0, set()
    while killed_at(point, lambda: reader.delete(home, "s1")):
        sweep(home)
        there = dir_for(home, "s1").exists()
        outcomes.add(there)
        if there:
            assert reader.verify(home, "s1").faults == ()
        else:
            create(home).close()
        point += 1
    assert outcomes == {True, False}


def broken_directory(home: Home, kind: str) -> Path:
    path = dir_for(home, "odd")
    if kind == "file":
        path.write_bytes(b"")
    elif kind == "dangling link":
        path.symlink_to(home.path / "nowhere")
    else:
        create(home, "odd").close()
    return path


@pytest.mark.parametrize(
    ("kind", "why"), [("file", "a file"), ("dangling link", "a symbolic link"), ("foreign owner", "belongs to user")]
)
def test_a_directory_that_is_none_of_ours_is_refused_alone(
    home: Home, session: Session, monkeypatch: pytest.MonkeyPatch, kind: str, why: str
) -> None:
    path = broken_directory(home, kind)
    if kind == "foreign owner":
        monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    for look in (reader.verify, reader.usages, reader.delete):
        with pytest.raises(SessionRefused, match=why) as caught:
            look(home, "odd")
        assert str(path) in str(caught.value)
        assert caught.value.hint
    with pytest.raises(SessionRefused, match=why):
        Session.open(home, "odd", limits=LIMITS)
    assert why in str({it.id: it.refused for it in reader.summaries(home)}["odd"])
    monkeypatch.undo()
    assert {it.id: it.refused for it in reader.summaries(home)}["s1"] is None


def test_a_directory_that_may_not_be_read_is_an_error_with_its_path_and_the_others_are_listed(
    home: Home, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = broken_directory(home, "not readable")
    real = os.open

    def forbidden(name: str | Path, flags: int, *more: int) -> int:
        if Path(name) == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(name, flags, *more)

    monkeypatch.setattr(os, "open", forbidden)
    with pytest.raises(SessionIoError, match=str(path)):
        Session.open(home, "odd", limits=LIMITS)
    with pytest.raises(SessionIoError, match=str(path)):
        reader.verify(home, "odd")
    listed = {it.id: it.refused for it in reader.summaries(home)}
    assert "Permission denied" in str(listed["odd"])
    assert listed["s1"] is None


def test_a_session_that_is_removed_while_it_is_listed_is_left_out(
    home: Home, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(home, "s2").close()
    real = files.open_directory

    def vanishing(session_id: str, path: Path) -> int:
        if session_id == "s2":
            shutil.rmtree(path)
        return real(session_id, path)

    monkeypatch.setattr(files, "open_directory", vanishing)
    assert [it.id for it in reader.summaries(home)] == ["s1"]


def test_a_session_can_be_made_from_bytes_alone(home: Home, session: Session) -> None:
    say(session)
    lines = [encode_record(record) for record in records_of(session)]
    os.close(make(home, "s2", make_baseline().encoded(), lines))
    assert reader.verify(home, "s2").lines == 5
