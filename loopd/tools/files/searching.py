"""The tool `search`: files by name, and lines by the text in them (SPEC 6).

Text is looked for as it stands, without regard to case, and not as a regular expression: Python's run with the
interpreter's lock held and cannot be stopped, so that a single one could hold up the whole daemon.
Names and directories come in sorted order, links are not followed, and all that is looked at is bounded.
"""

import fnmatch
import heapq
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loopd.clock import monotonic_s
from loopd.errors import ToolError
from loopd.tools.files.beneath import Spot, open_directory, open_file, walk
from loopd.tools.files.listing import entry
from loopd.tools.files.words import shown
from loopd.tools.files.work import Stop, Work

MAX_HITS = 60
MAX_LINES_PER_FILE = 5
MAX_NAMES = 200_000
MAX_LOOKED_BYTES = 512 * 1024 * 1024
MAX_DEPTH = 64
MAX_S = 20.0

_BLOCK_BYTES = 262_144
_MAX_LINE_BYTES = 4 * 1024 * 1024
_BEFORE_CHARS, _EXCERPT_CHARS = 60, 200


class Enough(Exception):
    """A bound was reached; says which."""


@dataclass(slots=True)
class Bounds:
    """What a search may still look at."""

    stop: Stop
    names: int = field(default_factory=lambda: MAX_NAMES)
    looked_bytes: int = field(default_factory=lambda: MAX_LOOKED_BYTES)
    until_s: float = field(default_factory=lambda: monotonic_s() + MAX_S)

    def take(self, *, names: int = 0, looked_bytes: int = 0) -> None:
        """Use some of it.

        Raises:
            Enough: that was the last of it.
            Stopped: as told.
        """
        self.stop.check()
        self.names -= names
        self.looked_bytes -= looked_bytes
        if self.names < 0:
            raise Enough(f"{MAX_NAMES} names were looked at")
        if self.looked_bytes < 0:
            raise Enough(f"{MAX_LOOKED_BYTES // 2**20} MB were looked at")
        if monotonic_s() > self.until_s:
            raise Enough(f"it took {MAX_S:g} s")


def search(work: Work, arguments: dict[str, Any]) -> str:
    """Return the files of that name, or their lines with that text, below one line that says how many.

    Raises:
        ToolError: the path, or neither a name nor a text.
        Stopped: as told.
    """
    name, text = arguments.get("name") or "", arguments.get("text") or ""
    if not name and not text:
        raise ToolError("Give a name (such as *.txt), a text that the files hold, or both.")
    looking = _Search(name, text, Bounds(work.stop), work.page_bytes)
    path = arguments.get("path")
    places = [work.roots.locate(path)] if path else [(root, []) for root in work.roots]
    for root, parts in places:
        try:
            with walk(root, parts, work.stop) as spot:
                looking.in_place(spot)
        except Enough as bound:
            looking.notes.append(f"stopped early, since {bound}: give a narrower path, name or text")
            break
        except ToolError as error:
            if len(places) == 1:
                raise
            looking.notes.append(error.message)
    return looking.answer()


