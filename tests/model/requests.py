"""Requests as the turn loop makes them, small."""

from collections.abc import Iterable
from typing import Any

from loopd.model.client import Completion, CompletionRequest, Event, ProducedCall, TextDelta
from loopd.proto.canonical import canonical, sha256
from loopd.proto.records import Usage
from loopd.proto.usage import usage_record

AT = "2026-12-01T00:00:00.000000Z"
TOOLS = canonical(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A tool.",
                "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
            },
        }
        for name in ("find_tool", "other_tool")
    ]
)


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, *calls: ProducedCall, reasoning: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def results(calls: Iterable[ProducedCall], text: str = "done") -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": call.id, "content": text} for call in calls]


def encoded(*messages: dict[str, Any]) -> list[bytes]:
    return [canonical(message) for message in messages]


def request(*messages: dict[str, Any], slot: int | None = 0, tools: bytes = b"[]", **more: Any) -> CompletionRequest:
    max_tokens = more.pop("max_tokens", 64)
    return CompletionRequest(messages=encoded(*messages), tools=tools, slot=slot, max_tokens=max_tokens, **more)


def usage_of(asked: CompletionRequest, completion: Completion) -> Usage:
    """The record that the turn loop would write, as far as the account reads it."""
    serialised = b"".join(message + b"\n" for message in asked.messages)
    return usage_record(
        completion.reported,
        at=AT,
        expected=None,
        loss=None,
        cause=None,
        slot=asked.slot,
        request_bytes=len(serialised),
        request_sha256=sha256(serialised),
    )


def left_by(completion: Completion) -> int:
    """What the request left in its slot: P + C - 1."""
    assert completion.reported.prompt_tokens is not None
    assert completion.reported.completion_tokens is not None
    return completion.reported.prompt_tokens + completion.reported.completion_tokens - 1


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def ignore(_event: Event) -> None:
    pass
