"""How long a command takes to begin: `bxctl --help` in a fresh interpreter, against one that does nothing."""

import subprocess
import sys

from tests.bench.harness import Row, alternating, at_most

ROUNDS = 11
LIMIT_MS = 150.0


def run() -> list[Row]:
    help_s, bare_s = alternating(
        lambda: _python("import sys; from loopd.cli.bxctl import main; sys.exit(main())", "--help"),
        lambda: _python("pass"),
        ROUNDS,
    )
    return [at_most("bxctl --help", 1000 * help_s, "ms", LIMIT_MS, reference=f"python -c pass: {1000 * bare_s:.0f} ms")]


def _python(code: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
