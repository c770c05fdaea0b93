"""The channel's socket in the file system: whose it is, what may be replaced, who may connect (SPEC 8)."""

import contextlib
import errno
import grp
import os
import socket
import stat
from pathlib import Path

from loopd.errors import ChannelError, ConfigError

MAX_PATH_BYTES = 107
"""What `sun_path` holds on Linux, its terminator not counted; man 7 unix."""

_BACKLOG = 128


def check_path(path: Path) -> None:
    """Refuse a path that no socket can have.

    Raises:
        ConfigError: it is longer than 107 bytes.
    """
    size = len(os.fsencode(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError(
            f"the socket path {path} has {size} bytes, and a socket's may have {MAX_PATH_BYTES}",
            hint="give a shorter one: LOOPD_SOCKET, or socket in [channel]",
        )


def bind(path: Path, *, group: str) -> socket.socket:
    """Return a listening socket at `path`, of mode 0660 for `group`, or 0600 where that is ''.

    A socket file that nobody listens on is left over from a crash and replaced. It is never open to more people
    than it ends with: the umask narrows it first.

    Raises:
        ConfigError: the path is too long, something else than a socket is there, or there is no such group.
        ChannelError: another process listens there, or the system refuses.
    """
    check_path(path)
    group_id = _group_id(group) if group else None
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_leftover(path)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        if group_id is not None:
            os.chown(path, -1, group_id)
            path.chmod(0o660)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ChannelError(f"cannot listen on {path}: {error.strerror or error}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def unlink(path: Path, inode: int) -> None:
    """Remove the socket file if it still is the one with this inode; another process may have replaced it."""
    with contextlib.suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _remove_leftover(path: Path) -> None:
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise ConfigError(f"{path} is there and is no socket", hint="move it away, or give another path: LOOPD_SOCKET")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        # Homes are told apart by their lock; this is about two homes that were given one socket path.
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise ChannelError(f"another process listens on {path}", hint="give each home its own socket: LOOPD_SOCKET")
    path.unlink()


def _group_id(name: str) -> int:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError as error:
        raise ConfigError(f"[channel] group: there is no group {name!r}", hint=f"groupadd {name}") from error
