"""File names, kinds and errors in words that a model can act on: one line each, and nothing that steers a terminal."""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from loopd.errors import ToolError

_MAX_SHOWN_CHARS = 300
_KINDS = {
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "link",
    stat.S_IFIFO: "FIFO",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFREG: "file",
}
_FAULTS = {
    errno.EACCES: "loopd's user is not allowed to",
    errno.EPERM: "loopd's user is not allowed to",
    errno.ELOOP: "it was changed at the same moment; try again",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EROFS: "it is on a file system that is read-only for loopd",
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "it would be too large",
}


def shown(path: str) -> str:
    """Return a path as it is, or as a JSON string where it has characters that are not for showing."""
    text = path if path.isprintable() else json.dumps(path)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def kind_of(mode: int) -> str:
    """Return what a `st_mode` says it is."""
    return _KINDS.get(stat.S_IFMT(mode), "special file")


@contextmanager
def io(action: str, path: str) -> Iterator[None]:
    """Turn an OSError into a `ToolError`: what could not be done, with what, and why."""
    try:
        yield
    except OSError as error:
        why = _FAULTS.get(error.errno or 0) or error.strerror or os.strerror(errno.EIO)
        raise ToolError(f"Cannot {action} {shown(path)}: {why}.") from error
