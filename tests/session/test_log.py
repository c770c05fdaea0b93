from collections.abc import Sequence

import pytest

from loopd.proto.records import FORMAT_VERSION, Record, SessionStart, ToolCall, encode_record
from loopd.session.log import TITLE_CHARS, Log, LogFault, decode_line, title_of
from loopd.session.replay import Request
from tests.session.builders import AT, CLOCK, FIND, answer, closing, end, result, usage, user

HASH = "sha256:" + "0" * 64
START = SessionStart(at=AT, version=FORMAT_VERSION, epoch=0, slot=0, baseline=HASH, owner_uid=0)
USAGE = usage(Request([], 0, HASH))
ASK, ASK_AGAIN = user("one", "k1"), user("two", "k2")
STEP: tuple[Record, ...] = (ASK, answer("yes"), USAGE)
CALLS: tuple[Record, ...] = (ASK, answer("", CLOCK, FIND), USAGE)


def log_of(*records: Record) -> Log:
    log = Log(0)
    for record in (START, *records):
        log.add(record)
    return log


@pytest.mark.parametrize(
    ("before", "batch"),
    [
        ((), STEP),
        ((), (*STEP, end())),
        (STEP, (end("interrupted"),)),
        (STEP, (closing(), end("deadline"))),
        (STEP, (answer("more"), USAGE)),
        (STEP, (answer("more"), USAGE, end())),
        ((*STEP, end()), (ASK_AGAIN, answer("yes"), USAGE)),
        (CALLS, (result(1, CLOCK),)),
        ((*CALLS, result(1, CLOCK)), (result(2, FIND),)),
        ((*CALLS, result(1, CLOCK), result(2, FIND)), (closing(), end("tool_limit"))),
        ((*CALLS, result(1, CLOCK), result(2, FIND)), (answer("done"), USAGE, end())),
    ],
)
def test_every_form_of_batch_is_taken_where_it_may_stand(before: Sequence[Record], batch: Sequence[Record]) -> None:
    log = log_of(*before)
    lines = log.line
    extended = log.extended(batch)
    assert log.line == lines
    log.adopt(extended)
    assert log.whole
    log.end()


@pytest.mark.parametrize(
    ("before", "batch", "why"),
    [
        ((), (), "no batch"),
        ((), (START,), "no batch"),
        ((), (ASK,), "no batch"),
        ((), (ASK, answer("yes")), "no batch"),
        ((), (ASK, USAGE), "no batch"),
        (CALLS, (result(1, CLOCK), result(2, FIND)), "no batch"),
        (STEP, (closing(),), "no batch"),
        (STEP, (closing(), USAGE), "no batch"),
        (STEP, (answer("more"), end()), "no batch"),
        ((), (ASK, closing(), end()), "no batch"),
        ((), (answer("yes"), USAGE), "outside a turn"),
        ((), (end(),), "outside a turn"),
        ((), (closing(), end()), "outside a turn"),
        ((), (result(1, CLOCK),), "no call waits"),
        (STEP, (ASK_AGAIN, answer("yes"), USAGE), "has no end"),
        ((*STEP, end()), (user("one", "k1"), answer("yes"), USAGE), "that of line 2"),
        (CALLS, (end(),), "has no result"),
        (CALLS, (closing(), end()), "has no result"),
        (CALLS, (answer("more"), USAGE), "has no result"),
        (CALLS, (result(2, FIND),), "call 1"),
        (CALLS, (result(2, CLOCK),), "call 1"),
        (CALLS, (result(1, FIND),), "call 1"),
        (CALLS, (result(1, ToolCall(id="other", name=CLOCK.name, arguments="", sent="{}")),), "call 1"),
        (STEP, (closing().model_copy(update={"tool_calls": (CLOCK,)}), end()), "with tool calls"),
    ],
)
def test_no_other_batch_is_taken_and_a_refused_one_changes_nothing(
    before: Sequence[Record], batch: Sequence[Record], why: str
) -> None:
    log = log_of(*before)
    facts = (log.line, log.next_call, dict(log.keys), log.open_turn, log.whole)
    with pytest.raises(LogFault, match=why):
        log.extended(batch)
    assert (log.line, log.next_call, dict(log.keys), log.open_turn, log.whole) == facts


