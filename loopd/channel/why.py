"""Explains a session's requests in plain words, from the records alone. Pure (SPEC 4.3, 8)."""

from typing import Any

from loopd.proto.records import LossCause
from loopd.proto.usage import Row

_CAUSES: dict[LossCause, str] = {
    "server_restarted": "the model server was restarted and its cache was empty",
    "slot_taken": "somebody else used the slot in between",
    "evicted": "the model server gave the slot's place to another conversation",
    "state_not_restored": "the saved state of the slot was not restored",
    "history_rewritten": "the request did not begin with what was sent before",
    "retokenised": "the model's own text was cut into other tokens when it came back",
    "cannot_roll_back": "a model of this kind cannot go back to an earlier token",
    "model_changed": "the conversation went on with another model or template",
    "unknown": "what is known does not tell the cause",
}


def explain(rows: list[Row]) -> list[dict[str, Any]]:
    """Return, for each request, what should have been cached, what was, and why they differ."""
    return [
        {
            "epoch": row.epoch,
            "line": row.line,
            "at": row.usage.at,
            "expected": row.usage.expected,
            "cached": row.usage.cached_tokens,
            "loss": row.usage.loss,
            "cause": row.usage.cause.name if row.usage.cause else None,
            "evidence": row.usage.cause.evidence if row.usage.cause else None,
            "text": _sentence(row),
        }
        for row in rows
    ]


def _sentence(row: Row) -> str:
    usage = row.usage
    if usage.expected is None or usage.cached_tokens is None or usage.loss is None:
        return "the model server reported no numbers, so nothing can be said"
    if usage.expected == 0:
        return "the first request: nothing could be cached, so nothing was lost"
    found = f"{usage.expected:,} tokens should have been cached, {usage.cached_tokens:,} were"
    if usage.loss == 0:
        return f"{found}: nothing was lost"
    cause = f" because {_CAUSES[usage.cause.name]}" if usage.cause else ""
    return f"{found}: {usage.loss:,} were evaluated again{cause}"
