import os
import struct
import zlib

import pytest

from loopd.tools.files.work import PAGE_BYTES
from loopd.tools.text import clean
from tests.tools.files.tree import Tree


def lines(first: int, last: int) -> str:
    return "".join(f"line {number}\n" for number in range(first, last + 1))


@pytest.fixture
def log(tree: Tree) -> Tree:
    tree.put("docs/log.txt", lines(1, 1000))
    return tree


def head_and_text(answer: str) -> tuple[str, str]:
    head, _, text = answer.partition(":\n")
    return head.partition(", ")[2], text


@pytest.mark.parametrize(
    ("asked", "head", "text"),
    [
        ({}, "lines 1 to 200 of 1000; go on with offset 201", lines(1, 200)),
        ({"limit": 1}, "line 1 of 1000; go on with offset 2", lines(1, 1)),
        ({"offset": 201, "limit": 3}, "lines 201 to 203 of 1000; go on with offset 204", lines(201, 203)),
        ({"offset": 999, "limit": 500}, "lines 999 to 1000 of 1000", lines(999, 1000)),
        ({"offset": 1000}, "line 1000 of 1000", lines(1000, 1000)),
        ({"offset": -2}, "lines 999 to 1000 of 1000", lines(999, 1000).rstrip("\n")),
        ({"offset": -1}, "line 1000 of 1000", "line 1000"),
        ({"offset": 0, "limit": 0}, "lines 1 to 200 of 1000; go on with offset 201", lines(1, 200)),
        ({"offset": 2.0, "limit": 1.0}, "line 2 of 1000; go on with offset 3", lines(2, 2)),
    ],
)
def test_a_page_of_lines_says_which_they_are_and_how_to_go_on(
    log: Tree, asked: dict[str, int], head: str, text: str
) -> None:
    assert head_and_text(log("read", path="log.txt", **asked)) == (head, text)


def test_reading_on_from_page_to_page_gives_the_whole_file(tree: Tree) -> None:
    whole = "".join(f"{number} {'é' * (number % 97)}\n" for number in range(3000)) + "no newline at the end"
    tree.put("docs/log.txt", whole)
    read, offset = "", "1"
    while offset:
        head, text = head_and_text(tree("read", path="log.txt", offset=int(offset), limit=100_000))
        assert len(text.encode()) <= PAGE_BYTES
        read += text
        offset = head.partition("offset ")[2]
    assert read == whole


def test_an_offset_behind_the_end_says_how_many_lines_there_are(log: Tree) -> None:
    assert log.fault("read", path="log.txt", offset=1001) == "There is no line 1001: the file has 1000 lines."
    assert "the file has 1000 lines" in log.fault("read", path="log.txt", offset=10**9)
    log.put("docs/open.txt", "one\ntwo")
    assert log("read", path="open.txt", offset=2).endswith(", line 2 of 2:\ntwo")
    assert "has 2 lines" in log.fault("read", path="open.txt", offset=3)


def test_the_last_lines_are_as_many_as_go_on_a_page(tree: Tree) -> None:
    tree.put("docs/log.txt", "".join(f"{number:09}\n" for number in range(5000)))
    head, text = head_and_text(tree("read", path="log.txt", offset=-5000))
    assert head == f"lines {5000 - PAGE_BYTES // 10 + 1} to 5000 of 5000"
    assert text.splitlines()[-1] == "000004999"
    assert len(text) <= PAGE_BYTES


def test_a_line_that_is_longer_than_a_page_is_cut_between_characters(tree: Tree) -> None:
    tree.put("docs/long.json", "x" + "é" * 100_000)
    answer = tree("read", path="long.json")
    assert clean(answer, 1 << 20).lossy is False
    assert answer.endswith("é\n[line 1 is longer than a page: the rest of it is left out]")
    assert "go on" not in answer.partition("\n")[0]
    tree.put("docs/long.json", "x" * 100_000 + "\nnext\n")
    assert "line 1 of 2; go on with offset 2:" in tree("read", path="long.json")
    assert tree("read", path="long.json", offset=2).endswith(":\nnext\n")
    assert tree("read", path="long.json", offset=-1).endswith(":\nnext")


def test_an_empty_file_is_said_to_be_empty(tree: Tree) -> None:
    tree.put("docs/empty", "")
    assert tree("read", path="empty") == f"{tree.docs}/empty is empty."


def png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("wrong-name.txt", png(), "a PNG image"),
        ("report.pdf", b"%PDF-1.7\n...", "a PDF document"),
        ("a.docx", b"PK\x03\x04....", "a ZIP archive (or an office document)"),
        ("film.mp4", b"\0\0\0 ftypisom", "video/mp4"),
        ("notes.txt", "\ufeffhello".encode("utf-16"), "UTF-16 text"),
        ("blob", b"\x01\0\x02", "binary data"),
    ],
)
def test_a_binary_file_is_said_to_be_one_with_kind_and_size(tree: Tree, name: str, data: bytes, kind: str) -> None:
    (tree.docs / name).write_bytes(data)
    assert tree("read", path=name) == f"{tree.docs}/{name} is not text but {kind}, {len(data)} bytes."


def test_text_in_an_old_encoding_is_shown_with_the_bytes_replaced(tree: Tree) -> None:
    (tree.docs / "old.txt").write_bytes("Käse\n".encode("latin-1"))
    shown = clean(tree("read", path="old.txt"), 4096)
    assert shown.text.endswith(":\nK\N{REPLACEMENT CHARACTER}se\n")
    assert shown.lossy


def test_a_byte_order_mark_is_not_shown(tree: Tree) -> None:
    tree.put("docs/windows.txt", "\ufeffHello.\r\n")
    assert tree("read", path="windows.txt").endswith(":\nHello.\r\n")


@pytest.mark.timeout(60)
def test_a_huge_file_is_neither_read_whole_nor_counted(tree: Tree) -> None:
    size = 1 << 40
    path = tree.put("docs/huge.log", lines(1, 10_000))
    os.truncate(path, size)
    assert f"lines 1 to 2 of a file of {size} bytes; go on with offset 3:" in tree("read", path="huge.log", limit=2)
    assert "is not text: it has NUL bytes" in tree.fault("read", path="huge.log", offset=-5)
    assert "too far into the file" in tree.fault("read", path="huge.log", offset=20_000)
    os.truncate(path, 0)
    os.truncate(path, size)
    assert tree("read", path="huge.log") == f"{path} is not text but binary data, {size} bytes."


def test_a_file_that_grows_is_read_as_it_is_at_that_moment(tree: Tree) -> None:
    path = tree.put("docs/grows.txt", "one\n")
    assert "line 1 of 1" in tree("read", path="grows.txt")
    with path.open("a") as file:
        file.write("two\n")
    assert "lines 1 to 2 of 2" in tree("read", path="grows.txt")
