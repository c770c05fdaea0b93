"""Directories and files that change while they are walked: nothing outside is ever seen or touched."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loopd.errors import ToolError
from tests.tools.files.tree import HIDDEN, INSIDE, Tree

ROUNDS = 2000
PATIENT_ROUNDS = 500_000
EXCHANGER = """
import ctypes, os, sys
exchange = ctypes.CDLL(None, use_errno=True).renameat2
one, other = map(os.fsencode, sys.argv[1:])
print("ready", flush=True)
while True:
    for _ in range(1000):
        if exchange(-100, one, -100, other, 2):
            sys.exit(os.strerror(ctypes.get_errno()))
    if os.getppid() == 1:
        break
"""


@contextmanager
def exchanging(one: Path, other: Path) -> Iterator[None]:
    """Have another process exchange two names as fast as it can (RENAME_EXCHANGE: at no moment is one missing)."""
    racer = subprocess.Popen([sys.executable, "-c", EXCHANGER, str(one), str(other)], stdout=subprocess.PIPE)
    assert racer.stdout is not None
    try:
        assert racer.stdout.readline() == b"ready\n"
        yield
        assert racer.poll() is None
    finally:
        racer.kill()
        racer.wait()
        racer.stdout.close()


def raced(attempt: Callable[[], str], *both: str) -> Counter[str]:
    """Try for `ROUNDS`, and on until each of `both` outcomes has been seen; return how often each was."""
    seen: Counter[str] = Counter()
    for number in range(PATIENT_ROUNDS):
        seen[attempt()] += 1
        if number >= ROUNDS and all(seen[outcome] for outcome in both):
            break
    assert all(seen[outcome] for outcome in both), f"the race was never on: {seen}"
    return seen


CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "read": ("door/note.txt", {}, INSIDE),
    "list": ("door", {}, "note.txt 7 bytes"),
    "search": ("door", {"text": INSIDE}, "door/note.txt:1: "),
    "search by name": ("", {"name": "*"}, "door/note.txt 7 bytes"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_directory_that_turns_into_a_link_never_leads_a_reader_outside(tree: Tree, name: str) -> None:
    path, arguments, shown = CASES[name]
    spare = tree.path / "spare"
    spare.symlink_to("../outside")
    (tree.outside / "note.txt").write_text(f"{HIDDEN}, not {INSIDE}\n")

    def attempt() -> str:
        try:
            text = tree(name.split(maxsplit=1)[0], path=path, **arguments)
        except ToolError as error:
            text = error.message
        assert HIDDEN not in text
        return "inside" if shown in text else "refused"

    with exchanging(tree.docs / "door", spare):
        raced(attempt, "inside", "refused")


def test_a_file_that_turns_into_a_link_is_never_read_through(tree: Tree) -> None:
    spare = tree.path / "spare"
    spare.symlink_to("../outside/note.txt")

    def attempt() -> str:
        try:
            text = tree("read", path="note.txt")
        except ToolError as error:
            text = error.message
        assert HIDDEN not in text
        return "inside" if INSIDE in text else "refused"

    with exchanging(tree.docs / "note.txt", spare):
        raced(attempt, "inside", "refused")


@pytest.mark.timeout(120)
def test_a_file_that_turns_into_a_fifo_never_hangs_a_reader(tree: Tree) -> None:
    spare = tree.path / "spare"
    os.mkfifo(spare)

    def attempt() -> str:
        try:
            return "inside" if INSIDE in tree("read", path="note.txt") else "odd"
        except ToolError:
            return "refused"

    with exchanging(tree.docs / "note.txt", spare):
        seen = raced(attempt, "inside", "refused")
    assert not seen["odd"]


@pytest.mark.parametrize("append", [True, False])
def test_a_directory_that_turns_into_a_link_never_leads_a_writer_outside(tree: Tree, append: bool) -> None:
    spare = tree.path / "spare"
    spare.symlink_to("../outside")
    before = {path: path.read_bytes() for path in tree.outside.iterdir()}

    def attempt() -> str:
        try:
            tree("write", path="door/note.txt", content="w" if append else INSIDE, append=append)
        except ToolError:
            return "refused"
        return "written"

    with exchanging(tree.docs / "door", spare):
        raced(attempt, "written", "refused")
    assert {path: path.read_bytes() for path in tree.outside.iterdir()} == before
    assert tree.leftovers() == []


def test_what_checks_the_path_first_and_opens_it_then_loses_this_race(tree: Tree) -> None:
    """The race is real: it beats the way that looks right."""
    spare = tree.path / "spare"
    spare.symlink_to("../outside")

    def attempt() -> str:
        path = tree.docs / "door" / "note.txt"
        try:
            real = path.resolve()
        except OSError:  # it changed under this very look
            return "refused"
        if not real.is_relative_to(tree.docs):
            return "refused"
        return "outside" if HIDDEN in path.read_text() else "inside"

    with exchanging(tree.docs / "door", spare):
        raced(attempt, "inside", "refused", "outside")


# --- every single moment ------------------------------------------------------------------------------------------


def into_link(tree: Tree, path: str, target: str) -> None:
    (tree.docs / path).rename(tree.path / "moved")
    (tree.docs / path).symlink_to(target)


def moved_out(tree: Tree) -> None:
    """The directory leaves the root while it is walked; its parent is now what is outside."""
    (tree.docs / "door").rename(tree.outside / "door")


def into_fifo(tree: Tree) -> None:
    (tree.docs / "door/note.txt").unlink()
    os.mkfifo(tree.docs / "door/note.txt")


def root_into_link(tree: Tree) -> None:
    tree.docs.rename(tree.path / "moved")
    tree.docs.symlink_to(tree.outside)


def gone(tree: Tree) -> None:
    (tree.docs / "door").rename(tree.path / "moved")


CHANGES: dict[str, Callable[[Tree], None]] = {
    "directory into link": lambda tree: into_link(tree, "door", "../outside"),
    "directory into absolute link": lambda tree: into_link(tree, "door", str(tree.outside)),
    "file into link": lambda tree: into_link(tree, "door/note.txt", "../../outside/note.txt"),
    "file into FIFO": into_fifo,
    "root into link": root_into_link,
    "directory moved out": moved_out,
    "directory gone": gone,
}
CALLS: dict[str, dict[str, Any]] = {
    "read": {"path": "door/link"},
    "list": {"path": "door/here"},
    "search": {"text": "i"},
    "write": {"path": "door/link", "content": "new", "append": True},
}
WATCHED = ("open", "fstat", "stat", "readlink", "scandir", "pread", "read", "write", "rename", "fsync")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", CALLS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_before_any_single_system_call_shows_and_touches_nothing_outside(
    tmp_path: Path, tool: str, change: str
) -> None:
    moment = 0
    while True:
        tree = Tree(tmp_path / str(moment))
        (tree.docs / "door/link").symlink_to("../door/note.txt")
        (tree.docs / "door/here").symlink_to("../door")
        before = {path: path.read_text() for path in tree.outside.iterdir()}
        with changing(tree, CHANGES[change], moment) as happened:
            try:
                text = tree(tool, **CALLS[tool])
            except ToolError as error:
                text = error.message
        assert HIDDEN not in text
        assert {path: path.read_text() for path in tree.outside.iterdir() if path.is_file()} == before
        if not happened:
            break
        moment += 1
    assert moment > 10


@contextmanager
def changing(tree: Tree, change: Callable[[Tree], None], moment: int) -> Iterator[list[str]]:
    """Make the change just before the system call of that number; yields where it happened, if it did."""
    happened: list[str] = []
    calls = 0
    with pytest.MonkeyPatch.context() as patch:

        def watched(name: str) -> Callable[..., Any]:
            real = getattr(os, name)

            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == moment + 1 and not happened:
                    happened.append(name)
                    change(tree)
                return real(*arguments, **options)

            return call

        _ = tree.roots  # resolved before anything changes
        for name in WATCHED:
            patch.setattr(os, name, watched(name))
        yield happened
