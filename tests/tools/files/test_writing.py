import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopd.errors import ToolError
from loopd.tools.files import writing
from loopd.tools.files.work import Stopped, Work
from tests.tools.files.tree import INSIDE, Tree, ordinary_user, public_directory, roots_of


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_file_is_made_replaced_and_appended_to(tree: Tree) -> None:
    path = tree.docs / "new.txt"
    assert tree("write", path="new.txt", content="one\n") == f"{path} was made: it has 4 bytes now."
    assert tree("write", path=str(path), content="ünö\n") == f"{path} was replaced: it has 6 bytes now."
    assert tree("write", path="new.txt", content="end", append=True) == f"{path} was appended to: it has 9 bytes now."
    assert path.read_text(encoding="utf-8") == "ünö\nend"
    assert tree("write", path="other.txt", content="", append=True).endswith("was made: it has 0 bytes now.")
    assert tree.leftovers() == []


def test_missing_directories_are_made_only_when_asked_for_with_the_rights_of_the_one_above(tree: Tree) -> None:
    tree.docs.chmod(0o2750)
    fault = tree.fault("write", path="a/b/new.txt", content="x")
    assert fault == f"There is no a in {tree.docs}. With directories set to true it is made."
    tree("write", path="a/b/new.txt", content="x", directories=True)
    assert (tree.docs / "a/b/new.txt").read_text() == "x"
    assert [mode(tree.docs / name) for name in ("a", "a/b", "a/b/new.txt")] == [0o750, 0o750, 0o640]


@pytest.mark.parametrize(("directory", "file"), [(0o700, 0o600), (0o755, 0o644), (0o2775, 0o664), (0o1777, 0o664)])
def test_a_new_file_may_be_read_by_whoever_may_use_its_directory(tree: Tree, directory: int, file: int) -> None:
    tree.docs.chmod(directory)
    was = os.umask(0o077)
    try:
        tree("write", path="new.txt", content="x")
    finally:
        os.umask(was)
    assert mode(tree.docs / "new.txt") == file


@pytest.mark.parametrize("bits", [0o600, 0o644, 0o666, 0o755, 0o4755])
def test_a_file_that_was_there_keeps_its_mode_but_not_the_right_to_run_as_another_user(tree: Tree, bits: int) -> None:
    (tree.docs / "note.txt").chmod(bits)
    tree("write", path="note.txt", content="x")
    assert mode(tree.docs / "note.txt") == bits & 0o777


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another group needs root")
def test_what_is_new_belongs_to_the_group_of_its_directory(tree: Tree) -> None:
    os.chown(tree.docs, -1, 5678)
    tree("write", path="a/b/new.txt", content="x", directories=True)
    assert [(tree.docs / name).stat().st_gid for name in ("a", "a/b", "a/b/new.txt")] == [5678] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_a_file_that_was_there_keeps_its_owner_where_the_system_allows_it(tree: Tree) -> None:
    os.chown(tree.docs / "note.txt", 1234, 5678)
    tree("write", path="note.txt", content="x", append=True)
    info = (tree.docs / "note.txt").stat()
    assert (info.st_uid, info.st_gid) == (1234, 5678)


def test_through_a_link_that_stays_inside_its_target_is_written_and_the_link_stays(tree: Tree) -> None:
    (tree.docs / "link").symlink_to("door/note.txt")
    (tree.docs / "new-link").symlink_to("door/new.txt")
    tree("write", path="link", content="x")
    tree("write", path="new-link", content="y")
    assert (tree.docs / "link").is_symlink()
    assert [(tree.docs / "door" / name).read_text() for name in ("note.txt", "new.txt")] == ["x", "y"]


def test_a_hard_link_to_a_file_outside_is_replaced_and_the_file_stays_as_it_was(tree: Tree) -> None:
    (tree.docs / "hard").hardlink_to(tree.outside / "note.txt")
    before = tree.beside()
    tree("write", path="hard", content="x", append=True)
    assert tree.beside() == before


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("door", "is a directory, not a file"),
        ("new/", "is a directory's name"),
        ("", "is a directory, not a file"),
        ("note.txt/new", "is a file, not a directory"),
        ("x" * 300, "the name is too long"),
    ],
)
def test_what_cannot_be_written_is_said_and_nothing_is_left_behind(tree: Tree, path: str, words: str) -> None:
    assert words in tree.fault("write", path=path, content="x")
    assert tree.leftovers() == []


def test_a_root_that_is_only_read_is_not_written(tmp_path: Path) -> None:
    tree = Tree(tmp_path, writable=False)
    assert tree.fault("write", path="x", content="x") == f"{tree.docs} may only be read. No root may be written."
    (tmp_path / "out").mkdir()
    tree.roots = roots_of(tmp_path / "home", read=[tree.docs], write=[tmp_path / "out"])
    assert f"Files can be written below {tmp_path}/out." in tree.fault("write", path=f"{tree.docs}/x", content="x")
    assert "was made" in tree("write", path=f"{tmp_path}/out/x", content="x")


