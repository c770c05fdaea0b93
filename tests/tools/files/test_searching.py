import os
import re

import pytest

from loopd.errors import ToolError
from loopd.tools.files import searching
from loopd.tools.files.searching import MAX_HITS, MAX_LINES_PER_FILE, search
from loopd.tools.files.work import PAGE_BYTES, Stopped, Work
from tests.tools.files.tree import Tree, roots_of


@pytest.fixture
def library(tree: Tree) -> Tree:
    (tree.docs / "note.txt").unlink()
    (tree.docs / "door/note.txt").unlink()
    (tree.docs / "door").rmdir()
    tree.put("docs/2024/Report.MD", "Total: 5\nÜBUNG macht den Meister\n")
    tree.put("docs/2024/q1/sums.csv", "a,b\n1,2\n")
    tree.put("docs/report.md", "nothing here\nthe total is 7\n")
    tree.put("docs/zoo.txt", "animals\n")
    (tree.docs / "photo.jpg").write_bytes(b"\xff\xd8\xff\0total")
    return tree


def found(tree: Tree, **arguments: str) -> list[str]:
    return [line.removeprefix(f"{tree.docs}/") for line in tree("search", **arguments).splitlines()[1:]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": "report"}, ["2024/Report.MD 34 bytes", "report.md 28 bytes"]),
        ({"name": "*.MD"}, ["2024/Report.MD 34 bytes", "report.md 28 bytes"]),
        ({"name": "2024/*.md"}, ["2024/Report.MD 34 bytes"]),
        ({"name": "**/*.csv"}, ["2024/q1/sums.csv 8 bytes"]),
        ({"name": "**/zoo.txt"}, ["zoo.txt 8 bytes"]),
        ({"name": "q?"}, ["2024/q1/"]),
        ({"name": "{docs}/*.txt"}, ["zoo.txt 8 bytes"]),
        ({"name": "[z-a]"}, []),
        ({"name": "*", "path": "2024/q1"}, ["2024/q1/sums.csv 8 bytes"]),
        ({"name": "sums", "path": "2024/q1/sums.csv"}, ["2024/q1/sums.csv 8 bytes"]),
        ({"text": "TOTAL"}, ["2024/Report.MD:1: Total: 5", "report.md:2: the total is 7"]),
        ({"text": "total", "name": "2024"}, []),
        ({"text": "total", "name": "2024/*"}, ["2024/Report.MD:1: Total: 5"]),
        ({"text": "übung"}, ["2024/Report.MD:2: ÜBUNG macht den Meister"]),
        ({"text": "1,2", "path": "2024/q1/sums.csv"}, ["2024/q1/sums.csv:2: 1,2"]),
        ({"text": "(a|b)*"}, []),
    ],
)
def test_files_are_found_by_name_and_lines_by_text_in_sorted_order(
    library: Tree, arguments: dict[str, str], expected: list[str]
) -> None:
    arguments = {key: value.replace("{docs}", str(library.docs)) for key, value in arguments.items()}
    assert found(library, **arguments) == expected
    assert found(library, **arguments) == expected


def test_the_head_says_what_was_looked_at(library: Tree) -> None:
    assert library("search", text="total").startswith("2 found in 5 files:\n")
    assert library("search", text="nowhere") == "Nothing found in 5 files."
    assert library("search", name="nowhere") == "Nothing found."
    assert "Give a name" in library.fault("search")


def test_several_roots_are_searched_one_after_another_and_one_that_is_missing_is_noted(library: Tree) -> None:
    other = library.path / "aaa"
    other.mkdir()
    (other / "total.txt").write_text("total")
    roots = roots_of(library.path / "home", read=[library.docs, other, library.path / "none"])
    answer = search(Work(roots), {"text": "total"}).splitlines()
    assert answer[0].startswith("3 found in 6 files; The root ")
    assert [line.rpartition("/")[2].partition(":")[0] for line in answer[1:]] == ["total.txt", "Report.MD", "report.md"]


