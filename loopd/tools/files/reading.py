"""The tool `read`: a page of a text file, by lines (SPEC 6).

Lines are shown as they are, without numbers before them: a model that writes a file back would write the numbers too,
and they take a third more tokens. The head says which lines they are and which come next.
"""

import codecs
import mimetypes
import os
from typing import Any

from loopd.errors import ToolError
from loopd.tools.files.beneath import walk
from loopd.tools.files.words import io, shown
from loopd.tools.files.work import Work

DEFAULT_LINES = 200
_BLOCK_BYTES = 65_536
_MAX_COUNTED_BYTES = 64 * 1024 * 1024
_MAX_SKIPPED_BYTES = 1024 * 1024 * 1024
_SIGNATURES = {
    codecs.BOM_UTF16_LE: "UTF-16 text",
    codecs.BOM_UTF16_BE: "UTF-16 text",
    b"\x89PNG\r\n\x1a\n": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"%PDF-": "a PDF document",
    b"PK\x03\x04": "a ZIP archive (or an office document)",
    b"\x1f\x8b": "gzip data",
    b"\xfd7zXZ\x00": "xz data",
    b"(\xb5/\xfd": "zstd data",
    b"\x7fELF": "a program",
    b"SQLite format 3\x00": "an SQLite database",
    b"OggS": "Ogg sound",
    b"ID3": "MP3 sound",
}


def read(work: Work, arguments: dict[str, Any]) -> str:
    """Return the lines asked for, below one line that says which they are.

    Raises:
        ToolError: the path, or an offset behind the end.
        Stopped: as told.
    """
    offset, limit = int(arguments.get("offset") or 1), int(arguments.get("limit") or DEFAULT_LINES)
    path = work.roots.locate(arguments["path"])
    with walk(*path, work.stop) as spot, spot.opened() as file, io("read", spot.path):
        head = os.pread(file, _BLOCK_BYTES, 0)
        if not head:
            return f"{shown(spot.path)} is empty."
        if kind := binary(head, spot.name):
            return f"{shown(spot.path)} is not text but {kind}, {os.fstat(file).st_size} bytes."
        lines = _Lines(file, max(os.fstat(file).st_size, len(head)), work)
        return f"{shown(spot.path)}, {lines.last(-offset) if offset < 0 else lines.page(offset, limit)}"


def binary(head: bytes, name: str) -> str:
    """Return what a file is, from its first bytes and its name; "" for text in UTF-8 or an encoding of one byte."""
    for signature, kind in _SIGNATURES.items():
        if head.startswith(signature):
            return kind
    if b"\0" not in head:
        return ""
    return mimetypes.MimeTypes().guess_type(name)[0] or "binary data"


class _Lines:
    """The lines of an open text file, of which only what is shown is ever held in memory."""

    def __init__(self, file: int, size: int, work: Work) -> None:
        self._file, self._size, self._page, self._stop = file, size, work.page_bytes, work.stop

    def page(self, first: int, limit: int) -> str:
        """Return up to `limit` lines from line `first` on, as many as go on a page, and which they are."""
        start = self._start_of(first)
        data = os.pread(self._file, self._page, start)
        lines = data.split(b"\n", limit)
        if len(lines) > limit:
            data = data[: len(data) - len(lines[-1])]
        elif start + len(data) < self._size:
            data = data[: data.rfind(b"\n") + 1] or data
        end = start + len(data)
        last = first + data.removesuffix(b"\n").count(b"\n")
        total, text = self._total(first, start), _text(data)
        head = self._head(first, last, total)
        if end < self._size and last != total:
            head += f"; go on with offset {last + 1}"
        if end < self._size and not data.endswith(b"\n"):
            text += f"\n[line {last} is longer than a page: the rest of it is left out]"
        return f"{head}:\n{text}"

    def last(self, count: int) -> str:
        """Return the last `count` lines, or as many of them as go on a page."""
        start = max(0, self._size - self._page)
        data = os.pread(self._file, self._page + 1, max(0, start - 1))
        if start and 0 < (cut := data.find(b"\n") + 1) < len(data):
            data = data[cut:]
        lines = data.removesuffix(b"\n").split(b"\n")[-count:]
        total = self._total(1, 0)
        head = self._head(total - len(lines) + 1, total, total) if total else f"its last {len(lines)} lines"
        text = _text(b"\n".join(lines))
        return f"{head}:\n{text}"

    def _head(self, first: int, last: int, total: int | None) -> str:
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        return f"{lines} of {f'{total}' if total else f'a file of {self._size} bytes'}"

    def _start_of(self, line: int) -> int:
        """Return the byte at which a line begins.

        Raises:
            ToolError: there are not so many lines, or it would take long to find it.
        """
        position, wanted = 0, line - 1
        while wanted and position < _MAX_SKIPPED_BYTES and (block := self._block(position)):
            found = block.count(b"\n")
            if found < wanted:
                wanted, position = wanted - found, position + len(block)
                continue
            at = -1
            for _ in range(wanted):
                at = block.find(b"\n", at + 1)
            wanted, position = 0, position + at + 1
        if wanted and position >= _MAX_SKIPPED_BYTES:
            raise ToolError(f"Line {line} is too far into the file; offset -{DEFAULT_LINES} reads its last lines.")
        if wanted or position >= self._size:
            raise ToolError(f"There is no line {line}: the file has {self._total(1, 0)} lines.")
        return position

    def _total(self, first: int, start: int) -> int | None:
        """Return how many lines there are, of which `first` begins at byte `start`; None where it would take long."""
        if self._size - start > _MAX_COUNTED_BYTES:
            return None
        lines, ends = first - 1, True
        while start < self._size and (block := self._block(start)):
            lines += block.count(b"\n")
            start, ends = start + len(block), block.endswith(b"\n")
        return lines if ends else lines + 1

    def _block(self, position: int) -> bytes:
        self._stop.check()
        return os.pread(self._file, _BLOCK_BYTES, position)


def _text(data: bytes) -> str:
    """Return text in which every byte that is not UTF-8 is a lone surrogate; a character cut at the end is dropped.

    Raises:
        ToolError: it is no text.
    """
    if b"\0" in data:
        raise ToolError("That part of the file is not text: it has NUL bytes.")
    return codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(data).removeprefix("\ufeff")
