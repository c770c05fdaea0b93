"""Backup and restore: nothing of a session is lost on the way, and nothing half is put back."""

import functools
import io
import itertools
import os
import tarfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from loopd import audit
from loopd.errors import HomeError, SessionExists
from loopd.home import Home
from loopd.session import backup as backups
from loopd.session import files, reader
from loopd.session.store import Session, sweep
from tests.session.builders import LIMITS, create, log_of, make_home, say
from tests.session.crash import killed_at


@pytest.fixture
def other(tmp_path: Path) -> Home:
    return make_home(tmp_path / "other")


def save(home: Home, tmp_path: Path) -> Path:
    path = tmp_path / "backup.tar"
    with path.open("wb") as file:
        backups.backup(home, file)
    return path


def restore(home: Home, path: Path) -> backups.Contents:
    with path.open("rb") as file:
        return backups.restore(home, file)


def tree(home: Home) -> dict[str, bytes]:
    return {str(path.relative_to(home.sessions)): path.read_bytes() for path in home.sessions.rglob("*.json*")}


def test_restored_sessions_are_the_saved_ones_byte_for_byte_and_go_on(
    home: Home, other: Home, session: Session, tmp_path: Path
) -> None:
    say(session, "one")
    with_it = create(home, "s2")
    with_it.close()
    contents = restore(other, save(home, tmp_path))
    assert contents.sessions == ("s1", "s2")
    assert tree(other) == tree(home)
    again = Session.open(other, "s1", limits=LIMITS)
    say(again, "two")
    again.close()
    assert not reader.verify(other, "s1").faults


def test_torn_log_is_saved_and_restored_as_it_is(home: Home, other: Home, session: Session, tmp_path: Path) -> None:
    say(session, "one")
    with log_of(home).open("ab") as file:
        file.write(b'{"type":"user"')
    contents = restore(other, save(home, tmp_path))
    assert contents.refused == ("s1",)
    assert log_of(other).read_bytes() == log_of(home).read_bytes()


def test_restoring_twice_changes_nothing(home: Home, session: Session, tmp_path: Path) -> None:
    say(session, "one")
    path = save(home, tmp_path)
    before = tree(home)
    restore(home, path)
    assert tree(home) == before


def test_restore_killed_anywhere_leaves_only_whole_sessions_and_is_run_again(
    home: Home, session: Session, tmp_path: Path
) -> None:
    say(session, "one")
    create(home, "s2").close()
    audit.AuditLog.open(home.audit).close()
    path = save(home, tmp_path)
    outcomes = set()
    for point in itertools.count():
        other = make_home(tmp_path / str(point))
        killed = killed_at(point, functools.partial(restore, other, path))
        sweep(other)
        there = tree(other)
        assert there.items() <= tree(home).items()
        outcomes.add(len(list(other.sessions.iterdir())))
        assert all(not reader.verify(other, directory.name).faults for directory in other.sessions.iterdir())
        assert not list(other.path.rglob(".*"))
        restore(other, path)
        assert tree(other) == tree(home)
        assert len(list(other.audit.glob("restored-*"))) == 1
        if not killed:
            break
    assert outcomes == {0, 1, 2}


