"""What long logs cost in memory: bounded (SPEC 2.2/10). What they cost in time is a benchmark."""

import tracemalloc

import pytest

from loopd.home import Home
from loopd.proto.records import Record, encode_record
from loopd.session import reader
from loopd.session.replay import Replay
from loopd.session.store import Session
from tests.session.builders import CLOCK, LIMITS, answer, create, end, log_of, make_baseline, result, say, usage, user

MAX_TIMES_FILE, MAX_TIMES_LINE = 3.0, 4.0


def grow(home: Home, records: int) -> int:
    """Give `s1` a log of about so many records, each turn with a tool call; return its size in bytes."""
    create(home).close()
    state, number = Replay(make_baseline()), 0
    lines: list[bytes] = []
    text, reply, content = "What is the time in Zürich, please? " * 3, "It is three o'clock. " * 10, "15:00:00 " * 30
    while len(lines) < records:
        number += 1
        first = usage(state.request(text))
        turn: list[Record] = [user(text, f"{number:032x}"), answer("", CLOCK), first, result(number, CLOCK, content)]
        for record in turn:
            state.add(record)
        turn += [answer(reply), usage(state.request(None)), end()]
        for record in turn[4:]:
            state.add(record)
        lines += [encode_record(record) for record in turn]
    with log_of(home).open("ab") as file:
        file.writelines(lines)
    return log_of(home).stat().st_size


def open_session(home: Home) -> Session:
    session = Session.open(home, "s1", limits=LIMITS)
    session.close()
    return session


@pytest.mark.parametrize("records", [1_000, 10_000])
def test_an_open_session_holds_at_most_three_times_its_file(home: Home, records: int) -> None:
    size_bytes = grow(home, records)
    tracemalloc.start()
    try:
        session = Session.open(home, "s1", limits=LIMITS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    session.close()
    assert peak_bytes <= MAX_TIMES_FILE * size_bytes


def test_a_session_of_a_hundred_thousand_records_opens_in_bounded_memory(home: Home) -> None:
    size_bytes = grow(home, 100_000)
    tracemalloc.start()
    try:
        session = Session.open(home, "s1", limits=LIMITS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert session.lines > 100_000
    assert peak_bytes <= MAX_TIMES_FILE * size_bytes
    say(session, "goes on")
    session.close()


def test_a_line_of_twelve_megabytes_opens_in_bounded_memory(home: Home) -> None:
    state = Replay(make_baseline())
    text = "x" * 12 * 1024 * 1024
    batch: list[Record] = [user(text, "k"), answer("long"), usage(state.request(text)), end()]
    create(home).close()
    with log_of(home).open("ab") as file:
        file.writelines(map(encode_record, batch))
    del state, batch
    tracemalloc.start()
    try:
        session = Session.open(home, "s1", limits=LIMITS)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(session.title) == 60
    assert peak_bytes <= MAX_TIMES_LINE * len(text)
    session.close()


def test_a_list_does_not_read_bodies(home: Home) -> None:
    size_bytes = grow(home, 10_000)
    tracemalloc.start()
    try:
        (summary,) = reader.summaries(home)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert summary.size_bytes == size_bytes
    assert summary.refused is None
    assert peak_bytes < size_bytes / 10
