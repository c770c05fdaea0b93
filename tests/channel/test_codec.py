"""Framing: any bytes in, whole lines out (SPEC 8)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopd.channel.codec import LineDecoder, decode_client, decode_server, encode, ref_of
from loopd.errors import FrameInvalid, FrameTooLarge
from loopd.proto.frames import Delta, Open, Reply, Say

LINES = st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")), max_size=12)


@given(lines=LINES, cuts=st.lists(st.integers(0, 300), max_size=12))
def test_lines_come_out_whole_however_the_stream_is_cut(lines: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(line + b"\n" for line in lines)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    decoder = LineDecoder(20)
    found = [line for begin, end in pairwise(places) for line in decoder.feed(stream[begin:end])]
    assert found == [line for line in lines if line]


@given(size=st.integers(0, 40), piece=st.integers(1, 50))
def test_a_line_over_the_limit_is_reported_once_and_skipped_to_its_newline(size: int, piece: int) -> None:
    decoder = LineDecoder(16)
    stream = b"x" * size + b"\nnext\n"
    found = [line for at in range(0, len(stream), piece) for line in decoder.feed(stream[at : at + piece])]
    first = [] if size == 0 else found[:1]
    assert found[len(first) :] == [b"next"]
    if size > 16:
        assert isinstance(found[0], FrameTooLarge)
        assert f"{size} bytes" in str(found[0])
    elif size:
        assert found[0] == b"x" * size


def test_an_endless_line_takes_no_memory() -> None:
    decoder = LineDecoder(1000)
    for _ in range(100):
        assert decoder.feed(b"x" * 1000) == []
    assert decoder._parts == []


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), key=st.text("abc", min_size=1, max_size=9))
def test_a_frame_survives_the_wire(text: str, key: str) -> None:
    frame = Say(session="s", text=text, key=key)
    line = encode(frame)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_client(line) == frame


def test_from_is_the_name_on_the_wire() -> None:
    assert b'"from":7' in encode(Open(session="s", start=7))
    assert decode_client(b'{"type":"open","session":"s","from":7}') == Open(session="s", start=7)


def test_unknown_optional_fields_are_ignored() -> None:
    assert decode_server(b'{"type":"delta","session":"s","text":"x","mood":"good"}') == Delta(session="s", text="x")


def test_a_ref_that_is_not_set_is_not_sent() -> None:
    assert b"ref" not in encode(Reply(to="status", data={}))
    assert b'"ref":"7"' in encode(Reply(to="status", data={}, ref="7"))


@pytest.mark.parametrize(
    "line",
    [b"", b"x", b"\xff", b"[]", b"{}", b'{"type":"fly"}', b'{"type":"say","session":"s"}', b"1" * 9999, b"[" * 99_999],
)
def test_what_is_no_frame_is_refused_in_one_short_line(line: bytes) -> None:
    with pytest.raises(FrameInvalid) as caught:
        decode_client(line)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) <= 200
    assert ref_of(line) is None


def test_the_ref_of_a_frame_that_is_refused_is_found() -> None:
    assert ref_of(b'{"type":"fly","ref":"7"}') == "7"
    assert ref_of(b'{"type":"fly","ref":7}') is None
