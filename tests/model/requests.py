"""Requests as the turn loop makes them, small."""

from typing import Any

from loopd.model.client import CompletionRequest, Event, TextDelta
from loopd.proto.canonical import canonical


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def request(*messages: dict[str, Any], slot: int | None = 0, tools: bytes = b"[]", **more: Any) -> CompletionRequest:
    encoded = [canonical(message) for message in messages]
    return CompletionRequest(messages=encoded, tools=tools, slot=slot, max_tokens=more.pop("max_tokens", 64), **more)


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))
