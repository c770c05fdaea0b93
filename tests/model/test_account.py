"""Each loss has its cause, with what shows it."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from loopd.model.account import account
from loopd.model.client import ModelClient
from loopd.model.slots import SlotCondition
from loopd.proto.records import Cause, Usage
from loopd.proto.usage import Reported
from tests.model.conftest import Start
from tests.model.requests import assistant, encoded, ignore, request, usage_of, user

OURS = SlotCondition("ours", "", "slot 0 is as it was left")


@dataclass(frozen=True)
class Template:
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Baseline:
    tools_json: bytes = b"[]"
    template: Template = field(default_factory=Template)


HISTORY = (user("one"), assistant("two"), user("three"))


async def second_request(
    client: ModelClient, condition: SlotCondition, answer: dict[str, Any] = HISTORY[1]
) -> tuple[int | None, int | None, Cause | None]:
    """Send two requests and return the account of the second."""
    asked = request(*HISTORY[:1])
    first = usage_of(asked, await client.complete(asked, ignore))
    again = request(HISTORY[0], answer, HISTORY[2])
    reported = (await client.complete(again, ignore)).reported
    return await account(client, Baseline(), first, again.messages, reported, condition)


async def test_a_history_that_grows_loses_nothing(start: Start) -> None:
    _, client = await start({"text": "two"})
    expected, loss, cause = await second_request(client, OURS)
    assert (expected, loss, cause) == (10, 0, None)


async def test_a_first_request_is_expected_to_find_nothing(start: Start) -> None:
    _, client = await start()
    reported = Reported(prompt_tokens=10, completion_tokens=2, cached_tokens=0)
    assert await account(client, Baseline(), None, encoded(user("hi")), reported, OURS) == (0, 0, None)


async def test_what_the_server_did_not_report_is_not_accounted(start: Start) -> None:
    _, client = await start({"text": "two"}, {"text": "x", "no_usage": True})
    assert await second_request(client, OURS) == (None, None, None)


@pytest.mark.parametrize(
    ("condition", "name"),
    [
        (SlotCondition("cold", "", "task 1 after task 7"), "server_restarted"),
        (SlotCondition("foreign", "b", "session b used slot 0 last"), "slot_taken"),
    ],
)
async def test_a_slot_that_was_not_ours_is_the_cause(start: Start, condition: SlotCondition, name: str) -> None:
    _, client = await start({"text": "two"}, {"text": "x", "forget_tokens": 4})
    _, loss, cause = await second_request(client, condition)
    assert loss == 4
    assert cause is not None
    assert (cause.name, cause.evidence) == (name, condition.evidence)


async def test_an_answer_that_tokenises_otherwise_is_retokenised(start: Start) -> None:
    _, client = await start({"text": "two and more"}, {"text": "x", "forget_tokens": 2})
    _, loss, cause = await second_request(client, OURS, assistant("two and more"))
    assert loss == 2
    assert cause is not None
    assert cause.name == "retokenised"


async def test_a_loss_before_the_last_answer_with_the_same_text_is_unknown(start: Start) -> None:
    _, client = await start({"text": "two"}, {"text": "x", "forget_tokens": 5})
    _, _, cause = await second_request(client, OURS)
    assert cause is not None
    assert cause.name == "unknown"


def drop_earlier_reasoning(asked: httpx.Request) -> httpx.Response:
    """Render as a template does that drops the reasoning of earlier turns."""
    body = json.loads(asked.content)
    messages = body["messages"]
    last_user = max(number for number, message in enumerate(messages) if message["role"] == "user")
    text = ""
    for number, message in enumerate(messages):
        thought = message.get("reasoning_content", "") if number > last_user else ""
        text += f"[{message['role']}]{thought}{message['content']}\n"
    prompt = text + ("[assistant]" if body.get("add_generation_prompt", True) else "")
    return httpx.Response(200, json={"prompt": prompt})


def usage_for(*messages: dict[str, Any]) -> Usage:
    return Usage.model_validate(
        {
            **dict.fromkeys(Usage.model_fields, None),
            "type": "usage",
            "at": "2026-12-01T00:00:00.000000Z",
            "prompt_tokens": 50,
            "completion_tokens": 10,
            "request_bytes": sum(len(message) + 1 for message in encoded(*messages)),
            "request_sha256": "sha256:" + "0" * 64,
        }
    )


REASONED = assistant("yes", reasoning="because")
CALLED = {**REASONED, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "noon"}


@pytest.mark.parametrize(
    ("former", "added", "message"),
    [
        ([user("one")], [REASONED, user("two")], 2),
        ([user("zero"), assistant("0"), user("one")], [REASONED, user("two")], 4),
        ([user("one"), CALLED, RESULT], [assistant("done"), user("two")], 2),
        ([user("0"), assistant("0"), user("one"), CALLED, RESULT, CALLED, RESULT], [assistant("a"), user("two")], 4),
    ],
)
async def test_the_first_message_that_a_template_rewrites_is_named(
    former: list[dict[str, Any]], added: list[dict[str, Any]], message: int
) -> None:
    client = ModelClient("http://model", transport=httpx.MockTransport(drop_earlier_reasoning))
    reported = Reported(prompt_tokens=80, completion_tokens=1, cached_tokens=20)
    _, loss, cause = await account(client, Baseline(), usage_for(*former), encoded(*former, *added), reported, OURS)
    await client.close()
    assert loss == 39
    assert cause == Cause(name="history_rewritten", evidence=f"message {message} differs")


async def test_a_server_that_cannot_render_leaves_the_cause_unknown(start: Start) -> None:
    _, client = await start({"text": "two"}, {"text": "x", "forget_tokens": 2}, llama_cpp=False)
    _, _, cause = await second_request(client, SlotCondition("unknown", "", ""))
    assert cause is not None
    assert cause.name == "unknown"
    assert "did not render" in cause.evidence
