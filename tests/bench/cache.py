"""What thirty turns with a restart of the daemon in the middle cost, in tokens: evaluated over floor."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.harness import Row, at_most
from tests.integration.appliance import Appliance, running
from tests.servers import model_file, start_model_server

TURNS = 30


def run() -> list[Row]:
    with TemporaryDirectory() as directory:
        root = Path(directory)
        with start_model_server(root / "m.sock", gguf=model_file()) as url:
            device = Appliance(root, url, loop={"max_completion_tokens": 24})
            texts = [f"Tell me one short fact about the number {number}." for number in range(TURNS)]
            with running(device):
                device.chat("b", *texts[: TURNS // 2])
                device.stop()
                device.start()
                device.chat("b", *texts[TURNS // 2 :])
                total = device.json("usage", "b")["total"]
                rows = device.json("usage", "b")["requests"]
    everything = sum(row["prompt_tokens"] for row in rows[1:])
    reference = f"floor: {total['floor']} tokens; a client that loses its cache at each turn: {everything}"
    return [
        at_most("30 turns, one restart: evaluated over floor", total["ratio"], "ratio", 1.0, reference=reference),
        at_most("30 turns, one restart: largest single loss", total["max_loss"], "tokens", 0, reference="0"),
    ]