class _Search:
    """One search with its hits so far."""

    def __init__(self, name: str, text: str, bounds: Bounds, room_bytes: int) -> None:
        self._matches, self._text, self._bounds = _matcher(name), text, bounds
        self._lines: list[str] = []
        self._files = self._unread = 0
        self._room = room_bytes
        self.notes: list[str] = []

    def in_place(self, spot: Spot) -> None:
        """Search a directory and all below it, or one file.

        Raises:
            Enough: a bound was reached.
            ToolError: nothing is there, or it may not be listed.
        """
        if stat.S_ISDIR(spot.there().st_mode):
            with spot.listed() as directory:
                self._directory(directory, spot.path, "", 0)
        elif self._matches(spot.path, spot.name):
            self._hit(spot.directory, spot.name, spot.path, is_file=stat.S_ISREG(spot.there().st_mode))

    def answer(self) -> str:
        """Return the hits, the head first."""
        count, notes = len(self._lines), list(self.notes)
        if self._unread:
            notes.append(f"{self._unread} could not be read")
        looked = f" in {self._files} files" if self._text else ""
        head = f"{count} found{looked}" if count else f"Nothing found{looked}"
        return "\n".join(["; ".join([head, *notes]) + (":" if count else "."), *self._lines])

    def _directory(self, directory: int, path: str, below: str, depth: int) -> None:
        for name, is_directory, is_file in self._entries(directory):
            self._bounds.take(names=1)
            whole = f"{path}/{name}"
            if self._matches(whole, f"{below}{name}"):
                self._hit(directory, name, whole, is_file=is_file)
            if is_directory and depth < MAX_DEPTH:
                self._descend(directory, name, whole, f"{below}{name}/", depth + 1)
            elif is_directory:
                self._unread += 1

    def _descend(self, above: int, name: str, path: str, below: str, depth: int) -> None:
        try:
            directory = open_directory(above, name)
        except OSError:
            self._unread += 1
            return
        try:
            self._directory(directory, path, below, depth)
        finally:
            os.close(directory)

    def _entries(self, directory: int) -> list[tuple[str, bool, bool]]:
        """Return the entries in order, with whether each is a directory or a file; not more than may be looked at."""

        def found() -> Iterator[tuple[str, bool, bool]]:
            for one in entries:
                self._bounds.take()
                yield one.name, one.is_dir(follow_symlinks=False), one.is_file(follow_symlinks=False)

        try:
            with os.scandir(directory) as entries:
                return heapq.nsmallest(self._bounds.names + 1, found())
        except OSError:
            self._unread += 1
            return []

    def _hit(self, directory: int, name: str, path: str, *, is_file: bool) -> None:
        if not self._text:
            self._add(entry(directory, name, path))
        elif is_file:
            try:
                self._look_into(directory, name, path)
            except (OSError, ToolError):
                self._unread += 1

    def _look_into(self, directory: int, name: str, path: str) -> None:
        file = open_file(directory, name)
        self._files += 1
        try:
            for count, (number, line) in enumerate(_matching(file, self._text.casefold(), self._bounds)):
                if count == MAX_LINES_PER_FILE:
                    self._add(f"{shown(path)}: more such lines")
                    break
                self._add(f"{shown(path)}:{number}: {_excerpt(line, self._text)}")
        finally:
            os.close(file)

    def _add(self, line: str) -> None:
        self._room -= len(line.encode("utf-8", "surrogateescape")) + 1
        if len(self._lines) == MAX_HITS or self._room < 0:
            raise Enough("there are more than can be shown")
        self._lines.append(line)


def _matcher(pattern: str) -> Callable[[str, str], bool]:
    """Return what tells whether a file, by its whole path and its path below the start, has the name asked for.

    A pattern without wildcards is part of a name; one with `/` is of the path below the start, or of the whole one if
    it begins with it; `**/` stands for any directories, also for none. Case does not count.
    """
    wanted = pattern.casefold()
    if not set(wanted) & set("*?["):
        wanted = wanted if wanted.startswith("/") else f"*{wanted}*"
    forms = [re.compile(fnmatch.translate(form)) for form in dict.fromkeys((wanted, wanted.replace("**/", "")))]

    def matches(whole: str, below: str) -> bool:
        subject = whole if wanted.startswith("/") else below if "/" in wanted else below.rpartition("/")[2]
        return any(form.match(subject.casefold()) for form in forms)

    return matches


def _matching(file: int, text: str, bounds: Bounds) -> Iterator[tuple[int, str]]:
    """Yield number and text of each line that holds `text`, which is case-folded; a binary file ends at its first NUL.

    Raises:
        Enough: a bound was reached.
        OSError: it cannot be read.
    """
    number, rest = 1, b""
    while data := os.read(file, _BLOCK_BYTES):
        bounds.take(looked_bytes=len(data))
        if b"\0" in data:
            return
        piece, newline, rest = (rest + data).rpartition(b"\n")
        if not newline and len(rest) > _MAX_LINE_BYTES:
            piece, rest = rest, b""
        yield from _lines(piece, number, text)
        number += piece.count(b"\n") + len(newline)
    yield from _lines(rest, number, text)


def _lines(data: bytes, number: int, text: str) -> Iterator[tuple[int, str]]:
    whole = data.decode("utf-8", "surrogateescape")
    if text in whole.casefold():
        yield from ((number + n, line) for n, line in enumerate(whole.split("\n")) if text in line.casefold())


def _excerpt(line: str, text: str) -> str:
    """Return the part of a line around the first place of the text."""
    start = max(0, line.casefold().find(text.casefold()) - _BEFORE_CHARS)
    part = line[start : start + _EXCERPT_CHARS].strip()
    return f"{'...' if start else ''}{part}{'...' if start + _EXCERPT_CHARS < len(line) else ''}"