@pytest.mark.parametrize("records", [(ASK, ASK_AGAIN), (ASK, answer(""), ASK_AGAIN), (*STEP, closing(), USAGE)])
def test_a_batch_that_lacks_its_end_in_the_middle_is_wrong_order(records: Sequence[Record]) -> None:
    with pytest.raises(LogFault) as caught:
        log_of(*records)
    assert caught.value.kind == "wrong_order"


@pytest.mark.parametrize("records", [(ASK,), (ASK, answer("")), (*STEP, closing())])
def test_a_log_that_ends_in_the_middle_of_a_batch_is_an_incomplete_step(records: Sequence[Record]) -> None:
    log = log_of(*records)
    assert not log.whole
    with pytest.raises(LogFault) as caught:
        log.end()
    assert caught.value.kind == "incomplete_step"


def test_an_empty_log_is_an_incomplete_step() -> None:
    with pytest.raises(LogFault, match="empty"):
        Log(0).end()


def test_line_one_is_session_start_and_no_other_line_is() -> None:
    with pytest.raises(LogFault, match="line 1"):
        Log(0).add(ASK)
    with pytest.raises(LogFault, match="second"):
        log_of(START)
    with pytest.raises(LogFault, match="epoch 1"):
        Log(1).add(START)


def test_an_open_turn_tells_what_it_waits_for() -> None:
    log = log_of(*CALLS)
    turn = log.open_turn
    assert turn is not None
    assert (turn.key, turn.line, turn.pending, turn.after_result) == ("k1", 2, ((1, CLOCK), (2, FIND)), False)
    log.add(result(1, CLOCK))
    turn = log.open_turn
    assert turn is not None
    assert (turn.pending, turn.after_result) == (((2, FIND),), True)
    assert log_of(*STEP, end()).open_turn is None


def test_a_later_epoch_goes_on_with_calls_and_keys() -> None:
    log = Log(3)
    log.add(START.model_copy(update={"epoch": 3, "next_call": 8, "keys": ("k1",)}))
    assert (log.next_call, dict(log.keys)) == (8, {"k1": 0})
    with pytest.raises(LogFault, match="that of an earlier epoch"):
        log.extended(STEP)


def test_last_usage_is_the_last_with_numbers() -> None:
    with_numbers = usage(Request([], 0, HASH), 30, 7)
    without = usage(Request([], 0, HASH), None, None)
    log = log_of(ASK, answer(""), with_numbers, answer(""), without)
    assert log.last_usage == with_numbers


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"", "no_newline"),
        (encode_record(ASK)[:-1], "no_newline"),
        (b"\0" * 20, "nul"),
        (encode_record(ASK)[:-3] + b"\0\0\n", "nul"),
        (b'{"type":"user","text":"\xff"}\n', "not_utf8"),
        (b"\n", "not_json"),
        (encode_record(ASK)[:20] + encode_record(ASK), "not_json"),
        (b"[" * 100_000 + b"\n", "not_json"),
        (b"[]\n", "unknown_record"),
        (b'{"type":"thought"}\n', "unknown_record"),
        (encode_record(ASK).replace(b'"key"', b'"kex"'), "unknown_record"),
        (encode_record(START).replace(b'"epoch":0', b'"epoch":-1'), "unknown_record"),
        (encode_record(ASK)[:-2] + b',"mood":"good"}\n', "unknown_record"),
    ],
)
def test_a_line_that_is_no_record_is_refused_with_its_kind(line: bytes, kind: str) -> None:
    with pytest.raises(LogFault) as caught:
        decode_line(line)
    assert caught.value.kind == kind


@pytest.mark.parametrize("more", [b"", b',"colour":"red"'])
def test_a_newer_version_is_refused_by_name_whatever_else_it_holds(more: bytes) -> None:
    newer = START.model_copy(update={"version": FORMAT_VERSION + 1})
    with pytest.raises(LogFault, match=f"format version {FORMAT_VERSION + 1}"):
        Log(0).add(decode_line(encode_record(newer)[:-2] + more + b"}\n"))


@pytest.mark.parametrize(
    ("text", "title"),
    [("", ""), ("\n\n  hello  \nworld", "hello"), ("x" * 200, "x" * (TITLE_CHARS - 1) + "…"), ("é" * 60, "é" * 60)],
)
def test_a_title_is_the_first_line_that_is_not_blank(text: str, title: str) -> None:
    assert title_of(text) == title
