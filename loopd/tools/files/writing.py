"""The tool `write`: a whole file or nothing (SPEC 6).

What is written goes into a new file in the same directory, which is synced and then takes the name: after a power cut,
a full disk or a cancel there is the old file or the new one, never a part. So is what is appended, for which the old
content is copied first; a file that another program changes meanwhile is left to it. Calls come one at a time.
What a power cut may leave is the new file under its first name, `.loopd-….tmp`.
"""

import errno
import os
import secrets
import stat
from contextlib import suppress
from typing import Any

from loopd.errors import ToolError
from loopd.tools.files.beneath import Missing, Spot, open_directory, open_file, take_rights, walk
from loopd.tools.files.words import io, kind_of, shown
from loopd.tools.files.work import Stop, Work

MAX_FILE_BYTES = 16 * 1024 * 1024
"""Of the file that results; what is written in one call is bounded by the model's answer."""

_BLOCK_BYTES = 1024 * 1024
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write(work: Work, arguments: dict[str, Any]) -> str:
    """Write the file, durable on return, and say how large it is now.

    A new file may be read by whoever may use its directory; one that was there keeps its mode and, where the system
    allows it, its owner and group (not its extended attributes).

    Raises:
        ToolError: the path; what is there is no file; it would be too large; the disk. The old file is as it was.
        Stopped: as told; likewise.
    """
    path, append = arguments["path"], bool(arguments.get("append"))
    content = _encoded(arguments["content"])
    root, parts = work.roots.locate(path, writing=True)
    if path.endswith("/"):
        raise ToolError(f"{shown(path)} is a directory's name; give a file's.")
    try:
        spot = walk(root, parts, work.stop, make=bool(arguments.get("directories")))
    except Missing as error:
        raise ToolError(f"{error.message} With directories set to true it is made.") from error
    with spot:
        before = spot.info
        if before is not None and not stat.S_ISREG(before.st_mode):
            raise ToolError(f"{shown(spot.path)} is a {kind_of(before.st_mode)}, not a file; nothing was written.")
        if (before.st_size if before and append else 0) + len(content) > MAX_FILE_BYTES:
            raise ToolError(f"{shown(spot.path)} would have more than {MAX_FILE_BYTES} bytes; nothing was written.")
        with io("write", spot.path):
            size = _Replacement(spot, work.stop).write(content, append=append and before is not None)
    done = "made" if before is None else "appended to" if append else "replaced"
    return f"{shown(spot.path)} was {done}: it has {size} bytes now."


def _encoded(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ToolError("The content has lone surrogates, which no file in UTF-8 can hold.") from error


class _Replacement:
    """A new file that takes the place of what is at a spot."""

    def __init__(self, spot: Spot, stop: Stop) -> None:
        self._spot, self._stop = spot, stop
        self._name = f".loopd-{secrets.token_hex(8)}.tmp"

    def write(self, content: bytes, *, append: bool) -> int:
        """Write it and return its size.

        Raises:
            OSError: it cannot be written; nothing has changed.
            ToolError: what is there was changed meanwhile; likewise. Or the disk did not confirm the new name.
            Stopped: as told; nothing has changed.
        """
        directory = open_directory(self._spot.directory, ".")
        try:
            size = self._put(content, directory, append=append)
            with io("be sure that the disk has", self._spot.path):
                os.fsync(directory)
        finally:
            os.close(directory)
        return size

    def _put(self, content: bytes, directory: int, *, append: bool) -> int:
        """Write the new file and let it take the name; whatever fails, the new file is removed."""
        file = os.open(self._name, _NEW, 0o600, dir_fd=directory)
        try:
            if self._spot.info and not _may_write(directory, self._spot.name):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            old = self._copy(directory, file) if append else None
            _write(file, content)
            self._take_rights(file, directory)
            os.fsync(file)
            size = os.fstat(file).st_size
            self._stop.check()
            self._check_unchanged(directory, old)
            os.rename(self._name, self._spot.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(OSError):
                os.unlink(self._name, dir_fd=directory)
            raise
        finally:
            os.close(file)
        return size

    def _copy(self, directory: int, file: int) -> os.stat_result:
        """Copy what is there, and return what it was."""
        source = open_file(directory, self._spot.name)
        try:
            copied = 0
            while data := os.read(source, _BLOCK_BYTES):
                self._stop.check()
                copied += len(data)
                if copied > MAX_FILE_BYTES:
                    raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
                _write(file, data)
            return os.fstat(source)
        finally:
            os.close(source)

    def _take_rights(self, file: int, directory: int) -> None:
        """Give the new file the rights of the old one, or those that its directory suggests."""
        before = self._spot.info
        if before is None:
            take_rights(file, directory, 0o664)
            return
        with suppress(PermissionError):
            os.fchown(file, -1, before.st_gid)
            os.fchown(file, before.st_uid, -1)
        os.fchmod(file, stat.S_IMODE(before.st_mode) & 0o777)

    def _check_unchanged(self, directory: int, old: os.stat_result | None) -> None:
        """Refuse to replace what is no file, or a file that has changed since it was copied.

        Raises:
            ToolError: it is such.
        """
        try:
            now = os.stat(self._spot.name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            now = None
        same = (
            now is None or stat.S_ISREG(now.st_mode) if old is None else now is not None and _state(now) == _state(old)
        )
        if not same:
            raise ToolError(f"{shown(self._spot.path)} was changed at the same moment; nothing was written. Try again.")


def _may_write(directory: int, name: str) -> bool:
    """Tell whether a file itself may be written; a new one in its place would get by that."""
    return os.access(name, os.W_OK, dir_fd=directory, effective_ids=True, follow_symlinks=False)


def _state(info: os.stat_result) -> tuple[int, int, int, int]:
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
