"""Each request of a session in plain words: what was lost, what that cost, and what to do."""

from typing import get_args

import pytest

from loopd.channel.why import explain
from loopd.proto.records import Cause, LossCause, Usage
from loopd.proto.usage import rows

AT = "2026-12-01T00:00:00.000000Z"


def usage(prompt: int | None, cached: int | None, expected: int | None, cause: LossCause | None = None) -> Usage:
    loss = max(0, expected - cached) if expected is not None and cached is not None else None
    return Usage(
        at=AT, prompt_tokens=prompt, completion_tokens=5, cached_tokens=cached, expected=expected, loss=loss,
        cause=Cause(name=cause, evidence="message 3 differs") if cause else None, prefill_ms=2000.0, decode_ms=1.0,
        first_token_ms=1.0, slot=0, request_bytes=1, request_sha256="sha256:" + "0" * 64,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("usage", "text", "cost_s"),
    [
        (usage(100, 0, 0), "the first request: nothing could be cached, so nothing was lost", 0.0),
        (usage(100, 90, 90), "90 tokens should have been cached, 90 were: nothing was lost", 0.0),
        (usage(None, None, None), "the model server reported no numbers, so nothing can be said", None),
        (
            usage(1200, 200, 1100, "server_restarted"),
            (
                "1,100 tokens should have been cached, 200 were: 900 were evaluated again, in 1.8 s, "
                "because the model server was restarted and its cache was empty"
            ),
            1.8,
        ),
    ],
)
def test_a_request_is_explained(usage: Usage, text: str, cost_s: float | None) -> None:
    (request,) = explain(rows([(0, 4, usage)]))
    assert (request["text"], request["cost_s"]) == (text, cost_s)


@pytest.mark.parametrize("cause", get_args(LossCause))
def test_every_cause_has_its_evidence_and_says_what_to_do(cause: LossCause) -> None:
    (request,) = explain(rows([(0, 4, usage(1200, 200, 1100, cause))]))
    assert request["cause"] == cause
    assert request["evidence"] == "message 3 differs"
    assert request["advice"]
    assert " because " in request["text"]
