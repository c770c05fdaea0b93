"""All tools of all ports at one moment: looked up by name, ranked for a need (SPEC 6).

A tool's full name is `port.name`, because names repeat between ports. Names are those of the moment; the ranking may
be of a moment ago, while its index is made anew.
"""

import copy
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from loopd.errors import ToolError
from loopd.tools.port import Tool
from loopd.tools.ranking import Index

_MAX_NAME_CHARS = 200
_GONE = 20
"""So many of the ranked may be gone before a hit is missed."""

_AFTER_PORT = (".", ":", "/", "__")
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True)
class Entry:
    """A tool and the name of its port."""

    port: str
    tool: Tool

    @property
    def name(self) -> str:
        """The full name, `port.name`."""
        return f"{self.port}.{self.tool.name}"


class Absent(ToolError):
    """Nobody knows whether there is such a tool: it would be of a port whose tools are not known now."""


class Ranker(Protocol):
    """What ranks full names of tools; it may know tools that are gone and miss new ones."""

    def rank(self, query: str, limit: int) -> list[str]:
        """Return up to `limit` full names for a need in words, the best first."""
        ...


class Catalogue:
    """An immutable snapshot. Of two tools with one name in one port the first counts.

    Args:
        listed: each port's name and tools, in the order that decides between equals.
        ranker: ranks them; by default an index of just these tools, which is made at once.
    """

    def __init__(self, listed: Iterable[tuple[str, Sequence[Tool]]], ranker: Ranker | None = None) -> None:
        entries: dict[str, Entry] = {}
        for port, tools in listed:
            for tool in tools:
                entry = Entry(port, tool)
                entries.setdefault(entry.name, entry)
        self.entries: tuple[Entry, ...] = tuple(entries.values())
        self._by_name = entries
        self._by_key: dict[str, list[Entry]] = {}
        for entry in self.entries:
            short = fold(entry.tool.name)
            for key in dict.fromkeys((fold(entry.port) + short, short)):
                self._by_key.setdefault(key, []).append(entry)
        self._ranker = ranker or Index([(entry.port, entry.tool) for entry in self.entries])
        self._absent: Mapping[str, str] = {}

    def beside(self, absent: Mapping[str, str]) -> Self:
        """Return the same, knowing of ports whose tools are not known now, and why."""
        other = copy.copy(self)
        other._absent = absent
        return other

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
        """Return up to `count` full names that `name` may have meant, the likeliest first.

        Raises:
            Absent: it names a port whose tools are not known now.
        """
        name = name[:_MAX_NAME_CHARS]
        self._refuse_absent(name)
        port, _, short = name.rpartition(".")
        meant = [entry for entry in self.entries if entry.port == port] or self.entries
        keys: dict[str, list[Entry]] = {}
        for entry in meant:
            keys.setdefault(fold(entry.tool.name), []).append(entry)
        close = difflib.get_close_matches(fold(short), keys, n=count)
        alike = [entry for key in close for entry in keys[key]]
        return list(dict.fromkeys(entry.name for entry in [*alike, *self._ranked(name, count)]))[:count]

    def find(self, query: str, limit: int) -> list[Entry]:
        """Return up to `limit` tools for a need in words, the best first; a tool's own name puts it first."""
        named = self.get(query.strip())
        ranked = self._ranked(query, limit)
        return [named, *(entry for entry in ranked if entry is not named)][:limit] if named else ranked

    def _refuse_absent(self, name: str) -> None:
        """Raise for a name that begins with such a port; `house-2.lamp` does not begin with `house`."""
        for port in sorted(self._absent, key=len, reverse=True):
            begun, rest = name[: len(port)].casefold(), name[len(port) :]
            if begun == port.casefold() and (not rest or rest.startswith(_AFTER_PORT)):
                raise Absent(f"{name} is unavailable: {self._absent[port]}. Try again later.")

    def _ranked(self, query: str, limit: int) -> list[Entry]:
        names = self._ranker.rank(query, limit + _GONE)
        return [self._by_name[name] for name in names if name in self._by_name][:limit]


def fold(name: str) -> str:
    """Return a name without case and punctuation, for comparing what a model wrote with what there is."""
    return "".join(_WORD.findall(name)).casefold()
