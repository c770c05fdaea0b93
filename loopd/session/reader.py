"""What can be done with a session without opening it: list, read, verify, delete.

All but `delete` take no lock and write nothing: they read up to the size they find. A batch is one write call, so
a reader sees a live log's last batch unclosed only while that call runs.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

from pydantic_core import from_json

from loopd.errors import SessionError, SessionNotFound, SessionRefused, TornLog
from loopd.home import Home
from loopd.proto.ids import is_session_id
from loopd.proto.records import Assistant, Record, SessionStart, Usage, User
from loopd.session import files
from loopd.session.log import Log, LogFault, decode_line, title_of
from loopd.session.replay import Replay
from loopd.session.store import dir_for

_TITLE_BYTES = 4096
_TAIL_BYTES = 65_536
_ONE_WRITE_S = 0.2


@dataclass(frozen=True, slots=True)
class Summary:
    """One line of a list of sessions.

    Attributes:
        id: the session.
        title: the beginning of its first user text.
        epoch: the newest.
        size_bytes: length of the newest log.
        modified: when it was last written, in seconds since 1970, by the file's own stamp.
        owner_uid: who made it; None where line 1 cannot be read.
        refused: why it cannot be opened, as far as head and tail of the log show; None where they are good.
    """

    id: str
    title: str = ""
    epoch: int = 0
    size_bytes: int = 0
    modified: float = 0.0
    owner_uid: int | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found; `faults` is empty where all is good.

    `lines` and `size_bytes` are those of all epochs that end in whole batches.
    """

    id: str
    epochs: int
    lines: int
    size_bytes: int
    open_turn: bool
    faults: tuple[SessionRefused, ...]


def summaries(home: Home) -> list[Summary]:
    """List the sessions, the one written last first. Reads the head and the tail of each log, no bodies.

    Raises:
        SessionIoError: the sessions' directory cannot be listed.
    """
    with files.io("", home.sessions, "list"):
        ids = sorted(path.name for path in home.sessions.iterdir() if is_session_id(path.name))
    found = [summary for session_id in ids if (summary := _summary(home, session_id))]
    return sorted(found, key=lambda it: it.modified, reverse=True)


def read_records(
    home: Home, session_id: str, start: int = 1, epoch: int | None = None, *, unclosed: bool = False
) -> Iterator[tuple[int, Record]]:
    """Read records from line `start` on, each with its line, up to the first bad line or the present end.

    Args:
        home: where.
        session_id: open, closed or refused.
        start: 1-based line.
        epoch: None for the newest.
        unclosed: also give the good lines of a last batch that is not closed; only for a session that is refused,
            since a live one may be in the middle of writing it.

    Raises:
        SessionNotFound: no such session or epoch.
        SessionRefused: its directory is no directory, or somebody else's.
        SessionIoError: the disk or the rights do not allow it.
        UsageError: no session id.
    """
    directory = _directory(home, session_id)
    there = files.epochs(session_id, directory)
    wanted = there[-1] if epoch is None else epoch
    if wanted not in there:
        raise SessionNotFound(session_id, f"the session {session_id} has no epoch {wanted}")
    log = Log(wanted)
    batch: list[tuple[int, Record]] = []
    try:
        for entry in files.scan(session_id, files.log_path(directory, wanted), log):
            if entry.line >= start:
                batch.append((entry.line, entry.record))
            if log.whole:
                yield from batch
                batch.clear()
    except TornLog:
        if unclosed:
            yield from batch


def epochs(home: Home, session_id: str) -> list[int]:
    """Return the epochs that a session has, oldest first.

    Raises:
        SessionError: as `read_records`.
    """
    return files.epochs(session_id, _directory(home, session_id))


def usages(home: Home, session_id: str) -> list[tuple[int, int, Usage]]:
    """Return `(epoch, line, usage)` of all epochs in log order, for `loopd.proto.usage.rows`.

    The request that wrote an epoch's summary belongs to the epoch before, whose history it extended.

    Raises:
        SessionError: as `read_records`.
    """
    table: list[tuple[int, int, Usage]] = []
    for epoch in files.epochs(session_id, _directory(home, session_id)):
        for line, record in read_records(home, session_id, epoch=epoch):
            if isinstance(record, Usage):
                table.append((epoch, line, record))
            elif isinstance(record, SessionStart) and record.summary_usage and record.parent:
                table.append((record.parent.epoch, record.parent.line, record.summary_usage))
    return table


def verify(home: Home, session_id: str) -> Verdict:
    """Check every line of every epoch, the baselines, and that the last recorded request is rebuilt as it was sent.

    Needs no lock, no writes and no free space.

    Raises:
        SessionNotFound: there is none.
        SessionRefused: its directory is no directory, or somebody else's.
        SessionIoError: the disk or the rights do not allow it.
        UsageError: no session id.
    """
    directory = _directory(home, session_id)
    there = files.epochs(session_id, directory)
    faults: list[SessionRefused] = []
    lines = size_bytes = 0
    open_turn = False
    for epoch in there:
        fault, log, good_bytes = settled_epoch(session_id, directory, epoch)
        faults += [fault] if fault else []
        lines += log.whole_line
        size_bytes += good_bytes
        open_turn = log.open_turn is not None
    return Verdict(session_id, len(there), lines, size_bytes, open_turn, tuple(faults))


