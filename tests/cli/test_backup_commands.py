"""`loopd backup` and `restore` as a person types them: the file is there whole, or not at all."""

import errno
import os
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import BinaryIO

import pytest
from click.testing import CliRunner, Result

from loopd.cli.backup_commands import backup, restore
from loopd.cli.session_commands import audit
from loopd.home import Home
from loopd.session import backup as backups
from tests.session.builders import create, make_home, say
from tests.session.crash import killed_at


@dataclass
class Settings:
    home: Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = make_home(tmp_path / "home")
    live = create(home)
    say(live)
    live.close()
    return home


def save(home: Home, file: Path) -> Result:
    return CliRunner().invoke(backup, [str(file)], obj=Settings(home))


def test_file_is_private_and_holds_every_session(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "saved.tar"
    assert save(home, file).output == "saved: 1 sessions\n"
    assert file.stat().st_mode & 0o777 == 0o600
    other = make_home(tmp_path / "other")
    result = CliRunner().invoke(restore, [str(file)], obj=Settings(other))
    assert result.output == "restored: 1 sessions\n"


def test_backup_that_breaks_off_leaves_nothing_behind(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in str(save(home, folder / "saved.tar").exception)
    assert list(folder.iterdir()) == []


def test_backup_killed_anywhere_leaves_nothing_that_the_next_one_does_not_remove(home: Home, tmp_path: Path) -> None:
    def broken_off(point: int) -> bool:
        folder = tmp_path / str(point)
        folder.mkdir()
        killed = killed_at(point, lambda: save(home, folder / "first.tar"))
        assert save(home, folder / "next.tar").output == "saved: 1 sessions\n"
        assert {path.name for path in folder.iterdir()} <= {"first.tar", "next.tar"}
        return killed

    points = next(point for point in count() if not broken_off(point))
    assert points > 4, "it was killed while it wrote, too"
    for whole in tmp_path.glob("*/first.tar"):
        assert CliRunner().invoke(restore, [str(whole)], obj=Settings(home)).output == "restored: 1 sessions\n"


def test_backup_leaves_alone_what_another_one_is_making(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = backups.backup

    def slow(home: Home, target: BinaryIO) -> backups.Contents:
        monkeypatch.undo()
        assert save(home, tmp_path / "fast.tar").output == "saved: 1 sessions\n"
        return real(home, target)

    monkeypatch.setattr(backups, "backup", slow)
    assert save(home, tmp_path / "slow.tar").output == "saved: 1 sessions\n"
    assert {path.name for path in tmp_path.iterdir()} == {"home", "fast.tar", "slow.tar"}


def test_file_that_is_there_is_not_overwritten(home: Home, tmp_path: Path) -> None:
    file = tmp_path / "saved.tar"
    file.write_text("mine")
    assert isinstance(save(home, file).exception, FileExistsError)
    assert file.read_text() == "mine"


def test_restored_audit_log_is_verified_too(home: Home, tmp_path: Path) -> None:
    other = make_home(tmp_path / "other")
    CliRunner().invoke(audit, ["verify"], obj=Settings(home))
    (home.audit / "1.jsonl").write_bytes(b"nonsense\n")
    save(home, tmp_path / "saved.tar")
    CliRunner().invoke(restore, [str(tmp_path / "saved.tar")], obj=Settings(other))
    (restored,) = other.audit.glob("restored-*")
    fault = CliRunner().invoke(audit, ["verify"], obj=Settings(other)).exception
    assert f"{restored / '1.jsonl'}:1: " in str(fault)
