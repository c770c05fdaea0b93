"""Backup and restore: nothing of a session is lost on the way, and nothing half is put back."""

import io
import tarfile
from pathlib import Path

import pytest

from loopd.errors import HomeError, SessionExists
from loopd.home import Home
from loopd.session import backup as backups
from loopd.session import reader
from loopd.session.store import Session
from tests.session.builders import LIMITS, create, log_of, make_home, say


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


@pytest.mark.parametrize("name", ["../evil", "sessions/../../evil/0.jsonl", "/etc/passwd", "sessions/s1/run.sh"])
def test_foreign_names_are_refused(other: Home, tmp_path: Path, name: str) -> None:
    path = tmp_path / "foreign.tar"
    with tarfile.open(path, "w") as archive:
        facts = tarfile.TarInfo(name)
        facts.size = 1
        archive.addfile(facts, io.BytesIO(b"x"))
    with pytest.raises(HomeError, match="no backup of loopd"):
        restore(other, path)
