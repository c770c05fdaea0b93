import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loopd.audit import AuditLog, verify
from loopd.errors import AuditError
from loopd.proto.canonical import canonical, sha256


def lines_of(directory: Path, number: int) -> list[bytes]:
    return (directory / f"{number}.jsonl").read_bytes().splitlines(keepends=True)


def records_of(directory: Path, number: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(directory, number)]


def write(directory: Path, *events: str, max_bytes: int = 1_000_000) -> None:
    log = AuditLog.open(directory, max_bytes=max_bytes)
    for event in events:
        log.append(event, session="s1", text="ü")
    log.close()


def faults_of(directory: Path) -> tuple[str, ...]:
    return verify(directory).faults


def test_each_line_is_canonical_numbered_and_names_the_hash_of_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, "started", "stopped")
    lines, records = lines_of(tmp_path, 1), records_of(tmp_path, 1)
    assert lines == [canonical(record) + b"\n" for record in records]
    assert [(it["n"], it["event"]) for it in records] == [(1, "audit_opened"), (2, "started"), (3, "stopped")]
    assert [it["previous"] for it in records] == [None, sha256(lines[0]), sha256(lines[1])]
    assert records[0]["follows"] is None
    assert (records[1]["session"], records[1]["text"]) == ("s1", "ü")
    verdict = verify(tmp_path)
    assert (verdict.files, verdict.records, verdict.torn, verdict.faults) == (1, 3, (), ())


def test_facts_cannot_forge_the_chain(tmp_path: Path) -> None:
    log = AuditLog.open(tmp_path)
    log.append("started", n=99, previous="x", at="never")
    assert faults_of(tmp_path) == ()
    assert records_of(tmp_path, 1)[1]["n"] == 2


def test_each_writer_begins_a_file_that_names_the_highest(tmp_path: Path) -> None:
    write(tmp_path, "one")
    write(tmp_path, "two")
    named = records_of(tmp_path, 2)[0]["follows"]
    assert named == {"file": "1.jsonl", "line": 2, "sha256": sha256(lines_of(tmp_path, 1)[1]), "torn": False}
    assert faults_of(tmp_path) == ()


def test_a_full_file_is_followed_by_one_that_names_the_writers_own(tmp_path: Path) -> None:
    log = AuditLog.open(tmp_path, max_bytes=200)
    other = AuditLog.open(tmp_path)
    log.append("event")
    log.append("event")
    assert [records_of(tmp_path, number)[0]["follows"] for number in (2, 3)] == [
        {"file": "1.jsonl", "line": 1, "sha256": sha256(lines_of(tmp_path, 1)[0]), "torn": False},
        {"file": "1.jsonl", "line": 2, "sha256": sha256(lines_of(tmp_path, 1)[1]), "torn": False},
    ]
    log.close()
    other.close()
    assert faults_of(tmp_path) == ()


def test_numbers_are_ordered_as_numbers(tmp_path: Path) -> None:
    for _ in range(11):
        write(tmp_path)
    (tmp_path / "notes.txt").write_text("not an audit file")
    assert records_of(tmp_path, 11)[0]["follows"]["file"] == "10.jsonl"
    assert verify(tmp_path).files == 11


def test_two_writers_at_once_have_a_file_each(tmp_path: Path) -> None:
    first, second = AuditLog.open(tmp_path), AuditLog.open(tmp_path)
    for log in (first, second, first, second):
        log.append("event")
    assert [len(lines_of(tmp_path, number)) for number in (1, 2)] == [3, 3]
    assert faults_of(tmp_path) == ()


def test_a_file_whose_number_was_taken_meanwhile_gets_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr("loopd.audit._files", lambda _directory: [])
    write(tmp_path)
    monkeypatch.undo()
    assert verify(tmp_path).files == 2


def test_a_named_file_that_has_grown_since_is_good(tmp_path: Path) -> None:
    log = AuditLog.open(tmp_path)
    write(tmp_path)
    log.append("later")
    log.close()
    assert faults_of(tmp_path) == ()


def test_a_file_that_ends_torn_is_said_named_and_left(tmp_path: Path) -> None:
    write(tmp_path, "one", "two")
    path = tmp_path / "1.jsonl"
    torn = path.read_bytes()[:-7]
    path.write_bytes(torn)
    write(tmp_path, "three")
    named = records_of(tmp_path, 2)[0]["follows"]
    assert (named["line"], named["torn"]) == (2, True)
    verdict = verify(tmp_path)
    assert (verdict.torn, verdict.faults, verdict.records) == ((path,), (), 4)
    assert path.read_bytes() == torn


def test_an_end_that_is_no_beginning_of_a_record_is_no_torn_line(tmp_path: Path) -> None:
    write(tmp_path, "started")
    (tmp_path / "1.jsonl").write_bytes(b"".join(lines_of(tmp_path, 1)) + b"\x07garbage")
    assert "no beginning of a record" in faults_of(tmp_path)[0]


def test_a_file_that_somebody_removed_takes_no_more_records(tmp_path: Path) -> None:
    log = AuditLog.open(tmp_path, max_bytes=1_000_000)
    (tmp_path / "1.jsonl").unlink()
    with pytest.raises(AuditError, match="removed"):
        log.append("deleted")
    log.append("goes on in a new file")
    assert [it["event"] for it in records_of(tmp_path, 1)] == ["audit_opened", "goes on in a new file"]
    log.close()


