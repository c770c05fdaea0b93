"""Run the benchmarks, print one table, write build/bench.json."""

import sys

from rich.console import Console

from tests.bench import (
    append,
    cache,
    find_latency,
    find_quality,
    first_delta,
    first_request,
    open_log,
    own_time,
    situations,
    start,
)
from tests.bench.harness import BUILD, Benchmark, show, write

BENCHMARKS: tuple[Benchmark, ...] = (
    cache.run,
    situations.run,
    first_delta.run,
    append.run,
    open_log.run,
    start.run,
    own_time.run,
    first_request.run,
    find_latency.run,
    find_quality.run,
)


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
