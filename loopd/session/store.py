"""The session store: one open session, one writer, nothing acknowledged that is not on disk (SPEC 2.2).

A batch of records is encoded, written by ONE call and synced, and only then does it exist in memory. What a failed
append leaves behind is cut off again; where the end of the file is not certain any more, the session is read-only
until it is reopened and re-read. Memory holds the encoded messages, an offset for each record, and small facts.

Everything here blocks: an event loop calls it in a thread. Different sessions share no lock.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType

from loopd.clock import now
from loopd.config import LoopTable
from loopd.errors import EncodeError, SessionExists, SessionIoError, SessionReadOnly
from loopd.home import Home
from loopd.proto.ids import check_session_id
from loopd.proto.records import (
    FORMAT_VERSION,
    KEPT_KEYS,
    Parent,
    Record,
    SessionStart,
    Summary,
    TurnEnd,
    Usage,
    User,
    encode_record,
)
from loopd.session import files
from loopd.session.baseline import Baseline
from loopd.session.epoch import Epoch, settle
from loopd.session.epoch import make as make_epoch
from loopd.session.log import Log, LogFault, OpenTurn
from loopd.session.replay import Request


def dir_for(home: Home, session_id: str) -> Path:
    """Return the directory of a session, which need not exist.

    Raises:
        UsageError: no session id.
    """
    return home.sessions / check_session_id(session_id)


class Session:
    """An open session. Made by `create` or `open`; one thread at a time may append or begin an epoch."""

    def __init__(self, session_id: str, directory: Path, lock: int, limits: LoopTable) -> None:
        """Load the newest epoch from `directory`, whose lock the descriptor `lock` holds."""
        self._id = session_id
        self._directory = directory
        self._lock = lock
        self._limits = limits
        self._unwritable = ""
        self._closed_epochs: list[int] = []
        numbers = files.epochs(session_id, directory)
        settle(session_id, directory, numbers)
        self._at = Epoch.open(session_id, directory, numbers[-1])

    @classmethod
    def create(
        cls,
        home: Home,
        session_id: str,
        baseline: Baseline,
        *,
        owner_uid: int,
        slot: int | None = None,
        limits: LoopTable,
    ) -> "Session":
        """Make a session and open it. When it returns, the session survives a power cut.

        A crash at any point leaves either no session or a whole one.

        Raises:
            SessionExists: there is one of this id.
            SessionIoError: the disk does not take it and nothing is left behind, or what was made cannot be opened.
            UsageError: no session id.
        """
        start = SessionStart(
            at=now(), version=FORMAT_VERSION, epoch=0, slot=slot, baseline=baseline.sha256(), owner_uid=owner_uid
        )
        directory = dir_for(home, session_id)
        lock = make(home, session_id, baseline.encoded(), [encode_record(start)])
        return cls._locked(session_id, directory, lock, limits)

    @classmethod
    def open(cls, home: Home, session_id: str, *, limits: LoopTable) -> "Session":
        """Open a session for writing: every line is read and checked.

        What was read is synced first, so that what is in memory is on disk also where the last writer was killed
        before it could sync.

        Raises:
            SessionNotFound: there is none.
            SessionBusy: it is open already.
            TornLog: the first line that is not what was written; nothing is repaired.
            BaselineError: the baseline is not the log's.
            SessionRefused: its directory is no directory, or somebody else's.
            SessionIoError: the disk or the rights do not allow it.
            UsageError: no session id.
        """
        directory = dir_for(home, session_id)
        lock = files.open_directory(session_id, directory)
        try:
            files.lock_directory(session_id, lock)
        except BaseException:
            os.close(lock)
            raise
        return cls._locked(session_id, directory, lock, limits)

    @classmethod
    def _locked(cls, session_id: str, directory: Path, lock: int, limits: LoopTable) -> "Session":
        try:
            return cls(session_id, directory, lock, limits)
        except BaseException:
            os.close(lock)
            raise

    @property
    def id(self) -> str:
        """The session's id."""
        return self._id

    @property
    def epoch(self) -> int:
        """The epoch that is open, the newest."""
        return self._at.log.epoch

    @property
    def baseline(self) -> Baseline:
        """What every request of this epoch holds."""
        return self._at.baseline

    @property
    def start(self) -> SessionStart:
        """Line 1."""
        return self._at.start

    @property
    def lines(self) -> int:
        """How many records there are; a reader in another thread sees one once it is whole."""
        return len(self._at.offsets) - 1

    @property
    def size_bytes(self) -> int:
        """The log's length."""
        return self._at.offsets[-1]

    @property
    def next_call(self) -> int:
        """The number of the next call to get a result."""
        return self._at.log.next_call

    @property
    def last_usage(self) -> Usage | None:
        """The last usage with numbers on this line of history."""
        return self._at.log.last_usage

    @property
    def title(self) -> str:
        """The beginning of the first user text."""
        return self._at.log.title

    @property
    def keys(self) -> Mapping[str, int]:
        """Idempotency key -> line of its user record; 0 for one of an earlier epoch."""
        return MappingProxyType(self._at.log.keys)

    @property
    def open_turn(self) -> OpenTurn | None:
        """The turn that has no end yet."""
        return self._at.log.open_turn

    @property
    def read_only(self) -> bool:
        """Whether an append failed in a way that leaves the file's end uncertain, or the session is closed."""
        return bool(self._unwritable)

    def append(self, *records: Record) -> None:
        """Write one batch. When it returns, the batch survives a power cut; if it raises, it does not exist.

        After a failed or short write the file is cut back and synced, and the session goes on.

        Raises:
            SessionIoError: the disk did not take it.
            SessionReadOnly: an earlier failure left the file's end uncertain, or the session is closed.
            EncodeError: the records are no batch that may follow, too large, or not UTF-8. Nothing was written.
        """
        self._check_writable()
        at = self._at
        extended, lines = self._encode(records)
        self._write(b"".join(lines))
        self._sync()
        at.log.adopt(extended)
        for record, line in zip(records, lines, strict=True):
            at.replay.add(record)
            at.offsets.append(at.offsets[-1] + len(line))

    def begin_epoch(self, summary: Summary, usage: Usage) -> None:
        """Close the epoch and go on in the next, which begins with a summary of what was said so far.

        The baseline is the same file once more. The new log is one line; it is made under another name and gets its
        own when it is whole, so that a crash at any point leaves the old epoch or the new one. When it returns, the
        new epoch survives a power cut. The old one is not touched.

        Args:
            summary: what the new epoch's requests begin with.
            usage: of the request that made it.

        Raises:
            SessionIoError: the disk did not take it; the old epoch goes on, or, where the new one may be there
                already, the session is read-only and its next opening tells.
            SessionReadOnly: as `append`.
            EncodeError: a turn is open, or the line would be too large. Nothing was written.
        """
        self._check_writable()
        at, directory = self._at, self._directory
        if at.log.open_turn is not None:
            raise EncodeError(self._id, f"{at.path}: an epoch ends between two turns, and one is open")
        start = SessionStart(
            at=now(),
            version=FORMAT_VERSION,
            epoch=self.epoch + 1,
            slot=usage.slot,
            baseline=at.start.baseline,
            owner_uid=at.start.owner_uid,
            parent=Parent(id=self._id, epoch=self.epoch, line=self.lines),
            next_call=self.next_call,
            keys=tuple(at.log.keys)[-KEPT_KEYS:],
            summary=summary,
            summary_usage=usage,
        )
        line = self._encode_lines([start])[0]
        baseline = files.baseline_bytes(self._id, directory, at.start)
        make_epoch(self._id, directory, start.epoch, baseline, line)
        self._unwritable = f"the epoch {start.epoch} of the session {self._id} was begun and could not be opened"
        with files.io(self._id, directory, "sync"):
            files.sync_directory(directory)
        self._at = Epoch.open(self._id, directory, start.epoch)
        self._closed_epochs.append(at.file)
        self._unwritable = ""

    def records(
        self, start: int = 1, stop: int | None = None, epoch: int | None = None
    ) -> Iterator[tuple[int, Record]]:
        """Read the records of lines `start` up to, not including, `stop` back from disk, each with its line.

        Args:
            start: 1-based line.
            stop: None for the present end.
            epoch: None for the newest. An earlier one is read from its beginning.

        Raises:
            SessionIoError: the disk could not be read, or the session is closed.
            TornLog: a line of an earlier epoch is bad.
        """
        at = self._at
        if epoch is not None and epoch != at.log.epoch:
            for entry in files.scan(self._id, files.log_path(self._directory, epoch), Log(epoch)):
                if start <= entry.line < (stop or entry.line + 1):
                    yield entry.line, entry.record
            return
        yield from at.records(self._id, start, stop)

    def earlier_turn(self, key: str) -> list[tuple[int, int, Record]]:
        """Return `(epoch, line, record)` of the turn that had this key in an earlier epoch.

        It is empty where no earlier epoch of this session has it: a fork has its parent's keys, not its epochs.

        Raises:
            SessionIoError: the disk could not be read.
            TornLog: a line of an earlier epoch is bad.
        """
        for epoch in reversed(files.epochs(self._id, self._directory)):
            turn: list[tuple[int, int, Record]] = []
            for line, record in self.records(epoch=epoch) if epoch < self.epoch else ():
                if turn or (isinstance(record, User) and record.key == key):
                    turn.append((epoch, line, record))
                if turn and isinstance(record, TurnEnd):
                    return turn
        return []

    def request(self, text: str | None) -> Request:
        """Return the request that follows the log: with a new user text, or, in an open turn, without.

        Raises:
            ReplayViolation: the last recorded request is no prefix of this one; it must not be sent (SPEC 2.3).
        """
        return self._at.replay.request(text)

    def close(self) -> None:
        """Give the session up; closing twice is no error. Nothing needs to be written."""
        if self._lock < 0:
            return
        self._unwritable = f"the session {self._id} is closed"
        for descriptor in (*self._closed_epochs, self._at.file, self._lock):
            os.close(descriptor)
        self._closed_epochs.clear()
        self._at.file = self._lock = -1

    def _check_writable(self) -> None:
        if self._unwritable:
            raise SessionReadOnly(self._id, self._unwritable, hint="the next message reopens the session")

    def _encode(self, records: Sequence[Record]) -> tuple[Log, list[bytes]]:
        try:
            extended = self._at.log.extended(records)
        except LogFault as fault:
            raise EncodeError(self._id, f"{self._at.path}: cannot append: {fault.why}") from None
        return extended, self._encode_lines(records)

    def _encode_lines(self, records: Sequence[Record]) -> list[bytes]:
        try:
            lines = [encode_record(record) for record in records]
        except ValueError as error:
            raise EncodeError(self._id, f"{self._at.path}: cannot append: {error}") from error
        longest, most = max(map(len, lines)), self._limits.max_record_bytes
        if longest > most:
            raise EncodeError(
                self._id,
                f"{self._at.path}: a record of {longest} bytes is over max_record_bytes = {most}",
                hint="raise max_record_bytes in [loop]",
            )
        return lines

    def _write(self, data: bytes) -> None:
        try:
            written = os.write(self._at.file, data)
        except OSError as error:
            self._cut_back()
            raise SessionIoError(self._id, self._at.path, "write", error) from error
        if written != len(data):
            self._cut_back()
            short = OSError(f"only {written} of {len(data)} bytes were taken")
            raise SessionIoError(self._id, self._at.path, "write", short)

    def _cut_back(self) -> None:
        """Take the file back to what is in memory after a write that failed; read-only where that fails too."""
        try:
            os.ftruncate(self._at.file, self.size_bytes)
            os.fdatasync(self._at.file)
        except OSError as error:
            self._unwritable = f"cannot undo a failed write of {self._at.path}: {error.strerror or error}"

    def _sync(self) -> None:
        """Sync once: after a failure the kernel may have dropped the data and forgotten, so it is never retried."""
        try:
            os.fdatasync(self._at.file)
        except OSError as error:
            self._unwritable = f"a sync of {self._at.path} failed: {error.strerror or error}"
            try:
                os.ftruncate(self._at.file, self.size_bytes)
            except OSError as second:
                self._unwritable += f", and it cannot be cut back: {second.strerror or second}"
            raise SessionIoError(self._id, self._at.path, "sync", error) from error


