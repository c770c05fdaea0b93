"""Run the benchmarks, print one table, write build/bench.json."""

import sys

from rich.console import Console

from tests.bench import append, find_latency, find_quality, open_log, start
from tests.bench.harness import BUILD, Benchmark, show, write

BENCHMARKS: tuple[Benchmark, ...] = (append.run, open_log.run, find_latency.run, find_quality.run, start.run)


def main(wanted: list[str]) -> None:
    progress = Console(stderr=True)
    rows = []
    for benchmark in BENCHMARKS:
        name = benchmark.__module__.rpartition(".")[2]
        if not wanted or any(word in name for word in wanted):
            with progress.status(name):
                rows += benchmark()
    show(rows, Console())
    write(rows, BUILD / "bench.json")


if __name__ == "__main__":
    main(sys.argv[1:])
