"""Lines and messages of the stdio transport: by table, without a process."""

import random

import pytest
from mcp_types import JSONRPCError, JSONRPCResponse

from loopd.tools.mcp.stdio import Lines, parsed


def test_lines_are_the_same_however_the_bytes_come() -> None:
    wanted = [b"one", b"", b"x" * 90, b"three"]
    data = b"\n".join(wanted) + b"\nunfinished"
    for seed in range(50):
        lines, found, rest = Lines(100), [], data
        numbers = random.Random(seed)
        while rest:
            size = numbers.randint(1, 40)
            found += lines.feed(rest[:size])
            rest = rest[size:]
        assert found == wanted


def test_of_a_line_without_end_only_the_edges_are_kept() -> None:
    lines = Lines(10_000)
    assert lines.feed(b"head") == []
    for _ in range(100):
        assert lines.feed(b"-" * 65_536) == []
    assert lines.begun_bytes == 4 + 100 * 65_536
    (line,) = lines.feed(b"tail\n")
    assert line.startswith(b"head-")
    assert line.endswith(b"-tail")
    assert len(line) < 1100
    assert lines.begun_bytes == 0
    assert lines.feed(b"next\nthen") == [b"next"]
    assert lines.begun_bytes == 4


def test_a_message_is_taken_also_where_its_text_is_no_unicode() -> None:
    for line in (
        b'{"jsonrpc": "2.0", "id": 7, "result": {"a": "\xff"}}',
        b'{"jsonrpc": "2.0", "id": 7, "result": {"a": "\\ud800"}}',
        b'  {"result": {"a": "x"}, "id": 7, "jsonrpc": "2.0"}\r',
    ):
        message = parsed(line)
        assert isinstance(message, JSONRPCResponse)
        assert message.id == 7
        str(message.result).encode()


@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc": "2.0", "id": 7, "result": {"content": [',
        b'{"jsonrpc": "2.0", "id": 7}',
        b'{"id": 7, "result": 1}',
        b'{"jsonrpc":"2.0","id":7,"result":{"a":"xx\0xx"}}',
        b'{"result":{"a":"xx\0xx"},"jsonrpc":"2.0","id":7}',
        b'{"result":{"a":"xx\0xx"},"id":7,"jsonrpc":"2.0"}',
    ],
)
def test_a_broken_answer_is_an_error_of_its_request(line: bytes) -> None:
    message = parsed(line)
    assert isinstance(message, JSONRPCError)
    assert message.id == 7


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"Server started",
        b"[]",
        b"null",
        b'{"level": "info", "id": 7}',
        b'{"id": 7, "error',
        b'{"id": "7", "result": 1}',
        b"[" * 100_000,
        b"\xff\xfe\x00",
    ],
)
def test_a_line_that_answers_nothing_is_nothing(line: bytes) -> None:
    assert parsed(line) is None
