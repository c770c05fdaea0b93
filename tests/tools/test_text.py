import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from loopd.tools.text import Capture, Text, clean

KEPT = 256


def captured(*chunks: bytes, max_bytes: int = KEPT) -> Text:
    capture = Capture(max_bytes)
    for chunk in chunks:
        capture.feed(chunk)
    return capture.finish()


def test_no_output_is_an_empty_text() -> None:
    assert captured() == Text("", 0, lossy=False)


def test_output_up_to_the_limit_is_kept_whole() -> None:
    assert captured(b"x" * KEPT) == Text("x" * KEPT, 0, lossy=False)


def test_a_character_split_between_reads_is_whole() -> None:
    data = "Zürich 🦊".encode()
    assert captured(*(data[i : i + 1] for i in range(len(data)))) == Text("Zürich 🦊", 0, lossy=False)


def test_a_replacement_character_that_the_tool_wrote_is_not_lossy() -> None:
    assert captured("�".encode()) == Text("�", 0, lossy=False)


def test_random_bytes_become_clean_text_and_say_so() -> None:
    text = captured(random.Random(1).randbytes(4096))
    assert text.lossy
    assert text.cut > 0
    assert "\0" not in text.text
    assert len(text.text.encode("utf-8")) <= KEPT


def test_a_million_lines_keep_head_and_tail_and_tell_how_much_is_missing() -> None:
    line = b"0123456789abcde\n"
    text = captured(b"first\n", *[line * 1000] * 1000, b"last\n")
    assert text.text.startswith("first\n0123")
    assert text.text.endswith("abcde\nlast\n")
    assert f"\n[... {text.cut} bytes left out ...]\n" in text.text
    kept = len(text.text) - len(f"\n[... {text.cut} bytes left out ...]\n")
    assert kept + text.cut == 6 + 16 * 1_000_000 + 5


def test_one_byte_too_many_leaves_out_as_little_as_the_notice_needs() -> None:
    text = captured(b"x" * (KEPT + 1))
    assert text.cut <= 64


def test_nothing_is_cut_inside_a_character() -> None:
    text = captured("🦊".encode() * 1000)
    head, tail = text.text.split(f"\n[... {text.cut} bytes left out ...]\n")
    assert set(head + tail) == {"🦊"}


def test_lone_surrogates_and_nuls_of_a_text_are_replaced() -> None:
    assert clean("a\ud800b\0c", KEPT) == Text("a�b�c", 0, lossy=True)


@given(st.binary(max_size=2000), st.lists(st.integers(0, 2000), max_size=5), st.integers(256, 600))
def test_how_output_arrives_changes_nothing_and_the_limit_holds(data: bytes, cuts: list[int], limit: int) -> None:
    edges = [0, *sorted(cuts), len(data)]
    chunks = [data[a:b] for a, b in itertools.pairwise(edges)]
    text = captured(*chunks, max_bytes=limit)
    assert text == captured(data, max_bytes=limit)
    assert len(text.text.encode("utf-8")) <= limit
    assert "\0" not in text.text


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60))
def test_clean_text_that_fits_is_untouched(text: str) -> None:
    assert clean(text, KEPT) == Text(text, 0, lossy=False)
