"""How a place below a root is reached: component by component, never through a link (see the package's docstring).

`walk` holds two descriptors at most, the root's and the current directory's. It remembers the names it came by, which
are all of real directories; a link starts over from the root with those names and the link's own target, so that `..`
in a target never asks the kernel, for which it could lead out of a root that was moved.
"""

import difflib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Self

from loopd.errors import ToolError
from loopd.tools.files.roots import Root, parts_of
from loopd.tools.files.words import io, kind_of, shown
from loopd.tools.files.work import Stop

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK a FIFO that was put there since it was looked at would hang.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_MAX_LINKS = 40
_MAX_STEPS = 4096
_MAX_NEAR = 500


@dataclass(slots=True)
class Spot:
    """A place below a root, its links resolved. Closes its descriptor as a context manager.

    Attributes:
        path: the whole path, for showing.
        directory: descriptor (`O_PATH`) of the directory that holds it.
        name: its one component; "." is the root itself.
        info: what was found there by that name, never a link; None for nothing.
    """

    path: str
    directory: int
    name: str
    info: os.stat_result | None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.close(self.directory)

    def there(self) -> os.stat_result:
        """Return what is there.

        Raises:
            ToolError: nothing is; names that are like it are given.
        """
        if self.info is None:
            raise missing(self.directory, self.name, self.path.rpartition("/")[0])
        return self.info

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.info is not None and stat.S_ISDIR(self.info.st_mode)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Open the regular file for reading.

        Raises:
            ToolError: it is something else, is not there, or may not be read.
        """
        mode = self.there().st_mode
        if not stat.S_ISREG(mode):
            advice = "; list shows what is in it" if stat.S_ISDIR(mode) else ""
            raise ToolError(f"{shown(self.path)} is a {kind_of(mode)}, not a file{advice}.")
        with io("read", self.path):
            file = open_file(self.directory, self.name)
        try:
            yield file
        finally:
            os.close(file)

    @contextmanager
    def listed(self) -> Iterator[int]:
        """Open the directory for listing.

        Raises:
            ToolError: it is something else, is not there, or may not be read.
        """
        mode = self.there().st_mode
        if not stat.S_ISDIR(mode):
            raise ToolError(f"{shown(self.path)} is a {kind_of(mode)}, not a directory.")
        with io("list", self.path):
            directory = open_directory(self.directory, self.name)
        try:
            yield directory
        finally:
            os.close(directory)


def open_file(directory: int, name: str) -> int:
    """Open a regular file for reading, and nothing else, in a directory.

    Raises:
        OSError: it cannot be opened, or is a link.
        ToolError: it is no regular file.
    """
    file = os.open(name, _FILE, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ToolError(f"{shown(name)} was changed at the same moment and is no file any more.")
    return file


def open_directory(directory: int, name: str) -> int:
    """Open a directory in a directory for listing.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    return os.open(name, _DIRECTORY, dir_fd=directory)


def walk(root: Root, parts: Sequence[str], stop: Stop, *, make: bool = False) -> Spot:
    """Return the place that `parts` lead to below `root`; the caller closes it.

    Args:
        root: where it starts.
        parts: components without `..`.
        stop: ends it early.
        make: directories that are missing on the way are made, with the rights of those that hold them.

    Raises:
        ToolError: it leads outside or nowhere, through what is no directory, or through too many links.
        Stopped: as told.
    """
    top = root.open()
    try:
        return _Walk(root, top, parts, make=make).run(stop)
    finally:
        os.close(top)