def test_an_empty_file_can_be_followed(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(b"")
    write(tmp_path)
    assert records_of(tmp_path, 2)[0]["follows"] == {"file": "1.jsonl", "line": 0, "sha256": None, "torn": False}
    assert faults_of(tmp_path) == ()


def change(line: bytes, **values: Any) -> bytes:
    return canonical(json.loads(line) | values) + b"\n"


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda lines: [lines[0], change(lines[1], event="nothing"), lines[2]], "1.jsonl:3: the hash"),
        (lambda lines: [lines[0], lines[2]], "1.jsonl:2: expected the record with n = 2"),
        (lambda lines: [lines[0], lines[2], lines[1]], "n = 2"),
        (lambda lines: [*lines[:2], change(lines[2], event="nothing")], "line 3 of 1.jsonl is not the one"),
        (lambda lines: lines[:2], "line 3 of 1.jsonl, which has 2 lines"),
        (lambda lines: [*lines[:2], b"nonsense\n"], "not JSON"),
        (lambda lines: [*lines[:2], b"[]\n"], "n = 3"),
        (lambda lines: [change(lines[0], event="started"), *lines[1:]], "line 1 must be audit_opened"),
        (lambda lines: [change(lines[0], follows="x"), *lines[1:]], "line 1 must be audit_opened"),
        (lambda lines: [change(lines[0], follows={"file": "7.jsonl"}), *lines[1:]], "7.jsonl, which is gone"),
        (lambda lines: [b"\xff\n", *lines[1:]], "not JSON"),
    ],
)
def test_every_change_to_what_was_written_is_found(
    tmp_path: Path, damage: Callable[[list[bytes]], list[bytes]], why: str
) -> None:
    write(tmp_path, "one", "two")
    write(tmp_path)
    assert faults_of(tmp_path) == ()
    (tmp_path / "1.jsonl").write_bytes(b"".join(damage(lines_of(tmp_path, 1))))
    assert any(why in fault for fault in faults_of(tmp_path))


def test_a_file_that_is_gone_is_missed(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path)
    (tmp_path / "1.jsonl").unlink()
    assert faults_of(tmp_path) == (f"{tmp_path / '2.jsonl'}:1: follows 1.jsonl, which is gone",)


def test_a_directory_without_files_is_good_and_one_that_is_not_there_is_not(tmp_path: Path) -> None:
    assert verify(tmp_path).files == 0
    with pytest.raises(AuditError, match="nowhere"):
        verify(tmp_path / "nowhere")
    with pytest.raises(AuditError, match="nowhere"):
        AuditLog.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "fault"), [("write", errno.ENOSPC), ("write", 0), ("fdatasync", errno.ENOSPC), ("fdatasync", errno.EIO)]
)
def test_after_a_failure_the_file_is_left_and_the_next_record_begins_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: int
) -> None:
    log = AuditLog.open(tmp_path)
    log.append("one")
    real = os.write

    def broken(*args: Any) -> int:
        written = real(args[0], args[1][:20]) if name == "write" else 0
        if fault:
            raise OSError(fault, os.strerror(fault))
        return written

    monkeypatch.setattr(os, name, broken)
    with pytest.raises(AuditError, match=r"1\.jsonl"):
        log.append("two")
    left = (tmp_path / "1.jsonl").read_bytes()
    with pytest.raises(AuditError, match=r"2\.jsonl"):
        log.append("two")
    assert [path.name for path in tmp_path.iterdir()] == ["1.jsonl"]
    monkeypatch.undo()
    log.append("two")
    log.close()
    assert (tmp_path / "1.jsonl").read_bytes() == left
    first, second = records_of(tmp_path, 2)
    assert first["follows"]["torn"] == (name == "write")
    assert second["event"] == "two"
    assert faults_of(tmp_path) == ()


@pytest.mark.parametrize("function", ["fsync", "fdatasync"])
def test_a_log_that_cannot_be_synced_is_not_opened_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, function, broken)
    with pytest.raises(AuditError, match=str(tmp_path)):
        AuditLog.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_when_the_kernel_takes_no_more_the_append_fails(tmp_path: Path) -> None:
    log = AuditLog.open(tmp_path)
    size_bytes = (tmp_path / "1.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes + 10, hard))
    try:
        with pytest.raises(AuditError, match=r"of \d+ bytes were taken"):
            log.append("one")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    log.append("one")
    log.close()
    assert faults_of(tmp_path) == ()


@pytest.mark.parametrize("fact", [float("nan"), "\ud800", object()])
def test_a_fact_that_cannot_be_written_writes_nothing(tmp_path: Path, fact: object) -> None:
    log = AuditLog.open(tmp_path)
    with pytest.raises(AuditError, match="started"):
        log.append("started", fact=fact)
    log.append("started")
    log.close()
    assert verify(tmp_path).records == 2


def test_append_after_close_is_refused(tmp_path: Path) -> None:
    log = AuditLog.open(tmp_path)
    log.close()
    log.close()
    with pytest.raises(AuditError, match="closed"):
        log.append("late")


def test_only_the_owner_may_read_the_log(tmp_path: Path) -> None:
    write(tmp_path)
    assert (tmp_path / "1.jsonl").stat().st_mode & 0o777 == 0o600


def test_verify_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "one")
    for name in ("write", "ftruncate", "fsync", "fdatasync", "rename", "unlink"):
        monkeypatch.setattr(os, name, None)
    assert faults_of(tmp_path) == ()
