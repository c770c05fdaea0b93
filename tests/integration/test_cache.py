"""The promise in every situation between two turns: what was cached stays cached, or the loss has its true cause."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from loopd.config import DEFAULT_SYSTEM_PROMPT
from loopd.model.server import template_text
from tests.integration.appliance import ServerNumbers
from tests.model.tiny_gguf import make_tiny_gguf
from tests.servers import model_file
from tests.situations import SITUATIONS, LoopdSide, Side, alternating, cold_start, on_loopd, registry_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    make_tiny_gguf(model_file(), path, answer=("It", "Ġworks", "."))
    return path


@pytest.fixture
def loopd(tmp_path: Path, tiny: Path) -> Iterator[LoopdSide]:
    with on_loopd(tmp_path, tiny) as side:
        yield side


@pytest.mark.parametrize(("slots", "play"), SITUATIONS.values(), ids=SITUATIONS)
def test_nothing_is_evaluated_twice(tmp_path: Path, tiny: Path, slots: int, play: Callable[[Side], None]) -> None:
    with on_loopd(tmp_path, tiny, slots=slots) as side:
        play(side)
        found = side.outcome()
        status = side.device.json("status")
    assert (found.evaluated, found.max_loss, found.causes) == (found.floor, 0, [])
    assert status["cache"]["hit_rate"] == 1.0
    assert status["refused"] == []


def test_two_sessions_on_one_slot_of_the_small_model_lose_next_to_nothing(tmp_path: Path) -> None:
    with on_loopd(tmp_path, model_file()) as side:
        alternating(side, sessions=2, rounds=4)
        found = side.outcome()
    assert found.ratio <= 1.01
    assert found.max_loss <= 3


def usage_of(side: LoopdSide, session: str) -> dict[str, Any]:
    row: dict[str, Any] = side.device.json("usage", session)["requests"][-1]
    return row


def why(side: LoopdSide, session: str) -> dict[str, Any]:
    row: dict[str, Any] = side.device.json("why", session)["requests"][-1]
    return row


def test_a_killed_server_is_the_cause_of_a_loss_that_is_explained_with_its_cost(loopd: LoopdSide) -> None:
    loopd.say("a", "one")
    loopd.say("a", "two")
    loopd.restart_model(planned=False)
    loopd.say("a", "three")
    told = why(loopd, "a")
    assert told["cause"] == "server_restarted"
    assert told["loss"] == told["expected"] > 0
    assert told["cost_s"] > 0
    assert "not used since the model server started" in told["evidence"]
    assert "not saved" in told["evidence"]
    words = loopd.device.bxctl("why", "a").stdout
    assert "because the model server was restarted" in words
    assert "to do: " in words
    (losses,) = loopd.device.json("status")["cache"]["losses"]
    assert (losses["cause"], losses["requests"], losses["tokens"]) == ("server_restarted", 1, told["loss"])
    loopd.say("a", "four")
    assert usage_of(loopd, "a")["loss"] == 0


def test_a_server_that_is_killed_after_an_idle_moment_costs_nothing(tmp_path: Path, tiny: Path) -> None:
    with on_loopd(tmp_path, tiny, slots=2, save_idle_s=0.01) as side:
        alternating(side, sessions=2, rounds=2)
        side.wait_saved()
        side.restart_model(planned=False)
        alternating(side, sessions=2, rounds=1)
        assert side.outcome().max_loss == 0


def test_a_foreign_request_is_the_cause_of_a_loss(loopd: LoopdSide) -> None:
    loopd.say("a", "one")
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=loopd.model.url.removeprefix("unix:")), base_url="http://model"
    ) as other:
        other.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi " * 50}], "max_tokens": 2}
        )
    loopd.say("a", "two")
    told = why(loopd, "a")
    assert told["cause"] == "slot_taken"
    assert "another client's task" in told["evidence"]


def test_a_new_session_on_a_cold_server_evaluates_its_own_text_alone(loopd: LoopdSide) -> None:
    cold_start(loopd)
    own_text = loopd.behind_the_baseline("b")
    assert loopd.first_evaluated("b") <= own_text + 5 < loopd.first_evaluated("a") / 4


def test_a_thousand_tools_cost_the_first_request_no_more_than_ten(loopd: LoopdSide) -> None:
    server = ServerNumbers(loopd.model.url)
    asked = [{"role": "system", "content": DEFAULT_SYSTEM_PROMPT}, {"role": "user", "content": "Hello."}]
    ten, thousand = (server.prompt_tokens(asked, [*registry_of(count).definitions]) for count in (10, 1000))
    server.close()
    assert ten == thousand <= 310


def test_a_swapped_model_costs_a_fork_its_history_once_and_says_so(tmp_path: Path, tiny: Path) -> None:
    other = tmp_path / "other.gguf"
    make_tiny_gguf(model_file(), other, answer=("Yes", "."))
    with on_loopd(tmp_path, tiny) as side:
        side.say("a", "one")
        side.say("a", "two")
        side.stop()
        side.model.stop()
        side.model.serve(other)
        side.start()
        refused = side.device.bxctl("chat", "--session", "a", "--message", "three", ok=False)
        assert refused.returncode == 1
        assert "the session began with" in refused.stderr
        fork = side.device.json("fork", "a", "--new-baseline")["session"]
        side.say(fork, "three")
        told = why(side, fork)
        side.say(fork, "four")
        assert usage_of(side, fork)["loss"] == 0
    assert told["cause"] == "model_changed"
    assert "forked from a:" in told["evidence"]


def test_a_rewritten_template_is_refused_by_name_and_the_old_one_goes_on(tmp_path: Path, tiny: Path) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(template_text("chatml-tools").replace("<|im_start|>", "<|im_start|> "), encoding="utf-8")
    with on_loopd(tmp_path, tiny) as side:
        side.say("a", "one")
        for name, status in ((str(template), 1), ("chatml-tools", 0)):
            side.stop()
            side.model.stop()
            side.model.serve(tiny, template=name)
            side.start()
            said = side.device.bxctl("chat", "--session", "a", "--message", "two", ok=False)
            assert said.returncode == status
            assert ("the session began with the chat template" in said.stderr) == bool(status)
        assert usage_of(side, "a")["loss"] == 0


def test_a_second_signal_skips_saving(loopd: LoopdSide) -> None:
    loopd.say("a", "one")
    os.kill(loopd.model.pids[-1], signal.SIGSTOP)
    try:
        daemon = loopd.device.daemon
        assert daemon is not None
        daemon.send_signal(signal.SIGTERM)
        loopd.wait_logged("stopping")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(20) == 0
        loopd.device.daemon = None
    finally:
        os.kill(loopd.model.pids[-1], signal.SIGCONT)
    assert "not_saved session=a" in loopd.device.log()
    assert "states_saved slots=0 skipped=1" in loopd.device.log()


def test_a_deleted_session_leaves_no_saved_text(loopd: LoopdSide) -> None:
    loopd.say("a", "one")
    loopd.stop()
    loopd.start()
    assert list((loopd.device.home / "slots").glob("s.a.*.bin"))
    loopd.device.bxctl("delete", "a", "--yes")
    assert list((loopd.device.home / "slots").glob("*.bin")) == []


def test_states_are_their_owner_s_alone(loopd: LoopdSide) -> None:
    loopd.say("a", "one")
    loopd.stop()
    files = list((loopd.device.home / "slots").iterdir())
    assert len(files) == 5
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_slots_directory_that_is_deleted_costs_what_was_in_it_and_no_more(loopd: LoopdSide) -> None:
    loopd.say("a", "one and two")
    loopd.say("b", "three and four")
    for path in (loopd.device.home / "slots").iterdir():
        path.unlink()
    loopd.say("a", "two")
    assert usage_of(loopd, "a")["cause"]["name"] == "slot_taken"
    loopd.say("b", "two")
    loopd.say("a", "three")
    assert usage_of(loopd, "a")["loss"] == 0
