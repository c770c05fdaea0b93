"""Opening a session: time and memory against reading its log and json.loads of every line.

Each size is measured in a process of its own, so that memory is what this one session takes.
"""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from loopd.home import Home
from loopd.session.store import Session
from tests.bench.conversation import LIMITS, RECORDS_A_TURN, recorded
from tests.bench.harness import BUILD, Row, alternating, at_most

SIZES = ((10_000, 7), (100_000, 3))
SESSION = "bench"


def run() -> list[Row]:
    return [row for records, rounds in SIZES for row in _rows(records, rounds)]


def _rows(records: int, rounds: int) -> list[Row]:
    BUILD.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as directory:
        log = recorded(Home(Path(directory)), SESSION, records // RECORDS_A_TURN)
        size_bytes = log.stat().st_size
        child = subprocess.run(
            [sys.executable, "-m", __name__, directory, str(log), str(rounds)], check=True, capture_output=True
        )
    seen = json.loads(child.stdout)
    return [
        at_most(
            f"open {records:,} records, time",
            seen["open_s"] / seen["bare_s"],
            "ratio",
            2.5,
            reference=f"read + json.loads: {seen['bare_s']:.3f} s, open: {seen['open_s']:.3f} s",
        ),
        at_most(
            f"open {records:,} records, memory",
            seen["grown_bytes"] / size_bytes,
            "ratio",
            3,
            reference=f"the file: {size_bytes / 1e6:.1f} MB, resident growth: {seen['grown_bytes'] / 1e6:.1f} MB",
        ),
    ]


def _measured(home: Home, log: Path, rounds: int) -> dict[str, float]:
    """Memory first: the process has not yet had anything to keep."""
    before_bytes = _resident_bytes()
    session = Session.open(home, SESSION, limits=LIMITS)
    grown_bytes = _resident_bytes() - before_bytes
    session.close()
    del session
    open_s, bare_s = alternating(
        lambda: Session.open(home, SESSION, limits=LIMITS).close(), lambda: _parsed(log), rounds
    )
    return {"open_s": open_s, "bare_s": bare_s, "grown_bytes": grown_bytes}


def _parsed(log: Path) -> None:
    with log.open("rb") as file:
        for line in file:
            json.loads(line)


def _resident_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


if __name__ == "__main__":
    print(json.dumps(_measured(Home(Path(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]))))
