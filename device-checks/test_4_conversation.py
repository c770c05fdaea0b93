"""Conversations by the real model on the device: what a restart, a crash, a change and a reboot cost in tokens."""

import secrets
from collections.abc import Callable, Iterator
from itertools import pairwise
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


def talk(instance: Instance, between: Callable[[], Any]) -> list[dict[str, Any]]:
    """Hold four turns with `between` done between the second and the third; return the recomputed token table."""
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


def prove_nothing_lost(report: Report, title: str, table: list[dict[str, Any]]) -> None:
    """Put the table into the report; fail on every loss that loopd, or what was done to it, could have caused.

    One loss is nobody's: a model may write an answer in other tokens than the tokenizer makes of its text, and then
    whoever sends the text again loses tokens of that answer. It passes only if loopd recorded it as such with its
    evidence, and the server's own numbers say that all before that answer was still cached. The report names it.
    """
    report.tables[title] = table
    for before, row in pairwise([{"prompt": 1, "completion": 0}, *table]):
        if row["loss"]:
            assert row["cause"].startswith("retokenised: "), f"turn {row['turn']} lost {row['loss']}: {row['cause']}"
            assert row["cached"] >= before["prompt"] - 1
            assert row["loss"] <= before["completion"]
            report.notes.append(f"{title}: turn {row['turn']} lost {row['loss']} tokens, {row['cause']}")


def prove_losses_explained(report: Report, title: str, rows: list[dict[str, Any]]) -> None:
    """Fail on every loss but those that SPEC 4.3 and 4.4 allow beside saved states; the report names them."""
    for row in rows:
        assert row["loss"] is not None
        if row["loss"]:
            report.notes.append(f"{title}: a request lost {row['loss']} tokens, {row['cause']}")
            assert row["cause"]["name"] in ("state_not_restored", "retokenised"), row["cause"]


@pytest.fixture(scope="module")
def second(device: Device) -> Iterator[Second]:
    """A second instance with the real model."""
    instance = Second(device)
    instance.install()
    yield instance
    instance.remove()


def test_restart_between_turns_loses_nothing(installed: Instance, report: Report) -> None:
    """Four turns with a restart of loopd after the second lose no token, by the model server's own count.

    Seen failing: the model server restarted too, and its saved states deleted.
    """
    print("the installed loopd is restarted once")
    prove_nothing_lost(report, "four turns, loopd restarted after the second", talk(installed, installed.restart))


def test_crash_between_turns_loses_nothing(second: Second, report: Report) -> None:
    """Four turns with loopd killed between the second and the third lose no token.

    Seen failing: the model server restarted too, and its saved states deleted.
    """
    prove_nothing_lost(report, "four turns, loopd killed after the second", talk(second, second.crash))


def test_change_and_upgrade_between_turns_lose_nothing(second: Second, report: Report) -> None:
    """Four turns with another configuration and another release from the third on lose no token.

    Seen failing: the model server restarted too, and its saved states deleted.
    """

    def change() -> None:
        second.configure('system_prompt = "You are somebody else now."\nmax_steps = 7')
        second.upgrade()

    prove_nothing_lost(report, "four turns, another configuration and release from the third on", talk(second, change))


def test_key_said_twice_runs_once(second: Second) -> None:
    """The same key said again gives the recorded turn again, and runs nothing.

    Seen failing: said again under another key.
    """
    session, key = second.session(), secrets.token_hex(8)
    first = second.say(session, TEXTS[0], key)
    before = counters(second)
    again = second.say(session, TEXTS[0], key)
    assert counters(second) == before
    assert len(second.usage(session)) == 1
    assert first[-1]["reason"] == again[-1]["reason"]


def test_alternating_sessions_lose_nothing(second: Second, report: Report) -> None:
    """Two sessions that take turns in one slot lose nothing, unless restoring was measured to be the slower way.

    Seen failing: the model server restarted between the turns, and its saved states deleted.
    """
    sessions = (second.session(), second.session())
    for number, text in enumerate(TEXTS[:3]):
        for session in sessions:
            second.say(session, text, f"{session}-{number}")
    for session in sessions:
        prove_losses_explained(report, "two sessions in one slot", second.usage(session))


def test_dropped_client_comes_back_to_its_turn(second: Second, device: Device) -> None:
    """A client that is killed in mid-turn changes nothing: asked again under its key, the turn is there, run once.

    Seen failing: asked again under another key.
    """
    session, key = second.session(), secrets.token_hex(8)
    second.configure(max_completion_tokens=200)
    second.restart()
    before = counters(second)
    command = f"{second.environment} timeout -s KILL 1.5 bxctl chat --session %s --message %s --key %s --json"
    device.run(command, session, "Tell me a long story about the sea.", key)
    end = second.say(session, "Tell me a long story about the sea.", key)[-1]
    assert end["type"] == "turn_end"
    rows = second.usage(session)
    assert len(rows) == 1
    assert counters(second).evaluated - before.evaluated == rows[0]["evaluated"]


def test_busy_device_loses_nothing(second: Second, device: Device, report: Report) -> None:
    """With every core of the device busy, four turns still lose no token.

    Seen failing: the model server restarted before the third turn, and its saved states deleted.
    """
    device.out(
        "systemd-run --unit=loopd-checks-load --collect -p RuntimeMaxSec=600 "
        "sh -c 'for _ in $(seq $(nproc)); do (while :; do :; done) & done; wait'"
    )
    try:
        prove_nothing_lost(report, "four turns on a busy device", talk(second, lambda: None))
    finally:
        device.run("systemctl stop loopd-checks-load.service")