def test_a_file_that_a_person_has_protected_is_not_replaced() -> None:
    with public_directory() as directory:
        tree = Tree(directory)
        tree.docs.chmod(0o777)
        (tree.docs / "note.txt").chmod(0o444)
        with ordinary_user():
            assert "loopd's user is not allowed to" in tree.fault("write", path="note.txt", content="x")
            assert "was made" in tree("write", path="new.txt", content="x")
        assert (tree.docs / "note.txt").read_text() == f"{INSIDE}\n"
        tree.docs.chmod(0o555)
        with ordinary_user():
            assert "loopd's user is not allowed to" in tree.fault("write", path="more.txt", content="x")
        tree.docs.chmod(0o755)


def test_what_is_too_large_or_no_text_is_refused(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "MAX_FILE_BYTES", 10)
    assert "more than 10 bytes" in tree.fault("write", path="new.txt", content="x" * 11)
    assert "more than 10 bytes" in tree.fault("write", path="note.txt", content="xxxx", append=True)
    assert "lone surrogates" in tree.fault("write", path="new.txt", content="\ud800")
    assert not (tree.docs / "new.txt").exists()


FAULTS = [
    ("write", errno.ENOSPC, "the disk is full"),
    ("write", errno.EDQUOT, "the disk quota is used up"),
    ("write", errno.EIO, "Input/output error"),
    ("fsync", errno.EIO, "Input/output error"),
    ("fsync", errno.ENOSPC, "the disk is full"),
    ("rename", errno.EROFS, "read-only for loopd"),
    ("fchmod", errno.EIO, "Input/output error"),
]


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(("call", "number", "words"), FAULTS)
def test_whatever_fails_leaves_the_old_file_and_nothing_else(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, call: str, number: int, words: str, append: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert words in tree.fault("write", path="note.txt", content="x", append=append)
    assert (tree.docs / "note.txt").read_text() == f"{INSIDE}\n"
    assert tree.leftovers() == []


def test_a_name_that_may_not_be_on_the_disk_is_said_so(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def sync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    fault = tree.fault("write", path="note.txt", content="x")
    assert fault == f"Cannot be sure that the disk has {tree.docs}/note.txt: Input/output error."


def test_short_writes_are_gone_on_with(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:3]))
    tree("write", path="note.txt", content="0123456789", append=True)
    assert (tree.docs / "note.txt").read_text() == f"{INSIDE}\n0123456789"


def test_the_content_and_the_name_are_synced_in_that_order(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.rename

    def fsync(file: int) -> None:
        done.append("directory" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")
        sync(file)

    def renamed(*arguments: Any, **options: Any) -> None:
        done.append("rename")
        rename(*arguments, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", renamed)
    tree("write", path="new.txt", content="x")
    assert done == ["file", "rename", "directory"]


def test_a_write_that_is_told_to_end_changes_nothing(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(tree.roots)
    real = os.fsync

    def sync(file: int) -> None:
        work.stop.set()
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(Stopped):
        writing.write(work, {"path": "note.txt", "content": "x"})
    assert (tree.docs / "note.txt").read_text() == f"{INSIDE}\n"
    assert tree.leftovers() == []


@pytest.mark.parametrize("change", ["grows", "goes", "replaced"])
def test_a_file_that_another_program_changes_meanwhile_is_not_appended_to(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tree.docs / "note.txt"
    real = os.fsync

    def sync(file: int) -> None:
        if change == "grows":
            with path.open("a") as other:
                other.write("theirs\n")
        elif change == "goes":
            path.unlink(missing_ok=True)
        else:
            tree.put("docs/other", f"{INSIDE}\n").rename(path)
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    assert "was changed at the same moment" in tree.fault("write", path="note.txt", content="x", append=True)
    assert not path.exists() or "x" not in path.read_text()


def test_what_turns_into_a_directory_or_fifo_meanwhile_is_not_replaced(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tree.docs / "note.txt"
    real = os.fsync

    def sync(file: int) -> None:
        path.unlink()
        os.mkfifo(path)
        real(file)

    monkeypatch.setattr(os, "fsync", sync)
    assert "was changed at the same moment" in tree.fault("write", path="note.txt", content="x")
    assert stat.S_ISFIFO(path.lstat().st_mode)


# --- real disks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Tree]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True)
    try:
        yield Tree(disk)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_the_old_file_and_a_read_only_one_too(small_disk: Tree) -> None:
    tree = small_disk
    for arguments in ({"path": "note.txt"}, {"path": "note.txt", "append": True}, {"path": "new.txt"}):
        assert "the disk is full" in tree.fault("write", content="x" * 300_000, **arguments)
    assert (tree.docs / "note.txt").read_text() == f"{INSIDE}\n"
    assert sorted(path.name for path in tree.docs.iterdir()) == ["door", "note.txt"]
    tree("write", path="note.txt", content="y" * 100_000)
    subprocess.run(["mount", "-o", "remount,ro", str(tree.path)], check=True)
    assert "read-only for loopd" in tree.fault("write", path="note.txt", content="z")
    assert "read-only for loopd" in tree.fault("write", path="a/new.txt", content="z", directories=True)
    assert "yyyy" in tree("read", path="note.txt")


def test_a_root_that_is_missing_is_said(tree: Tree) -> None:
    roots = tree.roots
    tree.docs.rename(tree.path / "moved")
    with pytest.raises(ToolError, match="cannot be used now"):
        writing.write(Work(roots), {"path": "note.txt", "content": "x", "directories": True})
    assert not tree.docs.exists()
