"""Streams as other servers send them, put together."""

from collections.abc import Iterable
from typing import Any

import pytest

from loopd.errors import ModelProtocolError
from loopd.model.completion import Assembler, Completion, ProducedCall, join_body
from loopd.model.wire import Chunk
from loopd.proto.usage import Reported
from tests.model.requests import ignore


def assembled(chunks: Iterable[dict[str, Any]]) -> Completion:
    assembler = Assembler(ignore)
    for chunk in chunks:
        assembler.feed(Chunk.model_validate(chunk))
    return assembler.completion(None)


def piece(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def call(**fields: Any) -> dict[str, Any]:
    return piece(tool_calls=[fields])


def test_calls_without_indexes_begin_with_their_ids() -> None:
    answer = assembled(
        [
            call(id="x", function={"name": "f", "arguments": '{"a"'}),
            call(function={"arguments": ":1}"}),
            call(id="y", function={"name": "g", "arguments": "{}"}),
            piece("stop"),
        ]
    )
    assert answer.tool_calls == (ProducedCall("x", "f", '{"a":1}'), ProducedCall("y", "g", "{}"))
    assert answer.finish_reason == "tool_calls"


def test_pieces_of_two_calls_may_come_in_turns() -> None:
    answer = assembled(
        [
            call(index=0, id="x", function={"name": "f"}),
            call(index=1, id="y", function={"name": "g"}),
            call(index=0, function={"arguments": "1"}),
            call(index=1, function={"arguments": "2"}),
            piece("tool_calls"),
        ]
    )
    assert [made.arguments for made in answer.tool_calls] == ["1", "2"]


def test_a_call_without_an_id_gets_one() -> None:
    answer = assembled([call(index=0, function={"name": "f", "arguments": "{}"}), piece("tool_calls")])
    assert answer.tool_calls[0].id == "call_0"


def test_a_call_that_was_cut_before_its_name_is_left_out_and_one_cut_later_is_kept_as_it_is() -> None:
    answer = assembled(
        [call(index=0, id="x", function={"name": "f", "arguments": '{"a'}), call(index=1, id="y"), piece("length")]
    )
    assert answer.tool_calls == (ProducedCall("x", "f", '{"a'),)
    assert answer.finish_reason == "length"


@pytest.mark.parametrize("reason", ["stop", "content_filter", "eos"])
def test_any_other_reason_to_end_is_a_stop(reason: str) -> None:
    assert assembled([piece(content="a"), piece(reason)]).finish_reason == "stop"


def test_a_stream_without_a_reason_to_end_did_not_end() -> None:
    with pytest.raises(ModelProtocolError, match="mid-stream"):
        assembled([piece(content="a")])


@pytest.mark.parametrize(
    ("chunk", "cached"),
    [
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 2}}, None),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}}, 3),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 2}, "timings": {"cache_n": 4}}, 4),
    ],
)
def test_cached_tokens_are_taken_from_where_the_server_has_them(chunk: dict[str, Any], cached: int | None) -> None:
    reported = assembled([piece("stop"), chunk]).reported
    assert reported == Reported(prompt_tokens=5, completion_tokens=2, cached_tokens=cached)


def test_an_empty_chunk_brings_nothing() -> None:
    assembler = Assembler(ignore)
    assert not assembler.feed(Chunk.model_validate(piece(role="assistant", content=None)))
    progress = Chunk.model_validate({"prompt_progress": {"total": 9, "cache": 1, "processed": 5}})
    assert [assembler.feed(progress), assembler.feed(progress)] == [True, False]
    assert assembler.feed(Chunk.model_validate(piece(content="a")))


def test_a_body_is_joined_from_bytes_as_they_are() -> None:
    assert join_body({}, [b'{"a": 1}', b"{}"], b"[]", {}) == b'{"messages":[{"a": 1},{}]}'
    assert join_body({"n": 1}, [], b"[{}]", {"d": "x"}) == (
        b'{"chat_template_kwargs":{"d":"x"},"n":1,"tools":[{}],"messages":[]}'
    )
