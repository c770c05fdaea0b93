r"""A session's files: their names, their locks, and one way to read a log (SPEC 2).

    <home>/sessions/<id>/<epoch>.baseline.json   canonical JSON, never rewritten
    <home>/sessions/<id>/<epoch>.jsonl           the log

An epoch exists once its log does. A log is made as `.<epoch>.jsonl` and a session's directory under a name that
begins with a dot; after a crash such a name is a leftover.
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from loopd.errors import BaselineError, SessionBusy, SessionIoError, SessionNotFound, SessionRefused, TornLog
from loopd.proto.canonical import sha256
from loopd.proto.records import Record, SessionStart
from loopd.session.baseline import Baseline
from loopd.session.log import Log, LogFault, decode_line, explain

MAX_LINE_BYTES = 64 * 1024 * 1024
"""The most that `max_record_bytes` can be; a longer line is not read whole."""

_KINDS = str.maketrans(
    {"l": "a link", "p": "a FIFO", "d": "a directory", "s": "a socket", "c": "a device", "b": "a disk"}
)
_LOG_NAME = re.compile(r"(0|[1-9]\d{0,8})\.jsonl\Z")


class Entry(NamedTuple):
    """A record where it stands: 1-based line, byte offset and length of that line."""

    line: int
    offset: int
    length: int
    record: Record


def log_path(directory: Path, epoch: int) -> Path:
    """Return the log of an epoch."""
    return directory / f"{epoch}.jsonl"


def draft_path(directory: Path, epoch: int) -> Path:
    """Return where the log of an epoch is made before it gets its name."""
    return directory / f".{epoch}.jsonl"


def baseline_path(directory: Path, epoch: int) -> Path:
    """Return the baseline of an epoch."""
    return directory / f"{epoch}.baseline.json"


@contextmanager
def io(session_id: str, path: Path, action: str) -> Iterator[None]:
    """Turn an OSError into a `SessionIoError` that names `path` and what was being done to it."""
    try:
        yield
    except OSError as error:
        raise SessionIoError(session_id, path, action, error) from error


def open_directory(session_id: str, path: Path) -> int:
    """Open a session's directory and return its descriptor.

    Raises:
        SessionNotFound: nothing is there.
        SessionRefused: it is no directory, or belongs to another user.
        SessionIoError: it may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SessionNotFound(
            session_id, f"there is no session {session_id} ({path})", hint="bxctl sessions lists them"
        ) from None
    except NotADirectoryError:
        what = "a symbolic link" if path.is_symlink() else "a file"
        raise SessionRefused(
            session_id, path, f"{path} is {what}, not the directory of a session", hint=f"move {path} away"
        ) from None
    except OSError as error:
        raise SessionIoError(session_id, path, "open", error) from error
    owner, us = os.fstat(descriptor).st_uid, os.geteuid()
    if owner != us:
        os.close(descriptor)
        raise SessionRefused(
            session_id, path, f"{path} belongs to user {owner}, and this is user {us}", hint=f"chown -R {us} {path}"
        )
    return descriptor


def lock_directory(session_id: str, descriptor: int) -> None:
    """Take the session for this descriptor's life.

    Raises:
        SessionBusy: another process, or another open session in this one, has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SessionBusy(
            session_id, f"the session {session_id} is open elsewhere", hint="bxctl chat joins it through the daemon"
        ) from None


def is_locked(directory: Path) -> bool:
    """Tell whether some process holds the directory at this moment; only for leftovers, which nobody opens."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_new(session_id: str, path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file that does not exist yet and sync it; its directory entry is the caller's to sync.

    Raises:
        SessionIoError: the disk does not take it.
    """
    with io(session_id, path, "write"), open(path, "xb", opener=_private) as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make the directory's entries durable.

    Raises:
        OSError: the disk does not take it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def epochs(session_id: str, directory: Path) -> list[int]:
    """Return the epochs that exist, oldest first; never an empty list.

    Raises:
        SessionNotFound: no directory, or no log in it.
        SessionRefused: what has the name of a log is no file: a link, a FIFO, a directory.
        SessionIoError: it may not be read.
    """
    with io(session_id, directory, "list"):
        found = sorted(int(match[1]) for path in directory.iterdir() if (match := _LOG_NAME.match(path.name)))
    for epoch in found:
        check_regular(session_id, log_path(directory, epoch))
    if not found:
        raise SessionNotFound(
            session_id, f"there is no log in {directory}", hint=f"bxctl delete {session_id} removes it"
        )
    return found


def check_regular(session_id: str, path: Path) -> None:
    """Refuse what is there under a file's name and is none; opening a FIFO would wait for ever.

    Raises:
        SessionRefused: it is a link, a FIFO, a directory or the like.
        SessionIoError: it cannot be looked at.
    """
    with io(session_id, path, "look at"):
        mode = path.lstat().st_mode
    if not stat.S_ISREG(mode):
        kind = stat.filemode(mode)[0].translate(_KINDS)
        raise SessionRefused(session_id, path, f"{path} is {kind}, not a file of loopd's", hint=f"move {path} away")


def baseline_bytes(session_id: str, directory: Path, start: SessionStart) -> bytes:
    """Return the file of the baseline that a log's `session_start` names.

    Raises:
        BaselineError: it is missing, or is not the one that was hashed.
        SessionIoError: it may not be read.
    """
    path = baseline_path(directory, start.epoch)
    if os.path.lexists(path):
        check_regular(session_id, path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise BaselineError(session_id, path, f"{path}: the baseline is missing") from None
    except OSError as error:
        raise SessionIoError(session_id, path, "read", error) from error
    if sha256(data) != start.baseline:
        raise BaselineError(
            session_id, path, f"{path}: the baseline's hash is {sha256(data)}, the log names {start.baseline}"
        )
    return data


def read_baseline(session_id: str, directory: Path, start: SessionStart) -> Baseline:
    """Return the baseline that a log's `session_start` names.

    Raises:
        BaselineError: as `baseline_bytes`, or it is of a version or has fields that this release does not know.
        SessionIoError: it may not be read.
    """
    data = baseline_bytes(session_id, directory, start)
    try:
        return Baseline.decode(data)
    except ValidationError as error:
        path = baseline_path(directory, start.epoch)
        raise BaselineError(session_id, path, f"{path}: {explain(error)}") from None


def scan(session_id: str, path: Path, log: Log) -> Iterator[Entry]:
    """Read a log through its grammar, line by line, up to its size at this moment.

    Args:
        session_id: for the errors.
        path: the log.
        log: a fresh machine; while an entry is looked at, it has taken the records up to and with that one.

    Raises:
        TornLog: the first line that was not written whole or may not stand where it does.
        SessionIoError: the disk could not be read.
    """
    line, offset, following, good_bytes = 0, 0, 0, 0
    with io(session_id, path, "read"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        try:
            while following < size:
                line, offset = line + 1, following
                data = file.readline(min(MAX_LINE_BYTES + 1, size - offset))
                if len(data) > MAX_LINE_BYTES:
                    raise LogFault("unknown_record", f"the line is longer than {MAX_LINE_BYTES} bytes")
                record = decode_line(data)
                log.add(record)
                following = offset + len(data)
                del data
                good_bytes = following if log.whole else good_bytes
                yield Entry(line, offset, following - offset, record)
            log.end()
        except LogFault as fault:
            raise TornLog(
                session_id,
                path,
                line=max(line, 1),
                offset=offset,
                kind=fault.kind,
                why=fault.why,
                good_lines=log.whole_line,
                good_bytes=good_bytes,
            ) from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
