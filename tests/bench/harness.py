"""What a benchmark returns, and how the rows are shown."""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, thread_time

from rich.console import Console
from rich.table import Table

BUILD = Path("build")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `goal` is text such as `<= 150`, '' for none; `met` is None where there is none."""

    name: str
    value: float
    unit: str
    goal: str = ""
    met: bool | None = None
    reference: str = ""


Benchmark = Callable[[], list[Row]]


def at_most(name: str, value: float, unit: str, limit: float, *, reference: str) -> Row:
    """A figure that must not be over `limit`."""
    return Row(name, value, unit, f"<= {limit:g}", value <= limit, reference)


def at_least(name: str, value: float, unit: str, limit: float, *, reference: str) -> Row:
    """A figure that must not be under `limit`."""
    return Row(name, value, unit, f">= {limit:g}", value >= limit, reference)


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    began = perf_counter()
    work()
    return perf_counter() - began


def core_seconds(work: Callable[[], object]) -> float:
    """How long one call keeps a core busy in this thread; what else the machine does changes it little."""
    began = thread_time()
    work()
    return thread_time() - began


def alternating(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of both, called in turns, so that a busy moment of the machine meets both."""
    pairs = [(seconds(first), seconds(second)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def show(rows: Iterable[Row], console: Console) -> None:
    table = Table(title="loopd benchmarks")
    for title in ("name", "value", "unit", "goal", "met", "reference"):
        table.add_column(title, justify="right" if title == "value" else "left")
    for row in rows:
        met = {True: "yes", False: "NO", None: ""}[row.met]
        table.add_row(row.name, f"{row.value:,.4g}", row.unit, row.goal, met, row.reference)
    console.print(table)


def write(rows: Iterable[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
