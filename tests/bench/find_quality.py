"""find_tool over a catalogue of real tools: does it find what a request needs, and what does an answer cost?

`CATALOGUE` is a directory of JSON files, each `{"tools": [{"name", "description", "inputSchema"}]}`; `REQUESTS` is a
JSON list of `{"request", "right": ["file-without-suffix:tool", ...], "model_query"?}`. Where a request carries
`model_query`, the same need in a model's words is a second series. Without both variables nothing is measured.
"""

import json
import os
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from loopd.config import ToolsTable
from loopd.tools.catalogue import Catalogue
from loopd.tools.find import BYTES_PER_TOKEN, answer
from loopd.tools.port import Tool
from tests.bench.harness import Row, at_most, seconds

SERIES = {"request": "a person's words", "model_query": "a model's words"}
DEPTHS = (1, 3, 5)


def run() -> list[Row]:
    directory, requests = os.environ.get("CATALOGUE"), os.environ.get("REQUESTS")
    if not directory or not requests:
        return []
    catalogue = Catalogue(_listed(path) for path in sorted(Path(directory).glob("*.json")))
    asked = json.loads(Path(requests).read_text(encoding="utf-8"))
    rows = [row for field, label in SERIES.items() for row in _series(catalogue, asked, field, label)]
    catalogue.close()
    return rows


def _listed(path: Path) -> tuple[str, list[Tool]]:
    package = json.loads(path.read_text(encoding="utf-8"))
    tools = [Tool(t["name"], t.get("description") or "", t.get("inputSchema") or {}) for t in package["tools"]]
    return path.stem, tools


def _series(catalogue: Catalogue, requests: list[dict[str, Any]], field: str, label: str) -> list[Row]:
    cases = [(case[field], set(case["right"])) for case in requests if field in case]
    if not cases:
        return []
    table = ToolsTable()
    hits = [[entry.name in right for entry in catalogue.find(query, max(DEPTHS))] for query, right in cases]
    costs_bytes = [len(answer(query, catalogue, table, ()).content.encode("utf-8", "replace")) for query, _ in cases]
    took_ms = [1000 * seconds(partial(catalogue.find, query, table.find_hits)) for query, _ in cases]
    where = f"{len(cases)} requests, {len(catalogue.entries):,} tools"
    return [
        *(
            Row(
                f"find_tool hit@{depth}, {label}",
                100 * sum(any(hit[:depth]) for hit in hits) / len(cases),
                "%",
                reference=where,
            )
            for depth in DEPTHS
        ),
        at_most(
            f"find_tool tokens per answer, {label}",
            statistics.median(costs_bytes) / BYTES_PER_TOKEN,
            "tokens",
            table.find_tokens,
            reference=f"{BYTES_PER_TOKEN:g} bytes a token; largest {max(costs_bytes) / BYTES_PER_TOKEN:,.0f}",
        ),
        Row(
            f"find_tool ranking, {label}", statistics.median(took_ms), "ms", reference=f"slowest {max(took_ms):.1f} ms"
        ),
    ]
