"""Explains a session's requests in plain words, from the records alone. Pure (SPEC 4.3, 8)."""

from typing import Any

from loopd.proto.records import LossCause
from loopd.proto.usage import Row, cost_s

_CAUSES: dict[LossCause, str] = {
    "server_restarted": "the model server was restarted and its cache was empty",
    "slot_taken": "somebody else used the slot in between",
    "evicted": "another conversation was given the slot, and what was in it could not be kept",
    "state_not_restored": "the saved state of the slot was of no use",
    "history_rewritten": "the request did not begin with what was sent before",
    "retokenised": "the model's own text was cut into other tokens when it came back",
    "cannot_roll_back": "a model of this kind cannot go back to an earlier token",
    "model_changed": "the conversation went on with another model or template",
    "unknown": "what is known does not tell the cause",
}

_ADVICE: dict[LossCause, str] = {
    "server_restarted": "stop loopd before the model server, so that it saves first, or lower save_idle_s in [model]",
    "slot_taken": "let nothing but loopd use this model server: its default, a Unix socket, is for loopd alone",
    "evicted": "give states more room (max_states_bytes, max_states_day_bytes in [model]) or the server more slots",
    "state_not_restored": "bxctl status tells whether states are used; a file that was torn is made again by itself",
    "history_rewritten": "use a chat template that leaves earlier messages alone: loopd model check tells what it does",
    "retokenised": "nothing: at most one answer is evaluated again, and it happens with any client",
    "cannot_roll_back": "nothing, or a model whose every layer has a full cache: this one starts over after a cancel",
    "model_changed": "nothing: it is paid once, for the whole history",
    "unknown": "bxctl doctor is the page for a bug report",
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
            "cost_s": _cost_s(row),
            "advice": _ADVICE[row.usage.cause.name] if row.usage.cause else None,
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
    cost = _cost_s(row)
    return f"{found}: {usage.loss:,} were evaluated again{f', in {cost:.1f} s,' if cost is not None else ''}{cause}"


def _cost_s(row: Row) -> float | None:
    cost = cost_s(row.usage)
    return None if cost is None else round(cost, 3)
