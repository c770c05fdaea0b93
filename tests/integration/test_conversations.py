"""Longer and stranger conversations with the real model: unicode, tool calls, cancels."""

import json
import random
import subprocess
from typing import Any

import pytest

from tests.integration.appliance import BXCTL, PATIENCE_S, Appliance, running

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz      ",
    "äöüßéèñçøåłžšőűÿ   ",
    "АБВГДЕЖЗИКЛМНОПРСТУФХЦЧШЩ  ",
    "日本語漢字仮名交じり文中国话한국어  ",
    "العربيةעברית  ",
    "0123456789.,-+*/=()[]{}<>&%$#@!?\"'\\\n\t",
    "😀🎉🧪👩‍🔬🇨🇭🏳️‍🌈 ",
)


def odd_text(source: random.Random) -> str:
    words = "".join(source.choice(source.choice(ALPHABETS)) for _ in range(source.randint(3, 40)))
    return words.strip() or "…"


def test_sixty_turns_of_unicode_lose_nothing_that_is_not_shown_to_be_retokenised(device: Appliance) -> None:
    source = random.Random(20261201)
    texts = [odd_text(source) for _ in range(60)]
    device.configure(model={"temperature": 1.0, "seed": 7}, loop={"max_completion_tokens": 16})
    with running(device):
        device.chat("unicode", *texts)
        table = device.json("usage", "unicode")
    assert len(table["requests"]) == 60
    lost = [row for row in table["requests"] if row["loss"]]
    for row in lost:
        assert row["cause"]["name"] == "retokenised", row
        assert row["cause"]["evidence"]
    assert table["total"]["max_loss"] <= 17


def test_a_cancel_in_mid_stream_loses_no_cached_token(device: Appliance) -> None:
    device.configure(loop={"max_completion_tokens": 64})
    story = "Tell me a very long story about a lighthouse, a ship and a storm."
    with running(device):
        device.chat("c", "Hello, my name is Ada.")
        for again in (story, "What is my name?"):
            end = cancel_after(device, "c", story, deltas=5)
            assert (end["type"], end["reason"], end["recorded"], end["text"]) == ("turn_end", "cancelled", False, story)
            device.chat("c", again)
        table = device.json("usage", "c")
    assert [row["loss"] for row in table["requests"]] == [0, 0, 0]


def cancel_after(device: Appliance, session: str, text: str, *, deltas: int) -> dict[str, Any]:
    """Say something, cancel it when that many deltas have come, and return the last frame."""
    arguments = [*BXCTL, "chat", "--session", session, "--message", text, "--json"]
    with subprocess.Popen(arguments, env=device.environment, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        frame: dict[str, Any] = {}
        for line in client.stdout:
            frame = json.loads(line)
            deltas -= frame["type"] == "delta"
            if frame["type"] == "delta" and deltas == 0:
                device.bxctl("cancel", session)
        assert client.wait(PATIENCE_S) == 1
    return frame
