"""find_tool over 1,000 generated tools: how long one answer takes, against counting common words in Python."""

import itertools
import statistics
from functools import partial

from loopd.config import ToolsTable
from loopd.tools.catalogue import Catalogue, Entry
from loopd.tools.find import answer
from loopd.tools.port import Tool
from loopd.tools.ranking import words
from tests.bench.harness import Row, at_most, seconds

VERBS = ("list", "get", "create", "update", "delete", "search", "send", "move", "share", "export")
OBJECTS = ("events", "messages", "files", "tasks", "contacts", "invoices", "photos", "devices", "reports", "notes")
SERVICES = ("calendar", "mail", "drive", "tracker", "crm", "billing", "gallery", "home", "monitor", "wiki")
LIMIT_MS = 10.0


def run() -> list[Row]:
    catalogue = Catalogue((service, tuple(_tools(service))) for service in SERVICES)
    table = ToolsTable()
    queries = [f"{verb} {thing} in {service}" for verb, thing, service in _all()]
    answers_ms = [1000 * seconds(partial(answer, query, catalogue, table, ())) for query in queries[::5]]
    bags = [(entry, set(words(f"{entry.name} {entry.tool.description}"))) for entry in catalogue.entries]
    counts_ms = [1000 * seconds(partial(_counted, query, bags)) for query in queries[::5]]
    return [
        at_most(
            f"find_tool on {len(bags):,} tools, {name}",
            value,
            "ms",
            LIMIT_MS,
            reference=f"counting common words: {other:.2f} ms",
        )
        for name, value, other in (
            ("median", statistics.median(answers_ms), statistics.median(counts_ms)),
            ("slowest", max(answers_ms), max(counts_ms)),
        )
    ]


def _all() -> list[tuple[str, str, str]]:
    return list(itertools.product(VERBS, OBJECTS, SERVICES))


def _tools(service: str) -> list[Tool]:
    parameters = {"id": {"type": "string"}, "limit": {"type": "integer", "description": "how many at most"}}
    schema = {"type": "object", "properties": parameters, "required": ["id"]}
    return [
        Tool(f"{verb}_{thing}", f"{verb.capitalize()} {thing} of the {service}. Needs an id.", schema)
        for verb, thing in itertools.product(VERBS, OBJECTS)
    ]


def _counted(query: str, bags: list[tuple[Entry, set[str]]]) -> list[tuple[Entry, set[str]]]:
    asked = set(words(query))
    return sorted(bags, key=lambda bag: -len(asked & bag[1]))[:6]
