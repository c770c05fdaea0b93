"""The tool `list`: what is in a directory, sorted by name (SPEC 6)."""

import heapq
import os
import stat
from collections.abc import Iterator
from typing import Any

from loopd.tools.files.beneath import Spot, walk
from loopd.tools.files.roots import parts_of
from loopd.tools.files.words import io, kind_of, shown
from loopd.tools.files.work import Work

MAX_ENTRIES = 200


def list_directory(work: Work, arguments: dict[str, Any]) -> str:
    """Return one line for each entry: a directory's name with `/`, a file's with its size, a link's with its target.

    Without a path, and with several roots, the roots. Memory and answer are bounded however many entries there are.

    Raises:
        ToolError: the path.
        Stopped: as told.
    """
    roots, path, first = work.roots, arguments.get("path") or "", int(arguments.get("offset") or 1)
    if not parts_of(path) and not path.startswith("/"):
        if roots.only is None:
            return "\n".join(f"{shown(root.path)}/{' (may be written)' if root.writable else ''}" for root in roots)
        path = roots.only.path
    with walk(*roots.locate(path), work.stop) as spot:
        if spot.info is not None and not spot.is_directory:
            return f"This is no directory: {entry(spot.directory, spot.name, spot.path)}"
        with spot.listed() as directory, io("list", spot.path):
            return _shown(spot, directory, first, work)


def _shown(spot: Spot, directory: int, first: int, work: Work) -> str:
    total = 0

    def names() -> Iterator[str]:
        nonlocal total
        with os.scandir(directory) as entries:
            for entry in entries:
                work.stop.check()
                total += 1
                yield entry.name

    found = heapq.nsmallest(first - 1 + MAX_ENTRIES, names())[first - 1 :]
    lines: list[str] = []
    room = work.page_bytes
    for name in found:
        line = entry(directory, name, name)
        room -= len(line.encode("utf-8", "surrogateescape")) + 1
        if room < 0:
            break
        lines.append(line)
    head = f"{shown(spot.path)}: {total} {'entry' if total == 1 else 'entries'}"
    if len(lines) < total:
        last = first - 1 + len(lines)
        head += f", {first} to {last} shown" if lines else f", none from {first} on"
        if lines and last < total:
            head += f"; go on with offset {last + 1}, or use search"
    return "\n".join([f"{head}{':' if lines else '.'}", *lines])


def entry(directory: int, name: str, path: str) -> str:
    """Return what is in a directory by that name, as `path` and what it is; a link is not followed."""
    try:
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if stat.S_ISLNK(info.st_mode):
            return f"{shown(path)} -> {shown(os.readlink(name, dir_fd=directory))}"
    except OSError as error:
        return f"{shown(path)} ({error.strerror})"
    if stat.S_ISDIR(info.st_mode):
        return f"{shown(path)}/"
    if stat.S_ISREG(info.st_mode):
        return f"{shown(path)} {info.st_size} bytes"
    return f"{shown(path)} ({kind_of(info.st_mode)})"
