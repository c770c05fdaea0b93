"""The roots of the file tools: which there are, which of them a path means, and which can never be one (SPEC 6).

The port runs in the daemon, as the user to whom the session logs belong: a root must hold nothing of loopd itself.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from loopd.config import Config
from loopd.errors import ConfigError, ToolError
from loopd.home import DEVICE_CHANNEL, DEVICE_CONFIG, DEVICE_HOME, DEVICE_MODEL, Home
from loopd.tools.files.words import shown

MAX_PATH_CHARS = 4096

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_NAMED = 8
_NO_FILES = (Path("/proc"), Path("/sys"), Path("/dev"))


@dataclass(frozen=True, slots=True)
class Root:
    """A directory below which the tools work.

    Attributes:
        path: as the configuration names it.
        real: the same without links, as found when the configuration was read; a link put there later is refused.
        writable: files below it may be written.
        refused: why it cannot be used; "" if it can.
    """

    path: str
    real: str
    writable: bool
    refused: str = ""

    def open(self) -> int:
        """Return a descriptor of the directory (`O_PATH`).

        Raises:
            ToolError: it is refused, is not there, or something else is in its place.
        """
        if self.refused:
            raise ToolError(f"The root {shown(self.path)} is refused: {self.refused}.")
        here = os.open("/", _DIRECTORY)
        for name in parts_of(self.real):
            above = here
            try:
                here = os.open(name, _DIRECTORY, dir_fd=above)
            except OSError as error:
                raise ToolError(
                    f"The root {shown(self.path)} cannot be used now: {error.strerror} (is it mounted?)."
                ) from error
            finally:
                os.close(above)
        return here

    def below(self, path: str) -> list[str] | None:
        """Return the components that an absolute path has below this root; None where it lies elsewhere."""
        parts = parts_of(path)
        for own in (parts_of(self.path), parts_of(self.real)):
            if parts[: len(own)] == own:
                return parts[len(own) :]
        return None


@dataclass(frozen=True, slots=True)
class Roots:
    """All roots, the deepest first, so that the nearest one above a path decides whether it may be written."""

    roots: tuple[Root, ...]

    @classmethod
    def of(cls, config: Config, home: Home) -> "Roots":
        """Return the roots of `[tools.files]`, resolved as they are on disk at this moment."""
        table = config.tools.files
        found: dict[str, Root] = {}
        for path, writable in [(path, True) for path in table.write] + [(path, False) for path in table.read]:
            real = real_path(path)
            plain = real if ".." in path.split("/") else "/" + "/".join(parts_of(path))
            refused = overlap(real, apart_from(config, home, writable=writable))
            found.setdefault(real, Root(plain, real, writable, refused))
        return cls(tuple(sorted(found.values(), key=lambda root: (-len(parts_of(root.real)), root.path))))

    def __iter__(self) -> Iterator[Root]:
        return iter(sorted(self.roots, key=lambda root: root.path))

    def __str__(self) -> str:
        return named(root.path for root in self)

    @property
    def writable(self) -> bool:
        """Whether there is any root below which files may be written."""
        return any(root.writable for root in self.roots)

    @property
    def only(self) -> Root | None:
        """The root that relative paths start from; None where there are several."""
        return self.roots[0] if len(self.roots) == 1 else None

    def locate(self, path: str, *, writing: bool = False) -> tuple[Root, list[str]]:
        """Return the root that a path means and its components below it. Nothing is looked up on disk.

        Raises:
            ToolError: it is no path, lies outside, or may not be written.
        """
        if "\0" in path or len(path) > MAX_PATH_CHARS or not _encodable(path):
            raise ToolError("That is not a path: it is too long or has characters that no file name can have.")
        if ".." in path.split("/"):
            raise ToolError(f"Write the path without '..': {shown(path)}. The roots are {self}.")
        root, parts = self._absolute(path) if path.startswith("/") else self._relative(path)
        if writing and not root.writable:
            raise ToolError(f"{shown(root.path)} may only be read. {self._writable_words()}")
        return root, parts

    def _absolute(self, path: str) -> tuple[Root, list[str]]:
        for root in self.roots:
            parts = root.below(path)
            if parts is not None:
                return root, parts
        raise ToolError(f"{shown(path)} is outside the roots. The roots are {self}.")

    def _relative(self, path: str) -> tuple[Root, list[str]]:
        if self.only is None:
            raise ToolError(f"{shown(path)} could be below any root. Give the whole path; the roots are {self}.")
        return self.only, parts_of(path)

    def _writable_words(self) -> str:
        if not self.writable:
            return "No root may be written."
        return f"Files can be written below {named(root.path for root in self if root.writable)}."


def named(paths: Iterable[str]) -> str:
    """Return paths in a row, the first ones where there are many."""
    all_shown = [shown(path) for path in paths]
    more = len(all_shown) - _MAX_NAMED
    return ", ".join(all_shown[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def parts_of(path: str) -> list[str]:
    """Return the components of a path that name something."""
    return [part for part in path.split("/") if part not in {"", "."}]


def _encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def check_roots(config: Config, home: Home, config_path: Path) -> None:
    """Refuse roots that hold loopd's own files, or that another key makes dangerous.

    Args:
        config: the whole configuration.
        home: of the daemon that will use it.
        config_path: the file it came from.

    Raises:
        ConfigError: a root lies in such a place or has one below it.
    """
    table = config.tools.files
    for kind, paths in (("read", table.read), ("write", table.write)):
        places = [*apart_from(config, home, writable=kind == "write"), config_path]
        for number, path in enumerate(paths):
            if why := overlap(path, places):
                raise ConfigError(
                    f"{config_path}: [tools] files.{kind}.{number}: found {path!r}, allowed: a directory apart from "
                    f"loopd's own and the system's ({why})",
                    hint="name the directories that are meant, not one above them",
                )
    for number, path in enumerate(table.read):
        for writable in table.write:
            if _lies_in(path, writable) and real_path(path) != real_path(writable):
                raise ConfigError(
                    f"{config_path}: [tools] files.read.{number}: found {path!r}, allowed: a directory that lies in "
                    f"none of files.write (it lies in {writable!r}, so links could make it writable)",
                    hint=f"leave it out: {writable} is read too",
                )


def apart_from(config: Config, home: Home, *, writable: bool) -> list[Path]:
    """Return the directories and files that no root may share anything with.

    That is what belongs to loopd, the secrets that the configuration names, what is no file at all, and, for a root
    that may be written, the programs that loopd runs as tools.
    """
    servers = config.tools.mcp.values()
    files = [config.model.api_key_file]
    for server in servers:
        files += [*server.env_files.values(), *server.header_files.values()]
    if writable:
        files += [config.tools.executables, *(program for server in servers for program in server.command[:1])]
    devices = (DEVICE_HOME, DEVICE_CONFIG.parent, DEVICE_CHANNEL.parent, DEVICE_MODEL.parent)
    own = (home.path, *devices, config.channel_socket(home.path))
    return [*own, *(Path(file) for file in files if file.startswith("/")), *_NO_FILES]


def overlap(path: str, places: Iterable[Path]) -> str:
    """Return which of `places` a directory lies in or holds, in words; "" where it has nothing to do with them."""
    for place in map(str, places):
        if _lies_in(path, place):
            return f"it lies in {place}" if real_path(path) != real_path(place) else f"it is {place}"
        if _lies_in(place, path):
            return f"{place} lies in it"
    return ""


def real_path(path: str) -> str:
    """Return a path with the links resolved that there are now."""
    try:
        return os.path.realpath(path)
    except OSError:  # a link that changes while it is looked at
        return os.path.normpath(path)


def _lies_in(path: str, above: str) -> bool:
    """Tell whether `path`, links resolved, is `above` or lies in it."""
    whole, start = parts_of(real_path(path)), parts_of(real_path(above))
    return whole[: len(start)] == start
