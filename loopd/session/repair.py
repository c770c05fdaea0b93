"""The explicit ways out of a refused log: repair and fork (SPEC 2.2/8). Both are crash-safe at every step.

`repair` first keeps the whole original under `<home>/refused/<id>-<time>/`, durably, and only then cuts the log
before the bad batch by one `ftruncate`. `fork` makes a new session whole before it gets its name, and leaves its
source alone.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from secrets import token_hex

from loopd.clock import now
from loopd.errors import BaselineError, TornLog, UsageError
from loopd.home import Home
from loopd.proto.canonical import sha256
from loopd.proto.records import Parent, SessionStart, Usage, encode_record
from loopd.session import files
from loopd.session.baseline import Baseline
from loopd.session.log import Log
from loopd.session.reader import check_epoch
from loopd.session.store import dir_for, make

_COPY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Repaired:
    """What `repair` did.

    Attributes:
        id: the session.
        fault: what was wrong.
        kept: where the whole original is.
        epoch: the newest epoch now; None where nothing of the session was good.
        lines: how many lines of that epoch are left.
    """

    id: str
    fault: str
    kept: Path
    epoch: int | None
    lines: int


def repair(home: Home, session_id: str) -> Repaired | None:
    """Keep the original and cut the log before its bad batch; None where no cut helps, and nothing is changed.

    What stops a session is in its newest epoch. If nothing of that is good (line 1, or the baseline), the epoch is
    removed; if it is the only one, the session is moved to `refused/` as it is. A line 1 that is whole but unknown
    is left alone: a newer release wrote it, and reads it.

    Raises:
        SessionNotFound: there is none.
        SessionBusy: it is open.
        SessionRefused: its directory is no directory, or somebody else's.
        SessionIoError: the disk does not take it; until the original is kept, nothing is changed.
        UsageError: no session id.
    """
    directory = dir_for(home, session_id)
    lock = files.open_directory(session_id, directory)
    try:
        files.lock_directory(session_id, lock)
        return _repair(home, session_id, directory)
    finally:
        os.close(lock)


def fork(
    home: Home,
    source: str,
    target: str,
    *,
    upto: int | None = None,
    owner_uid: int,
    baseline: Baseline | None = None,
) -> int:
    """Make the session `target` from the newest epoch of `source`: its lines 2 to `upto`, byte for byte.

    When it returns, the fork survives a power cut; a crash at any point leaves none or a whole one.

    Args:
        home: where both are.
        source: open, closed or refused; it is only read.
        target: a new id.
        upto: a line that ends a batch; later lines are not looked at. None for all that are there.
        owner_uid: of the fork.
        baseline: another one for the fork (its first request then pays for the whole history); None for the same.

    Returns:
        How many lines the fork has.

    Raises:
        UsageError: `upto` ends no batch, or no session id.
        TornLog: a line up to `upto` is bad.
        SessionNotFound, SessionExists, BaselineError, SessionRefused, SessionIoError: as of `open` and `create`.
    """
    directory = dir_for(home, source)
    dir_for(home, target)
    os.close(files.open_directory(source, directory))
    epoch = files.epochs(source, directory)[-1]
    shared = _shared(source, files.log_path(directory, epoch), epoch, upto)
    data = baseline.encoded() if baseline else files.baseline_bytes(source, directory, shared.start)
    start = SessionStart(
        at=now(),
        version=shared.start.version,
        epoch=0,
        slot=shared.start.slot,
        baseline=sha256(data),
        owner_uid=owner_uid,
        parent=Parent(id=source, epoch=epoch, line=shared.line, baseline=shared.foreign(sha256(data))),
        next_call=shared.start.next_call,
        keys=shared.start.keys,
        summary=shared.start.summary,
    )
    copy = _pieces(source, files.log_path(directory, epoch), shared.begin, shared.end)
    os.close(make(home, target, data, chain([encode_record(start)], copy)))
    return shared.line


@dataclass(frozen=True, slots=True)
class _Shared:
    """The lines that a fork copies: 2 to `line`, the bytes from `begin` up to `end`."""

    start: SessionStart
    line: int
    begin: int
    end: int
    usage_line: int

    def foreign(self, baseline: str) -> str | None:
        """Return the baseline under which the last copied request was made, if there is one and it is another."""
        parent = self.start.parent
        inherited = parent.baseline if parent and self.usage_line <= parent.line else None
        origin = inherited or self.start.baseline
        return origin if self.usage_line and origin != baseline else None


def _shared(session_id: str, path: Path, epoch: int, upto: int | None) -> _Shared:
    log = Log(epoch)
    begin = end = usage_line = 0
    for entry in files.scan(session_id, path, log):
        begin = begin or entry.length
        end = entry.offset + entry.length
        usage_line = entry.line if isinstance(entry.record, Usage) else usage_line
        if entry.line == upto:
            break
    if log.start is None or not log.whole or (upto is not None and log.line != upto):
        raise UsageError(
            f"line {upto} of {path} does not end a batch", hint=f"--upto {log.whole_line} is the nearest before it"
        )
    return _Shared(log.start, log.line, begin, end, usage_line)


def _repair(home: Home, session_id: str, directory: Path) -> Repaired | None:
    epochs = files.epochs(session_id, directory)
    fault, log, good_bytes = check_epoch(session_id, directory, epochs[-1])
    if not isinstance(fault, (TornLog, BaselineError)) or _is_newer(fault):
        return None
    if isinstance(fault, TornLog) and fault.good_lines:
        kept = _keep(home, session_id, directory)
        _cut(session_id, files.log_path(directory, epochs[-1]), good_bytes)
        return Repaired(session_id, str(fault), kept, epochs[-1], log.whole_line)
    if len(epochs) == 1:
        return Repaired(session_id, str(fault), _set_aside(home, session_id, directory), None, 0)
    kept = _keep(home, session_id, directory)
    _remove_epoch(session_id, directory, epochs[-1])
    _, older, _ = check_epoch(session_id, directory, epochs[-2])
    return Repaired(session_id, str(fault), kept, epochs[-2], older.whole_line)


def _is_newer(fault: TornLog | BaselineError) -> bool:
    return isinstance(fault, TornLog) and fault.kind == "unknown_record" and fault.line == 1


def _keep(home: Home, session_id: str, directory: Path) -> Path:
    """Copy the directory to `refused/`, durably and under its final name only when it is whole."""
    draft = home.refused / f".repair-{session_id}-{token_hex(4)}"
    with files.io(session_id, draft, "make"):
        draft.mkdir(mode=0o700)
        lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        files.lock_directory(session_id, lock)
        for path in sorted(directory.iterdir()):
            files.write_new(session_id, draft / path.name, _pieces(session_id, path, 0, path.stat().st_size))
        with files.io(session_id, draft, "sync"):
            os.fsync(lock)
        kept = _place(home, session_id)
        with files.io(session_id, kept, "make"):
            draft.rename(kept)
            files.sync_directory(home.refused)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    return kept


def _set_aside(home: Home, session_id: str, directory: Path) -> Path:
    kept = _place(home, session_id)
    with files.io(session_id, kept, "make"):
        directory.rename(kept)
        files.sync_directory(home.refused)
        files.sync_directory(home.sessions)
    return kept


def _place(home: Home, session_id: str) -> Path:
    """Return a name below `refused/` that is free: the clock may have stepped back."""
    stem = home.refused / f"{session_id}-{now().replace('-', '').replace(':', '')}"
    place, number = stem, 1
    while os.path.lexists(place):
        number += 1
        place = stem.with_name(f"{stem.name}-{number}")
    return place


def _cut(session_id: str, path: Path, good_bytes: int) -> None:
    with files.io(session_id, path, "cut"):
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.ftruncate(descriptor, good_bytes)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def _remove_epoch(session_id: str, directory: Path, epoch: int) -> None:
    """Remove an epoch, its log first: without a log there is no epoch."""
    for path in (files.log_path(directory, epoch), files.baseline_path(directory, epoch)):
        with files.io(session_id, path, "remove"):
            path.unlink(missing_ok=True)
            files.sync_directory(directory)


def _pieces(session_id: str, path: Path, begin: int, end: int) -> Iterator[bytes]:
    """Read the bytes from `begin` up to `end`.

    Raises:
        SessionIoError: the disk could not be read.
    """
    with files.io(session_id, path, "read"), path.open("rb") as file:
        file.seek(begin)
        while begin < end and (piece := file.read(min(_COPY_BYTES, end - begin))):
            yield piece
            begin += len(piece)