def make(home: Home, session_id: str, baseline: bytes, log: Iterable[bytes]) -> int:
    """Make the directory of a session whole, then give it its name; return the descriptor that holds its lock.

    Args:
        home: where.
        session_id: not in use.
        baseline: the file's bytes.
        log: the log's bytes, in pieces.

    Raises:
        SessionExists: something of this name is there.
        SessionIoError: the disk does not take it; nothing is left behind.
    """
    target = dir_for(home, session_id)
    if os.path.lexists(target):
        raise _exists(session_id, target)
    draft = home.sessions / f".create-{session_id}-{token_hex(4)}"
    with files.io(session_id, draft, "make"):
        draft.mkdir(mode=0o700)
        lock = os.open(draft, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    place = draft
    try:
        files.lock_directory(session_id, lock)
        files.write_new(session_id, files.baseline_path(draft, 0), [baseline])
        files.write_new(session_id, files.log_path(draft, 0), log)
        with files.io(session_id, draft, "sync"):
            os.fsync(lock)
        place = _publish(session_id, draft, target)
        with files.io(session_id, home.sessions, "sync"):
            files.sync_directory(home.sessions)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)
        raise
    return lock


def _publish(session_id: str, draft: Path, target: Path) -> Path:
    try:
        draft.rename(target)
    except OSError as error:
        if os.path.lexists(target):
            raise _exists(session_id, target) from error
        raise SessionIoError(session_id, target, "make", error) from error
    return target


def _exists(session_id: str, path: Path) -> SessionExists:
    return SessionExists(
        session_id, f"there is a session {session_id} already ({path})", hint="choose another id, or continue that one"
    )


def sweep(home: Home) -> list[str]:
    """Remove what a crash left of sessions that were being made, removed, kept or restored; return the names.

    What another process is making at this moment is left alone, and so is what is no directory: it is not ours.

    Raises:
        SessionIoError: a leftover cannot be removed.
    """
    swept = []
    for leftover in sorted([*home.sessions.glob(".*"), *home.refused.glob(".*"), *home.audit.glob(".restore")]):
        with files.io(leftover.name, leftover, "remove"):
            if leftover.is_dir() and not leftover.is_symlink() and not files.is_locked(leftover):
                shutil.rmtree(leftover)
                swept.append(leftover.name)
    return swept
