"""A conversation goes on from a summary, with the real model: what was said stays, and nothing else is lost."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.appliance import BXCTL, PATIENCE_S, Appliance, ServerNumbers, running
from tests.integration.test_four_turns import say_and_recompute
from tests.model.tiny_gguf import make_tiny_gguf
from tests.servers import model_file, start_model_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

LIMITS = {"loop": {"max_completion_tokens": 32, "max_summary_tokens": 48}}


def test_a_compacted_conversation_goes_on_and_loses_nothing_but_what_the_summary_replaced(
    device: Appliance, server: ServerNumbers
) -> None:
    device.configure(**LIMITS)
    with running(device):
        device.chat("s", "Hello, my name is Ada.", options=["--key", "k1"])
        device.chat("s", "What is the capital of France?")
        old = device.bxctl("show", "s", "--json").stdout
        old_files = {path.name: path.read_bytes() for path in (device.home / "sessions" / "s").iterdir()}
        done = device.json("compact", "s", "--yes")
        estimate, summary_row = done["estimate"], device.json("usage", "s")["requests"][-1]
        assert (summary_row["prompt_tokens"], summary_row["evaluated"], summary_row["loss"]) == (
            estimate["prompt_tokens"],
            estimate["evaluated_tokens"],
            0,
        )
        say_and_recompute(device, server, "s", "And of Italy?")
        device.stop(signal.SIGKILL)
        device.start()
        say_and_recompute(device, server, "s", "What did we talk about?")
        rows = device.json("usage", "s")["requests"]
        assert [row["epoch"] for row in rows] == [0, 0, 0, 1, 1]
        assert [row["loss"] for row in rows] == [0] * 5
        assert rows[3]["prompt_tokens"] <= estimate["next_prompt_tokens"] + 10
        messages = device.json("export", "s")["messages"]
        assert messages[2] == {"role": "assistant", "content": done["summary"]}
        assert device.bxctl("show", "s", "--epoch", "0", "--json").stdout == old
        now = {path.name: path.read_bytes() for path in (device.home / "sessions" / "s").iterdir()}
        assert old_files.items() <= now.items()
        again = device.chat("s", "Hello, my name is Ada.", options=["--key", "k1"])
        assert [frame["epoch"] for frame in again if frame["type"] == "record"] == [0, 0, 0, 0]
        assert len(device.json("usage", "s")["requests"]) == 5
        assert device.loopd("session", "verify", "s").returncode == 0


def test_a_kill_while_the_summary_is_written_leaves_the_epoch_as_it_is(device: Appliance) -> None:
    device.configure(loop={"max_completion_tokens": 16, "max_summary_tokens": 512})
    with running(device):
        device.chat("k", "Tell me a long story about a lighthouse.")
        before = {path.name: path.read_bytes() for path in (device.home / "sessions" / "k").iterdir()}
        with subprocess.Popen(
            [*BXCTL, "compact", "k", "--yes"], env=device.environment, stderr=subprocess.PIPE, text=True
        ) as client:
            while device.json("status")["sessions"]["running"] == 0 and client.poll() is None:
                pass
            assert client.poll() is None
            device.stop(signal.SIGKILL)
            assert client.wait(PATIENCE_S) == 3
        device.start()
        now = {path.name: path.read_bytes() for path in (device.home / "sessions" / "k").iterdir()}
        assert now == before
        device.chat("k", "And then?")
        assert [row["loss"] for row in device.json("usage", "k")["requests"]] == [0, 0]


def test_a_small_context_never_fills_up_where_the_session_may_go_on_by_itself(tmp_path: Path) -> None:
    text = "The lighthouse stands on the northern cliff and is forty metres high. " * 8
    gguf = tmp_path / "tiny.gguf"
    make_tiny_gguf(model_file(), gguf, answer=("It", "Ġworks", "."))
    with start_model_server(tmp_path / "m.sock", gguf=gguf, context_tokens=1024) as url:
        device = Appliance(tmp_path, url, loop={"auto_compact": True, "max_summary_tokens": 64})
        with running(device):
            frames = device.chat("auto", *(f"{number}. {text}" for number in range(12)))
            rows = device.json("usage", "auto")["requests"]
            assert device.loopd("session", "verify", "auto").returncode == 0
    assert [frame["reason"] for frame in frames if frame["type"] == "turn_end"] == ["completed"] * 12
    assert {row["epoch"] for row in rows} >= {0, 1, 2}
    assert {row["loss"] for row in rows} == {0}
