"""Conversations by the real model on the device: what a restart, a crash, a change and a reboot cost in tokens."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from checks.account import counters, prompts, token_table
from checks.device import Device
from checks.instance import Instance, Second
from checks.report import Report

pytestmark = pytest.mark.stage("serving")

TEXTS = (
    "Answer in one short sentence: what is a lighthouse?",
    "And who looks after it?",
    "Name one colour it may have.",
    "Thank you. Say goodbye.",
)

_CONVERSATIONS = 3


def talk(instance: Instance, between: Callable[[], Any]) -> list[dict[str, Any]]:
    """Hold four turns with `between` done between the second and the third; return the recomputed token table.

    A model that writes a word in other tokens than its tokenizer would loses some of that answer, whoever replays it
    (cause `retokenised`). That says nothing about what is checked here, so the conversation is then held again.
    """
    for _ in range(_CONVERSATIONS):
        table = _talk_once(instance, between)
        if all(row["cause"] != "retokenised" for row in table):
            return table
    raise AssertionError(f"{_CONVERSATIONS} conversations were retokenised")


def _talk_once(instance: Instance, between: Callable[[], Any]) -> list[dict[str, Any]]:
    session, evaluated = instance.session(), []
    for number, text in enumerate(TEXTS, start=1):
        before = counters(instance)
        end = instance.say(session, text, f"{session}-{number}")[-1]
        assert end["type"] == "turn_end"
        assert end["recorded"]
        after = counters(instance)
        evaluated.append(after.evaluated - before.evaluated)
        if number == 2:
            between()
    rows = instance.usage(session)
    assert len(rows) == len(TEXTS), f"{len(rows)} requests for {len(TEXTS)} turns: the model called a tool"
    table = token_table(evaluated, prompts(instance, session), rows)
    assert [(row["prompt"], row["cached"], row["loss"]) for row in table] == [
        (row["prompt_tokens"], row["cached_tokens"], row["loss"]) for row in rows
    ], "what loopd recorded is not what the model server counted"
    return table


def lost(table: list[dict[str, Any]]) -> list[int]:
    """Return the loss of each request."""
    return [row["loss"] for row in table]


@pytest.fixture(scope="module")
def second(device: Device) -> Iterator[Second]:
    """A second instance with the real model."""
    instance = Second(device)
    instance.install()
    yield instance
    instance.remove()


def test_restart_between_turns_loses_nothing(installed: Instance, report: Report) -> None:
    """Four turns with a restart of loopd after the second lose no token, by the model server's own count."""
    print("the installed loopd is restarted once")
    table = talk(installed, installed.restart)
    report.tables["four turns, loopd restarted after the second"] = table
    assert lost(table) == [0, 0, 0, 0]


def test_crash_between_turns_loses_nothing(second: Second) -> None:
    """Four turns with loopd killed between the second and the third lose no token."""
    assert lost(talk(second, second.crash)) == [0, 0, 0, 0]


def test_change_and_upgrade_between_turns_lose_nothing(second: Second) -> None:
    """Four turns with another configuration and another release from the third on lose no token."""

    def change() -> None:
        second.configure('system_prompt = "You are somebody else now."\nmax_steps = 7')
        second.upgrade()

    assert lost(talk(second, change)) == [0, 0, 0, 0]


def test_key_said_twice_runs_once(second: Second) -> None:
    """The same key said again gives the recorded turn again, and runs nothing."""
    session, key = second.session(), secrets.token_hex(8)
    first = second.say(session, TEXTS[0], key)
    before = counters(second)
    again = second.say(session, TEXTS[0], key)
    assert counters(second) == before
    assert len(second.usage(session)) == 1
    assert first[-1]["reason"] == again[-1]["reason"]


def test_alternating_sessions_explain_every_loss(second: Second) -> None:
    """Two sessions that take turns in one slot: each loss is attributed to the other, or there is none."""
    sessions = (second.session(), second.session())
    for number, text in enumerate(TEXTS[:3]):
        for session in sessions:
            second.say(session, text, f"{session}-{number}")
    for session in sessions:
        causes = [(row["cause"] or {}).get("name") for row in second.usage(session) if row["loss"]]
        assert set(causes) <= {"slot_taken"}


def test_dropped_client_comes_back_to_its_turn(second: Second, device: Device) -> None:
    """A client that is killed in mid-turn changes nothing: asked again under its key, the turn is there, run once."""
    session, key = second.session(), secrets.token_hex(8)
    second.configure(max_completion_tokens=200)
    second.restart()
    before = counters(second)
    command = f"{second._environment()} timeout -s KILL 1.5 bxctl chat --session %s --message %s --key %s --json"
    device.run(command, session, "Tell me a long story about the sea.", key)
    end = second.say(session, "Tell me a long story about the sea.", key)[-1]
    assert end["type"] == "turn_end"
    rows = second.usage(session)
    assert len(rows) == 1
    assert counters(second).evaluated - before.evaluated == rows[0]["evaluated"]


def test_busy_device_loses_nothing(second: Second, device: Device) -> None:
    """With every core of the device busy, four turns still lose no token."""
    device.out(
        "systemd-run --unit=loopd-checks-load --collect -p RuntimeMaxSec=600 "
        "sh -c 'for _ in $(seq $(nproc)); do (while :; do :; done) & done; wait'"
    )
    try:
        assert lost(talk(second, lambda: None)) == [0, 0, 0, 0]
    finally:
        device.run("systemctl stop loopd-checks-load.service")
