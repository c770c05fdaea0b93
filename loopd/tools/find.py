"""The answer of find_tool: few hits, an example each, the arguments of the first ones, within a budget (SPEC 6)."""

import re
from collections.abc import Collection, Sequence

from loopd.config import ToolsTable
from loopd.tools.catalogue import Catalogue, Entry
from loopd.tools.meta import CALL
from loopd.tools.port import Outcome
from loopd.tools.schema import compact, example, shortened

BYTES_PER_TOKEN = 2.5
"""Cautious: answers about the tools of 69 real servers had 2.9 bytes a token at the least (SmolLM2's tokenizer)."""

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_MAX_DESCRIPTION_CHARS = 160
_MAX_EXAMPLE_CHARS = 300
_MAX_ABSENT = 10


def answer(
    query: str, catalogue: Catalogue, table: ToolsTable, down: Collection[str], absent: Sequence[str] = ()
) -> Outcome:
    """Return the hits for `query` as the model reads them.

    Args:
        query: verb, object and service, or a tool's name (whose arguments are then described first).
        catalogue: what there is.
        table: how many hits, how many with their arguments, and the token budget.
        down: names of the ports that are down; their tools are shown as unavailable.
        absent: names of the ports that are down and whose tools are not known; the last line names them.
    """
    end = _missing(absent)
    hits = catalogue.find(query, table.find_hits)
    if hits:
        head = f"Best of {len(catalogue.entries)} tools, run one with {CALL}:"
    elif catalogue.entries:
        hits = list(catalogue.entries[: table.find_hits])
        head = (
            f"No tool matches {query[:80]!r}. Ask again with verb, object and service. "
            f"Some of {len(catalogue.entries)} tools:"
        )
    else:
        return Outcome(ok=False, content="\n".join(["There are no tools.", *end]))
    used_bytes = _bytes("\n".join([head, *end]))
    return Outcome(ok=True, content="\n".join([head, *_lines(hits, table, down, used_bytes), *end]))


def _missing(absent: Sequence[str]) -> list[str]:
    """Return the line about ports whose tools are not known, if there are any."""
    more = f" and {len(absent) - _MAX_ABSENT} more" if len(absent) > _MAX_ABSENT else ""
    return [f"Down now, their tools not known: {', '.join(absent[:_MAX_ABSENT])}{more}."] if absent else []


def _lines(hits: Sequence[Entry], table: ToolsTable, down: Collection[str], used_bytes: int) -> list[str]:
    """Return a block of lines for each hit: all the brief parts first, then arguments while there is room."""
    room = int(table.find_tokens * BYTES_PER_TOKEN) - used_bytes
    blocks: list[str] = []
    for entry in hits:
        block = _brief(entry, unavailable=entry.port in down)
        room -= _bytes(block) + 1
        if room < 0 and blocks:
            break
        blocks.append(block)
    for place, entry in enumerate(hits[: min(table.find_schemas, len(blocks))]):
        label = "\n  arguments: "
        if schema := shortened(entry.tool.schema, room - len(label)):
            blocks[place] += label + schema
            room -= _bytes(label + schema)
    return blocks


def _brief(entry: Entry, *, unavailable: bool) -> str:
    """Return the name, what the tool does in a sentence, and an example as call_tool takes it."""
    text = " ".join(entry.tool.description.split())
    text = _SENTENCE.split(text, maxsplit=1)[0]
    if len(text) > _MAX_DESCRIPTION_CHARS:
        text = text[:_MAX_DESCRIPTION_CHARS].rsplit(" ", 1)[0] + "..."
    call = compact({"name": entry.name, "arguments": example(entry.tool)})
    if len(call) > _MAX_EXAMPLE_CHARS:
        call = compact({"name": entry.name})
    return f"- {entry.name}{' (unavailable now)' if unavailable else ''}: {text}\n  example: {call}"


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
