"""The promise, with the real model: four turns with a restart in the middle, and not one cached token lost."""

import signal
from typing import Any

import pytest

from tests.integration.appliance import Appliance, ServerNumbers, running

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

BEFORE = ("Hello, my name is Ada.", "What is the capital of France?")
AFTER = ("And of Italy?", "What is my name?")


def say_and_recompute(device: Appliance, server: ServerNumbers, session: str, text: str) -> None:
    """Say one thing and hold the newest `usage` row against the server's own numbers, to the token."""
    before = server.evaluated()
    device.chat(session, text)
    evaluated = server.evaluated() - before
    row = device.json("usage", session)["requests"][-1]
    exported = device.json("export", session)
    *asked, answer = exported["messages"]
    assert answer["role"] == "assistant"
    assert asked[-1] == {"role": "user", "content": text}
    prompt = server.prompt_tokens(asked, exported["tools"])
    assert (row["prompt_tokens"], row["cached_tokens"], row["evaluated"]) == (prompt, prompt - evaluated, evaluated)


def assert_nothing_lost(device: Appliance, session: str, requests: int) -> None:
    table = device.json("usage", session)
    rows = table["requests"]
    assert table["session"] == session
    assert len(rows) == requests
    assert [row["loss"] for row in rows] == [0] * requests
    assert [row["evaluated"] for row in rows[1:]] == [row["floor"] for row in rows[1:]]
    assert table["total"]["ratio"] == 1.0
    assert (table["total"]["loss"], table["total"]["max_loss"], table["total"]["left_out"]) == (0, 0, 1)


@pytest.mark.parametrize(
    ("how", "config_after"),
    [
        (signal.SIGTERM, {}),
        (signal.SIGKILL, {}),
        (signal.SIGTERM, {"loop": {"system_prompt": "You are a pirate. Answer in rhymes."}}),
    ],
    ids=["sigterm", "kill-9", "another-system-prompt"],
)
def test_a_restart_in_mid_conversation_loses_no_cached_token(
    device: Appliance, server: ServerNumbers, how: signal.Signals, config_after: dict[str, dict[str, Any]]
) -> None:
    with running(device):
        for text in BEFORE:
            say_and_recompute(device, server, "s", text)
        assert device.stop(how) == (0 if how is signal.SIGTERM else -signal.SIGKILL)
        device.configure(**config_after)
        device.start()
        for text in AFTER:
            say_and_recompute(device, server, "s", text)
        assert_nothing_lost(device, "s", requests=4)
        if config_after:
            new = config_after["loop"]["system_prompt"]
            assert device.baseline("s")["system_prompt"] != new
            device.chat("t", "Hello.")
            assert device.baseline("t")["system_prompt"] == new