def test_session_deleted_while_it_is_saved_is_left_out(
    home: Home, other: Home, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(session, "one")
    create(home, "s2").close()
    settled = reader.settled_epoch

    def deleting(session_id: str, directory: Path, epoch: int) -> object:
        if session_id == "s2":
            reader.delete(home, session_id)
        return settled(session_id, directory, epoch)

    monkeypatch.setattr(backups, "settled_epoch", deleting)
    assert restore(other, save(home, tmp_path)).sessions == ("s1",)


def test_neither_way_needs_memory_for_the_logs(home: Home, other: Home, session: Session, tmp_path: Path) -> None:
    say(session, "x" * 3_000_000)
    say(session, "y" * 3_000_000)
    log = log_of(home)
    log.write_bytes(log.read_bytes() + b"torn")  # saved as it is: the whole of it
    assert log.stat().st_size > 6_000_000
    path = save(home, tmp_path)
    tracemalloc.start()
    restore(other, path)
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()
    assert log_of(other).read_bytes() == log.read_bytes()


def test_audit_log_comes_back_as_a_chain_of_its_own(home: Home, other: Home, tmp_path: Path) -> None:
    for event in ("one", "two"):
        log = audit.AuditLog.open(home.audit)
        log.append(event)
        log.close()
    audit.AuditLog.open(other.audit).close()
    own = (other.audit / "1.jsonl").read_bytes()
    path = save(home, tmp_path)
    restore(other, path)
    restore(other, path)
    (restored,) = other.audit.glob("restored-*")
    assert {it.name: it.read_bytes() for it in restored.iterdir()} == {
        it.name: it.read_bytes() for it in home.audit.iterdir()
    }
    assert (other.audit / "1.jsonl").read_bytes() == own
    assert audit.verify(restored).faults == audit.verify(other.audit).faults == ()


def test_audit_log_that_the_home_holds_is_not_restored(home: Home, tmp_path: Path) -> None:
    log = audit.AuditLog.open(home.audit)
    path = save(home, tmp_path)
    log.append("later")
    log.close()
    restore(home, path)
    assert [it.name for it in home.audit.iterdir()] == ["1.jsonl"]


def test_backup_that_changes_while_it_is_read_restores_nothing(
    home: Home, other: Home, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(session, "a-word-to-change")
    path = save(home, tmp_path)
    at = path.read_bytes().index(b"a-word")
    write_new = files.write_new

    def changing(session_id: str, target: Path, pieces: Iterable[bytes]) -> None:
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), b"b", at)
        write_new(session_id, target, pieces)

    monkeypatch.setattr(files, "write_new", changing)
    with path.open("rb", buffering=0) as source, pytest.raises(HomeError, match="changed while it was read"):
        backups.restore(other, source)
    assert reader.summaries(other) == []


def test_session_with_other_contents_is_not_overwritten_and_nothing_is_restored(
    home: Home, other: Home, session: Session, tmp_path: Path
) -> None:
    create(home, "s0").close()
    say(session, "one")
    path = save(home, tmp_path)
    create(other, "s1").close()
    before = tree(other)
    with pytest.raises(SessionExists, match="nothing was restored"):
        restore(other, path)
    assert tree(other) == before


def test_backup_that_broke_off_is_refused_at_every_cut(
    home: Home, other: Home, session: Session, tmp_path: Path
) -> None:
    say(session, "one")
    path = save(home, tmp_path)
    data = path.read_bytes()
    with tarfile.open(path) as archive:
        manifest = archive.getmember("backup.json")
    for length in range(0, manifest.offset_data + manifest.size, 97):
        path.write_bytes(data[:length])
        with pytest.raises(HomeError):
            restore(other, path)
    assert tree(other) == {}


def test_changed_byte_is_found(home: Home, other: Home, session: Session, tmp_path: Path) -> None:
    say(session, "a-word-to-change")
    path = save(home, tmp_path)
    path.write_bytes(path.read_bytes().replace(b"a-word-to-change", b"a-word-to-chance"))
    with pytest.raises(HomeError, match=r"damaged: sessions/s1/0.jsonl"):
        restore(other, path)


@pytest.mark.parametrize(
    "name", ["../evil", "sessions/../../evil/0.jsonl", "/etc/passwd", "sessions/s1/run.sh", "audit/x"]
)
def test_foreign_names_are_refused(other: Home, tmp_path: Path, name: str) -> None:
    path = tmp_path / "foreign.tar"
    with tarfile.open(path, "w") as archive:
        facts = tarfile.TarInfo(name)
        facts.size = 1
        archive.addfile(facts, io.BytesIO(b"x"))
    with pytest.raises(HomeError, match="no backup of loopd"):
        restore(other, path)