def fault_of(home: Home, session_id: str, epoch: int) -> SessionRefused | None:
    """Return what is wrong with one epoch, None where nothing is.

    Raises:
        SessionError: as `verify`.
    """
    return settled_epoch(session_id, _directory(home, session_id), epoch)[0]


def settled_epoch(session_id: str, directory: Path, epoch: int) -> tuple[SessionRefused | None, Log, int]:
    """Check one epoch as `check_epoch` does, and once more where it looked torn: a write may have been under way."""
    checked = check_epoch(session_id, directory, epoch)
    if isinstance(checked[0], TornLog):
        _pause()
        checked = check_epoch(session_id, directory, epoch)
    return checked


def check_epoch(session_id: str, directory: Path, epoch: int) -> tuple[SessionRefused | None, Log, int]:
    """Check one epoch as it is on disk now; return the first fault, the log up to it, and its good bytes.

    Raises:
        SessionIoError: the disk or the rights do not allow it.
    """
    path, log = files.log_path(directory, epoch), Log(epoch)
    good_bytes = 0
    replay: Replay
    try:
        for entry in files.scan(session_id, path, log):
            if isinstance(entry.record, SessionStart):
                replay = Replay(files.read_baseline(session_id, directory, entry.record))
            replay.add(entry.record)
            if log.whole:
                good_bytes = entry.offset + entry.length
    except SessionRefused as fault:
        return fault, log, good_bytes
    if replay.violation:
        return SessionRefused(session_id, path, f"{path}: {replay.violation}"), log, good_bytes
    return None, log, good_bytes


def delete(home: Home, session_id: str) -> None:
    """Remove a session for good. When it returns, the session is gone also after a power cut.

    A crash at any point leaves the whole session, or none and a leftover for `store.sweep`.

    Raises:
        SessionNotFound: there is none.
        SessionBusy: it is open.
        SessionRefused: its directory is no directory, or somebody else's.
        SessionIoError: the disk or the rights do not allow it.
        UsageError: no session id.
    """
    directory = dir_for(home, session_id)
    doomed = home.sessions / f".delete-{session_id}-{token_hex(4)}"
    lock = files.open_directory(session_id, directory)
    try:
        files.lock_directory(session_id, lock)
        with files.io(session_id, directory, "delete"):
            directory.rename(doomed)
            files.sync_directory(home.sessions)
            shutil.rmtree(doomed)
    finally:
        os.close(lock)


def _directory(home: Home, session_id: str) -> Path:
    directory = dir_for(home, session_id)
    os.close(files.open_directory(session_id, directory))
    return directory


def _summary(home: Home, session_id: str) -> Summary | None:
    """Look at one session; None where it was removed meanwhile."""
    directory = home.sessions / session_id
    try:
        epochs = files.epochs(session_id, _directory(home, session_id))
        return _look(session_id, directory, epochs)
    except SessionError as error:
        if not os.path.lexists(directory):
            return None
        return Summary(session_id, refused=str(error))


def _look(session_id: str, directory: Path, epochs: list[int]) -> Summary:
    path = files.log_path(directory, epochs[-1])
    owner_uid: int | None = None
    refused: str | None = None
    with files.io(session_id, path, "read"), path.open("rb") as file:
        facts = os.fstat(file.fileno())
        try:
            start = decode_line(file.readline(files.MAX_LINE_BYTES))
            owner_uid = start.owner_uid if isinstance(start, SessionStart) else None
            _check_tail(file, facts.st_size)
        except LogFault as fault:
            refused = f"{path}: {fault.why}"
    title = _title(session_id, files.log_path(directory, epochs[0]))
    return Summary(session_id, title, epochs[-1], facts.st_size, facts.st_mtime, owner_uid, refused)


def _title(session_id: str, path: Path) -> str:
    """Return the title from the beginning of line 2, however long that line is."""
    with files.io(session_id, path, "read"), path.open("rb") as file:
        file.readline(files.MAX_LINE_BYTES)
        head = file.read(_TITLE_BYTES).partition(b"\n")[0].decode("utf-8", "ignore")
    try:
        value = from_json(head, allow_partial="trailing-strings")
    except ValueError:
        return ""
    text = value.get("text") if isinstance(value, dict) else None
    return title_of(text) if isinstance(text, str) else ""


def _check_tail(file: BinaryIO, size: int) -> None:
    r"""Check the last line, if it is not too long for a look: whole, and one that may end a log.

    Raises:
        LogFault: it is not.
    """
    begin = max(0, size - _TAIL_BYTES)
    file.seek(begin)
    window = file.read(size - begin)
    last = window[:-1].rpartition(b"\n")[2] + window[-1:]
    if len(last) == len(window) and begin > 0:
        if not last.endswith(b"\n"):
            raise LogFault("no_newline", "the last line does not end in a newline")
    elif isinstance(record := decode_line(last), (User, Assistant)):
        raise LogFault("incomplete_step", f"the log ends in a record of type {record.type}")


def _pause() -> None:
    """Let a write that is under way end."""
    threading.Event().wait(_ONE_WRITE_S)