class _Walk:
    """One walk.

    `_done` are the names of the directories behind it, none of them a link; `_todo` the components ahead, the next
    one last.
    """

    def __init__(self, root: Root, top: int, parts: Sequence[str], *, make: bool) -> None:
        self._root, self._top, self._make = root, top, make
        self._done: list[str] = []
        self._todo = list(reversed(parts))
        self._links = 0
        self._here = os.dup(top)

    def run(self, stop: Stop) -> Spot:
        try:
            for _ in range(_MAX_STEPS):
                stop.check()
                if spot := self._step():
                    return spot
            raise ToolError(f"{self._shown()} leads through too many links or directories.")
        except BaseException:
            os.close(self._here)
            raise

    def _step(self) -> Spot | None:
        """Take the next component; return the place if it was the last."""
        if not self._todo:
            if not self._done:
                return self._spot(".", os.fstat(self._here))
            self._restart(self._done)  # a link to its own directory: that is a name in the one above
        name = self._todo.pop()
        if name == "..":
            if not self._done:
                raise self._outside()
            self._restart(self._done[:-1])
            return None
        with io("open", self._path(name)):
            try:
                child = os.open(name, _LOOK, dir_fd=self._here)
            except FileNotFoundError:
                return self._missing(name)
        try:
            return self._look(name, child, os.fstat(child))
        finally:
            os.close(child)

    def _look(self, name: str, child: int, info: os.stat_result) -> Spot | None:
        if stat.S_ISLNK(info.st_mode):
            self._follow(os.readlink("", dir_fd=child))
            return None
        if not self._todo:
            return self._spot(name, info)
        if not stat.S_ISDIR(info.st_mode):
            raise ToolError(f"{shown(self._path(name))} is a {kind_of(info.st_mode)}, not a directory.")
        self._go(os.dup(child))
        self._done.append(name)
        return None

    def _follow(self, target: str) -> None:
        """Go on where a link leads to."""
        self._links += 1
        if self._links > _MAX_LINKS:
            raise ToolError(f"{self._shown()} leads through too many links.")
        if not target.startswith("/"):
            parts = parts_of(target)
        elif (below := self._root.below(target)) is not None:
            parts = below
            self._restart([])
        else:
            raise self._outside()
        self._todo += reversed(parts)

    def _restart(self, names: Sequence[str]) -> None:
        """Begin at the root again; `names` are to be walked first."""
        self._todo += reversed(names)
        self._done = []
        self._go(os.dup(self._top))

    def _missing(self, name: str) -> Spot | None:
        """Return the place that a file could be made in, or make the directory that is missing on the way."""
        if not self._todo:
            return self._spot(name, None)
        if not self._make:
            raise missing(self._here, name, self._path())
        with io("make the directory", self._path(name)), suppress(FileExistsError):
            make_directory(self._here, name)
        self._todo.append(name)
        return None

    def _go(self, directory: int) -> None:
        os.close(self._here)
        self._here = directory

    def _spot(self, name: str, info: os.stat_result | None) -> Spot:
        return Spot(self._path(name), self._here, name, info)

    def _path(self, name: str = ".") -> str:
        return "/".join(["" if self._root.path == "/" else self._root.path, *self._done, *parts_of(name)])

    def _shown(self) -> str:
        return shown("/".join([self._path(), *reversed(self._todo)]))

    def _outside(self) -> ToolError:
        return ToolError(f"A link in {shown(self._path())} leads outside the root {shown(self._root.path)}: refused.")


class Missing(ToolError):
    """Nothing of that name is there."""


def missing(directory: int, name: str, path: str) -> Missing:
    """Return the error for a name that is not there, with those that are like it."""
    try:
        with _entries(directory) as names:
            there = {entry.casefold(): entry for entry in islice(names, _MAX_NEAR)}
    except OSError:
        there = {}
    alike = [shown(there[key]) for key in difflib.get_close_matches(name.casefold(), there, n=3)]
    near = f" Like it are {', '.join(alike)}." if alike else ""
    return Missing(f"There is no {shown(name)} in {shown(path)}.{near}")


@contextmanager
def _entries(directory: int) -> Iterator[Iterator[str]]:
    """Give the names in a directory of which there is an `O_PATH` descriptor."""
    readable = open_directory(directory, ".")
    try:
        with os.scandir(readable) as entries:
            yield (entry.name for entry in entries)
    finally:
        os.close(readable)


def take_rights(new: int, directory: int, most: int) -> None:
    """Give what is new in a directory the directory's group, where the system allows it, and of its rights `most`.

    The bit that hands on a group is not taken: a sandbox may forbid it, and this does without.

    Raises:
        OSError: the rights cannot be given.
    """
    above = os.fstat(directory)
    with suppress(PermissionError):
        os.fchown(new, -1, above.st_gid)
    os.fchmod(new, stat.S_IMODE(above.st_mode) & most)


def make_directory(directory: int, name: str) -> None:
    """Make a directory, durable on return, that may be used by whoever may use the one that holds it.

    Raises:
        OSError: it cannot be made, or is there already.
    """
    above = open_directory(directory, ".")
    try:
        os.mkdir(name, 0o700, dir_fd=above)
        made = open_directory(above, name)
        try:
            take_rights(made, above, 0o775)
        finally:
            os.close(made)
        os.fsync(above)
    finally:
        os.close(above)