def test_a_long_line_is_shown_around_what_was_looked_for(tree: Tree) -> None:
    tree.put("docs/one-line.json", "x" * 3_000_000 + "needle" + "y" * 3_000_000)
    (line,) = found(tree, text="needle")
    number, _, text = line.removeprefix("one-line.json:").partition(": ")
    assert number == "1"
    assert re.fullmatch(r"\.\.\.x{60}needley{134}\.\.\.", text)


def test_a_text_across_two_blocks_and_numbers_behind_them_are_right(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "_BLOCK_BYTES", 7)
    tree.put("docs/blocks.txt", "".join(f"line {number}\n" for number in range(1, 200)) + "at the end, a needle")
    assert found(tree, text="line 137") == ["blocks.txt:137: line 137"]
    assert found(tree, text="a needle") == ["blocks.txt:200: at the end, a needle"]


def test_hits_are_bounded_in_number_and_bytes_and_for_each_file(tree: Tree) -> None:
    for number in range(100):
        tree.put(f"docs/{number:03}.txt", "hit\n" * 10)
    answer = tree("search", text="hit").splitlines()
    assert answer[0].startswith(f"{MAX_HITS} found in ")
    assert "stopped early, since there are more than can be shown: give a narrower" in answer[0]
    assert len(answer) == 1 + MAX_HITS
    assert answer[1 + MAX_LINES_PER_FILE].endswith("/000.txt: more such lines")
    for number in range(100):
        tree.put(f"docs/{number:03}.txt", f"hit {'é' * 190}\n" * 10)
    assert len(tree("search", text="hit").encode()) <= PAGE_BYTES + 300


@pytest.mark.parametrize(
    ("bound", "value", "why"),
    [("MAX_NAMES", 20, "20 names"), ("MAX_LOOKED_BYTES", 100, "0 MB"), ("MAX_S", 0.0, "it took 0 s")],
)
def test_what_is_looked_at_is_bounded_and_the_answer_says_that_it_is_not_all(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, bound: str, value: float, why: str
) -> None:
    for number in range(100):
        tree.put(f"docs/{number:03}.txt", "hit\n")
    monkeypatch.setattr(searching, bound, value)
    answer = tree("search", text="hit")
    assert f"stopped early, since {why}" in answer.splitlines()[0]


@pytest.mark.timeout(60)
def test_a_tree_of_a_thousand_levels_is_searched_as_far_as_the_bound(tree: Tree) -> None:
    here = os.open(tree.docs, os.O_RDONLY)
    for _ in range(1000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert tree("search", name="note").startswith("2 found; 1 could not be read:")


@pytest.mark.timeout(60)
def test_a_pattern_made_to_take_for_ever_takes_no_time(tree: Tree) -> None:
    (tree.docs / ("a" * 250)).touch()
    assert tree("search", name="*a" * 99 + "b") == "Nothing found."


def test_a_search_ends_soon_after_it_is_told_to(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(tree.put("docs/huge.txt", "x"), 1 << 40)
    work = Work(tree.roots)
    real = os.read

    def read_and_stop(file: int, count: int) -> bytes:
        work.stop.set()
        return real(file, count).replace(b"\0", b"x")

    monkeypatch.setattr(os, "read", read_and_stop)
    with pytest.raises(Stopped):
        search(work, {"text": "needle"})


def test_what_vanishes_meanwhile_is_counted(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanished(directory: int, name: str) -> int:
        raise FileNotFoundError(name)

    monkeypatch.setattr(searching, "open_directory", vanished)
    assert tree("search", name="note").startswith("1 found; 1 could not be read:")


def test_a_path_that_is_wrong_is_an_error_where_it_is_the_only_one(tree: Tree) -> None:
    with pytest.raises(ToolError, match="There is no nothing"):
        tree("search", path="nothing", name="x")
