"""All tools of all ports at one moment: ranked by words, looked up by name (SPEC 6).

A tool's full name is `port.name`, because names repeat between ports. Ranking is BM25 of SQLite's FTS5 over port,
name, description and parameter names. In memory; 1,000 tools are indexed in some 50 ms and ranked in about one.
"""

import difflib
import re
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loopd.tools.port import Tool

_MAX_QUERY_WORDS = 32
_WORD = re.compile(r"[^\W_]+")
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_TABLE = (
    "CREATE VIRTUAL TABLE tool USING fts5("
    "port, name, description, parameters, content='', tokenize='porter unicode61 remove_diacritics 2')"
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tool and the name of its port."""

    port: str
    tool: Tool

    @property
    def name(self) -> str:
        """The full name, `port.name`."""
        return f"{self.port}.{self.tool.name}"


class Catalogue:
    """An immutable snapshot. Of two tools with one name in one port the first counts.

    Args:
        listed: each port's name and tools, in the order that decides between equals.
    """

    def __init__(self, listed: Iterable[tuple[str, Sequence[Tool]]]) -> None:
        entries: dict[str, Entry] = {}
        for port, tools in listed:
            for tool in tools:
                entry = Entry(port, tool)
                entries.setdefault(entry.name, entry)
        self.entries: tuple[Entry, ...] = tuple(entries.values())
        self._by_name = entries
        self._by_key: dict[str, list[Entry]] = {}
        for entry in self.entries:
            for key in {fold(entry.name), fold(entry.tool.name)}:
                self._by_key.setdefault(key, []).append(entry)
        self._index = sqlite3.connect(":memory:")
        self._index.execute(_TABLE)
        self._index.executemany(
            "INSERT INTO tool(rowid, port, name, description, parameters) VALUES (?, ?, ?, ?, ?)",
            ((row, *_columns(entry)) for row, entry in enumerate(self.entries)),
        )

    def close(self) -> None:
        """Free the index."""
        self._index.close()

    def get(self, name: str) -> Entry | None:
        """Return the tool of that full or short name; case and punctuation count only where they must.

        None where there is none, or where several ports have it and the name does not say which.
        """
        if exact := self._by_name.get(name):
            return exact
        found = self._by_key.get(fold(name), [])
        same = [entry for entry in found if entry.tool.name == name] or found
        return same[0] if len(same) == 1 else None

    def nearest(self, name: str, count: int) -> list[str]:
        """Return up to `count` full names that `name` may have meant, the likeliest first."""
        keys = difflib.get_close_matches(fold(name), self._by_key, n=count)
        alike = [entry for key in keys for entry in self._by_key[key]]
        return list(dict.fromkeys(entry.name for entry in [*alike, *self._ranked(name, count)]))[:count]

    def find(self, query: str, limit: int) -> list[Entry]:
        """Return up to `limit` tools for a need in words, the best first; a tool's own name puts it first."""
        named = self.get(query.strip())
        ranked = self._ranked(query, limit)
        return [named, *(entry for entry in ranked if entry is not named)][:limit] if named else ranked

    def _ranked(self, query: str, limit: int) -> list[Entry]:
        asked = list(dict.fromkeys(words(query)))[:_MAX_QUERY_WORDS]
        if not asked:
            return []
        rows = self._index.execute(
            "SELECT rowid FROM tool WHERE tool MATCH ? ORDER BY bm25(tool), rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in asked), limit),
        )
        return [self.entries[row] for (row,) in rows]


def words(text: str) -> list[str]:
    """Return the words of a text or identifier: `getHTTPUrl_2` gives both its parts and the parts of its humps."""
    found: list[str] = []
    for word in _WORD.findall(text):
        parts = _HUMP.split(word)
        found += [word, *parts] if len(parts) > 1 else [word]
    return found


def fold(name: str) -> str:
    """Return a name without case and punctuation, for comparing what a model wrote with what there is."""
    return "".join(_WORD.findall(name)).casefold()


def _columns(entry: Entry) -> tuple[str, str, str, str]:
    """Return the indexed texts: words only, so that no lone surrogate or NUL of a foreign list reaches SQLite."""
    properties = entry.tool.schema.get("properties")
    parameters = properties if isinstance(properties, dict) else {}
    texts = (entry.port, entry.tool.name, entry.tool.description, " ".join(map(str, parameters)))
    port, name, description, names = (" ".join(words(text)) for text in texts)
    return port, name, description, names
