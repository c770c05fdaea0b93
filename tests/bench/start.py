"""How long a command takes to begin: `bxctl --help`, and `loopd serve` until ready, beside a bare interpreter."""

import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.harness import Row, alternating, at_most, seconds
from tests.integration.appliance import Appliance

ROUNDS = 11
LIMIT_MS = 150.0
LIMIT_READY_MS = 500.0


def run() -> list[Row]:
    help_s, bare_s = alternating(
        lambda: _python("import sys; from loopd.cli.bxctl import main; sys.exit(main())", "--help"),
        lambda: _python("pass"),
        ROUNDS,
    )
    reference = f"python -c pass: {1000 * bare_s:.0f} ms"
    return [
        at_most("bxctl --help", 1000 * help_s, "ms", LIMIT_MS, reference=reference),
        at_most("loopd serve until ready", 1000 * _ready_s(), "ms", LIMIT_READY_MS, reference=reference),
    ]


def _ready_s() -> float:
    with TemporaryDirectory() as directory:
        device = Appliance(Path(directory), f"unix:{directory}/nobody.sock")
        taken_s = []
        for _ in range(ROUNDS):
            taken_s.append(seconds(device.start))
            device.stop()
        return statistics.median(taken_s)


def _python(code: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
