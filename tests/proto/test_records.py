import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from loopd.proto.canonical import canonical
from loopd.proto.records import (
    KEPT_KEYS,
    Assistant,
    Cause,
    Parent,
    Record,
    SessionStart,
    ToolCall,
    ToolResult,
    TurnEnd,
    Usage,
    User,
    decode_record,
    encode_record,
    record_from,
)

AT = "2026-12-01T14:00:00.000000Z"
HASH = "sha256:" + "a" * 64
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBER = st.none() | st.integers(0, 2**40)
MILLISECONDS = st.none() | st.just(0.0) | st.floats(1e-3, 1e9)  # json writes smaller ones in another notation
USAGES = st.builds(
    Usage,
    at=st.just(AT),
    prompt_tokens=NUMBER,
    completion_tokens=NUMBER,
    cached_tokens=NUMBER,
    expected=NUMBER,
    loss=NUMBER,
    cause=st.none() | st.builds(Cause, name=st.just("slot_taken"), evidence=TEXT),
    prefill_ms=MILLISECONDS,
    decode_ms=MILLISECONDS,
    first_token_ms=MILLISECONDS,
    slot=st.none() | st.integers(0, 9),
    request_bytes=st.integers(0, 2**40),
    request_sha256=st.just(HASH),
)
RECORDS: st.SearchStrategy[Record] = st.one_of(
    USAGES,
    st.builds(
        SessionStart,
        at=st.just(AT),
        version=st.just(1),
        epoch=st.integers(0, 9),
        slot=st.none() | st.integers(0, 9),
        baseline=st.just(HASH),
        owner_uid=st.integers(0, 2**32),
        parent=st.none() | st.builds(Parent, id=TEXT, epoch=st.just(0), line=st.just(1)),
        next_call=st.none() | st.integers(1, 99),
        keys=st.none() | st.lists(TEXT, max_size=3).map(tuple),
        summary_usage=st.none() | USAGES,
    ),
    st.builds(User, at=st.just(AT), text=TEXT, key=TEXT),
    st.builds(
        Assistant,
        at=st.just(AT),
        text=TEXT,
        reasoning=TEXT,
        tool_calls=st.lists(st.builds(ToolCall, id=TEXT, name=TEXT, arguments=TEXT, sent=TEXT), max_size=2).map(tuple),
        finish_reason=TEXT,
        origin=st.sampled_from(["model", "loopd"]),
    ),
    st.builds(
        ToolResult,
        at=st.just(AT),
        call=st.integers(1, 99),
        id=TEXT,
        name=TEXT,
        ok=st.booleans(),
        content=TEXT,
        cut=st.integers(0, 99),
        lossy=st.booleans(),
        approval=st.none() | TEXT,
    ),
    st.builds(TurnEnd, at=st.just(AT), reason=st.sampled_from(["completed", "interrupted"])),
)
USAGE = {
    "type": "usage", "at": AT, "prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0, "expected": 0,
    "loss": 0, "cause": None, "prefill_ms": 1.5, "decode_ms": None, "first_token_ms": 2, "slot": 0,
    "request_bytes": 10, "request_sha256": HASH,
}  # fmt: skip
START = {"type": "session_start", "at": AT, "version": 1, "epoch": 0, "slot": 0, "baseline": HASH, "owner_uid": 0}
USER = {"type": "user", "at": AT, "text": "hello", "key": "k"}


@given(RECORDS)
def test_a_line_is_read_as_it_was_written_and_written_as_it_was_read(record: Record) -> None:
    line = encode_record(record)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode_record(line) == record
    assert encode_record(decode_record(line)) == line
    compact = json.dumps(json.loads(line), separators=(",", ":"), ensure_ascii=False)
    assert line == compact.encode() + b"\n"
    assert line.startswith(b'{"type":')


@given(RECORDS)
def test_a_record_comes_back_from_a_frame(record: Record) -> None:
    assert record_from(json.loads(encode_record(record))) == record


@pytest.mark.parametrize("values", [USAGE, START, USER, USAGE | {"prompt_tokens": None, "cached_tokens": None}])
def test_these_are_records(values: dict[str, Any]) -> None:
    assert decode_record(canonical(values)).type == values["type"]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (USER | {"type": "thought"}, "thought"),
        ({key: value for key, value in USER.items() if key != "type"}, "type"),
        ({key: value for key, value in USER.items() if key != "key"}, "key"),
        (USER | {"mood": "good"}, "mood"),
        (USER | {"text": 5}, "text"),
        (USER | {"at": "2026-12-01T14:00:00Z"}, "at"),
        (USER | {"at": "2026-12-01T15:00:00.000000+01:00"}, "at"),
        (USAGE | {"prompt_tokens": -1}, "prompt_tokens"),
        (USAGE | {"prompt_tokens": "1"}, "prompt_tokens"),
        (USAGE | {"prompt_tokens": 1.5}, "prompt_tokens"),
        (USAGE | {"request_sha256": "a" * 64}, "request_sha256"),
        (USAGE | {"cause": {"name": "bad luck", "evidence": ""}}, "cause.name"),
        (START | {"epoch": -1}, "epoch"),
        (START | {"baseline": "sha256:XYZ"}, "baseline"),
        (START | {"keys": [""] * (KEPT_KEYS + 1)}, "keys"),
        ({"type": "turn_end", "at": AT, "reason": "tired"}, "reason"),
        ({"type": "tool_result", "at": AT, "call": 0, "id": "", "name": "", "ok": True, "content": ""}, "call"),
    ],
)
def test_anything_else_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        decode_record(canonical(values))


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"null", b'{"type":"user","text":"\xff"}', b'{"prefill_ms":NaN}'])
def test_what_is_no_json_object_is_refused(line: bytes) -> None:
    with pytest.raises(ValidationError):
        decode_record(line)


def test_a_lone_surrogate_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        encode_record(User(at=AT, text="\ud800", key="k"))


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        User(at=AT, text="a", key="k").text = "b"  # type: ignore[misc]  # the claim is that it fails
