import os
import tracemalloc
from pathlib import Path

import pytest

from loopd.tools.files.listing import MAX_ENTRIES, list_directory
from loopd.tools.files.work import PAGE_BYTES, Work
from tests.tools.files.tree import Tree, roots_of


def test_names_are_sorted_and_tell_kind_and_size(tree: Tree) -> None:
    tree.put("docs/b.txt", "12345")
    os.mkfifo(tree.docs / "pipe")
    (tree.docs / "away").symlink_to("/etc")
    assert tree("list").splitlines() == [
        f"{tree.docs}: 5 entries:",
        "away -> /etc",
        "b.txt 5 bytes",
        "door/",
        "note.txt 7 bytes",
        "pipe (FIFO)",
    ]


@pytest.mark.parametrize("path", ["", ".", "./", "{docs}", "{docs}/"])
def test_the_only_root_is_listed_however_it_is_meant(tree: Tree, path: str) -> None:
    assert tree("list", path=path.format(docs=tree.docs)).startswith(f"{tree.docs}: 2 entries:\n")


def test_an_empty_directory_and_a_file_are_told(tree: Tree) -> None:
    (tree.docs / "empty").mkdir()
    assert tree("list", path="empty") == f"{tree.docs}/empty: 0 entries."
    assert tree("list", path="note.txt") == f"This is no directory: {tree.docs}/note.txt 7 bytes"
    assert "There is no nothing" in tree.fault("list", path="nothing")


def test_without_a_path_several_roots_are_listed_themselves(tmp_path: Path) -> None:
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    roots = roots_of(tmp_path / "home", read=[tmp_path / "in"], write=[tmp_path / "out"])
    assert list_directory(Work(roots), {}).splitlines() == [f"{tmp_path}/in/", f"{tmp_path}/out/ (may be written)"]


@pytest.mark.timeout(120)
def test_a_directory_of_a_hundred_thousand_files_is_listed_in_pages_and_in_little_memory(tree: Tree) -> None:
    many = tree.docs / "many"
    many.mkdir()
    directory = os.open(many, os.O_RDONLY)
    for number in range(100_000):
        os.close(os.open(f"{number:06}", os.O_CREAT | os.O_WRONLY, dir_fd=directory))
    os.close(directory)
    tracemalloc.start()
    first = tree("list", path="many").splitlines()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1_000_000
    assert first[0] == f"{many}: 100000 entries, 1 to 200 shown; go on with offset 201, or use search:"
    assert first[1:] == [f"{number:06} 0 bytes" for number in range(MAX_ENTRIES)]
    assert tree("list", path="many", offset=100_000).splitlines()[1:] == ["099999 0 bytes"]
    assert tree("list", path="many", offset=100_001).endswith("none from 100001 on.")
    found = tree("search", path="many", name="09999")
    assert found.startswith("11 found:\n")


def test_an_answer_is_bounded_in_bytes_too(tree: Tree) -> None:
    for number in range(200):
        (tree.docs / f"{number:03}{'é' * 120}").touch()
    answer = tree("list")
    assert len(answer.encode()) <= PAGE_BYTES + 300
    offset = int(answer.partition("offset ")[2].partition(",")[0])
    assert tree("list", offset=offset).splitlines()[1].startswith(f"{offset - 1:03}é")
