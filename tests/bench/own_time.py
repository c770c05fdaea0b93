"""loopd's own processor time for a turn, in sessions of 10, 100 and 1,000 turns: flat but for sending the bytes."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.harness import Row, at_most
from tests.bench.talk import Talk
from tests.integration.appliance import Appliance, running
from tests.servers import start_scripted_server

SIZES = (10, 100, 1000)
TURNS = 20
LIMIT = 2.0


def run() -> list[Row]:
    spent_s: dict[int, float] = {}
    with TemporaryDirectory() as directory:
        root = Path(directory)
        script = {"default": {"text": "Twelve degrees, as it mostly is."}, "context_tokens": 10_000_000}
        with start_scripted_server(root / "m.sock", script) as url:
            device = Appliance(root, url)
            with running(device):
                talk = Talk(device.socket, "b")
                turns = 0
                for size in SIZES:
                    for _ in range(size - turns):
                        list(talk.say("How warm is the cellar?"))
                    before_s = _processor_s(device)
                    for _ in range(TURNS):
                        list(talk.say("And now?"))
                    spent_s[size] = (_processor_s(device) - before_s) / TURNS
                    turns = size + TURNS
                talk.close()
    least_s = spent_s[SIZES[0]]
    return [
        at_most(
            f"own time per turn after {size} turns",
            spent_s[size] / least_s,
            "ratio",
            LIMIT,
            reference=f"after {SIZES[0]} turns: {1000 * least_s:.2f} ms; here: {1000 * spent_s[size]:.2f} ms",
        )
        for size in SIZES[1:]
    ]


def _processor_s(device: Appliance) -> float:
    assert device.daemon is not None
    fields = Path(f"/proc/{device.daemon.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
