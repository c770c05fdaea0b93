r"""The audit log: what was done, each line chained to the one before by its hash (SPEC 7).

    <home>/audit/<n>.jsonl      n counts from 1; one process writes one file at a time, opened exclusively

A line is canonical JSON and `\n`: `n` (from 1 in each file), `at`, `event`, the event's facts, and `previous`, the
hash of the line before (null on the first). The first line of a file is the event `audit_opened` and names in
`follows` another file as it was found: its name, its last whole line, that line's hash, and whether the file ended
torn. That is the writer's own previous file, or else the highest-numbered one.

Nothing is ever repaired. After a failed write or sync the file is left as it is, and the next record opens a new
one, which says so.
"""

import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopd.clock import now
from loopd.errors import AuditError
from loopd.proto.canonical import canonical, sha256

MAX_FILE_BYTES = 16 * 1024 * 1024

_NAME = re.compile(r"([1-9]\d{0,8})\.jsonl\Z")
_BEGINNING = b'{"'


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """What `verify` found; `faults` is empty where the chain holds.

    Attributes:
        files: how many there are.
        records: whole lines in all files.
        torn: files that end in the middle of a line, as after a power cut; no record that was acknowledged.
        faults: `<path>:<line>: <why>` each.
    """

    files: int
    records: int
    torn: tuple[Path, ...]
    faults: tuple[str, ...]


class AuditLog:
    """The writer. Not for several threads at once."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._own: Path | None = None
        self._closed = False
        self._file = -1
        self._size = 0
        self._count = 0
        self._previous: str | None = None

    @classmethod
    def open(cls, directory: Path, *, max_bytes: int = MAX_FILE_BYTES) -> "AuditLog":
        """Begin a new file in `directory`, which exists; when this returns, its first line is durable.

        Args:
            directory: `<home>/audit`.
            max_bytes: a file that has reached this size is followed by the next.

        Raises:
            AuditError: the disk or the rights do not allow it.
        """
        log = cls(directory, max_bytes)
        log._begin()
        return log

    def append(self, event: str, **facts: Any) -> None:  # noqa: ANN401 - any JSON value
        """Write one record. When it returns, the record survives a power cut.

        Raises:
            AuditError: the disk does not take it, or the log is closed. What depends on the record must not be done.
        """
        if self._closed:
            raise AuditError(f"the audit log in {self._directory} is closed")
        if self._file < 0 or self._size >= self._max_bytes:
            self._begin()
        self._write(event, facts)

    def close(self) -> None:
        """Give the log up; closing twice is no error. Nothing needs to be written."""
        self._closed = True
        self._leave()

    def _begin(self) -> None:
        """Open the next file and write its first line; a file that gets none is taken away again."""
        self._leave()
        try:
            existing = _files(self._directory)
            before = self._own if self._own in existing else existing[-1] if existing else None
            follows = _as_found(before) if before else None
            path = self._create(_number(existing[-1]) + 1 if existing else 1)
        except OSError as error:
            raise AuditError(f"cannot open an audit log in {self._directory}: {error.strerror or error}") from error
        self._size, self._count, self._previous = 0, 0, None
        try:
            self._write("audit_opened", {"follows": follows})
            self._sync_directory()
        except AuditError:
            self._leave()
            with suppress(OSError):
                path.unlink()
            raise
        self._own = path

    def _create(self, number: int) -> Path:
        while True:
            path = self._directory / f"{number}.jsonl"
            try:
                self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            except FileExistsError:
                number += 1
            else:
                self._path = path
                return path

    def _write(self, event: str, facts: dict[str, Any]) -> None:
        own = {"n": self._count + 1, "at": now(), "event": event, "previous": self._previous}
        try:
            line = canonical(facts | own) + b"\n"
        except (ValueError, TypeError) as error:
            raise AuditError(f"cannot audit {event}: {error}") from error
        try:
            if os.fstat(self._file).st_nlink == 0:
                raise OSError("somebody has removed it")
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes were taken")
            os.fdatasync(self._file)
        except OSError as error:
            self._leave()
            raise AuditError(f"cannot write {self._path}: {error.strerror or error}") from error
        self._size += len(line)
        self._count += 1
        self._previous = sha256(line)

    def _sync_directory(self) -> None:
        try:
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise AuditError(f"cannot sync {self._directory}: {error.strerror or error}") from error

    def _leave(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def verify(directory: Path) -> AuditVerdict:
    """Check each file by itself, and that each line which another file names has the hash that it names.

    A named file that has grown since is good, one that is shorter or gone is not. Needs no writes.

    Raises:
        AuditError: the files cannot be read.
    """
    faults: list[str] = []
    torn: list[Path] = []
    hashes: dict[str, list[str]] = {}
    named: list[tuple[Path, dict[str, Any]]] = []
    try:
        paths = _files(directory)
        for path in paths:
            hashes[path.name] = _check(path, faults, torn, named)
    except OSError as error:
        raise AuditError(f"cannot read {error.filename or directory}: {error.strerror or error}") from error
    for path, follows in named:
        faults += _check_named(path, follows, hashes)
    return AuditVerdict(len(paths), sum(map(len, hashes.values())), tuple(torn), tuple(faults))


def may_have_begun(directory: Path, session_id: str, calls: Collection[int]) -> frozenset[int]:
    """Return those of a session's calls that may have had an effect, as far as the log tells. Needs no writes.

    An intent (`tool_call`) is durable before its tool runs, so a call without one never began. That is sure only
    where all files can be read and the session's beginning is in them; else every call may have begun.
    """
    begun: set[int] = set()
    is_whole = False
    try:
        for path in reversed(_files(directory)):
            for record in _about(path, session_id):
                is_whole = is_whole or _begins(record, session_id)
                if record["event"] == "tool_call":
                    begun.add(record["call"])
            if begun.issuperset(calls):
                break
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ):  # unreadable, or no file of ours: nothing is sure
        is_whole = False
    return frozenset(begun.intersection(calls) if is_whole else calls)


def _about(path: Path, session_id: str) -> Iterator[dict[str, Any]]:
    """Yield the whole records of a file that name a session as `session`, or as the one that a fork made."""
    mark = canonical(session_id)
    with path.open("rb") as file:
        for line in file:
            if mark in line and line.endswith(b"\n"):
                record = json.loads(line)
                if session_id in {record.get("session"), record.get("to")}:
                    yield record


def _begins(record: dict[str, Any], session_id: str) -> bool:
    """Tell whether a session of this id was made just then."""
    made = {"session_created": "session", "session_forked": "to"}
    return record.get(made.get(record["event"], "")) == session_id


def _check(path: Path, faults: list[str], torn: list[Path], named: list[tuple[Path, dict[str, Any]]]) -> list[str]:
    """Check one file by itself and return the hashes of its whole lines."""
    hashes: list[str] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                if line.startswith(_BEGINNING[: len(line)]):
                    torn.append(path)
                else:
                    faults.append(f"{path}:{number}: the end is no beginning of a record")
                break
            why, record = _read(line, number, hashes[-1] if hashes else None)
            if why:
                faults.append(f"{path}:{number}: {why}")
            elif number == 1 and record["follows"] is not None:
                named.append((path, record["follows"]))
            hashes.append(sha256(line))
    return hashes


def _read(line: bytes, number: int, previous: str | None) -> tuple[str, dict[str, Any]]:
    """Return what is wrong with a line ('' for nothing), and the line's values."""
    try:
        record = json.loads(line)
    except ValueError as error:
        return f"not JSON: {error}", {}
    if not isinstance(record, dict) or record.get("n") != number:
        return f"expected the record with n = {number}", {}
    if record.get("previous") != previous:
        return "the hash of the line before is not the one that this line names", {}
    if number == 1 and (record.get("event") != "audit_opened" or not isinstance(record.get("follows"), dict | None)):
        return "line 1 must be audit_opened with the file that it follows", {}
    return "", record


def _check_named(path: Path, follows: dict[str, Any], hashes: dict[str, list[str]]) -> list[str]:
    name, line = follows.get("file"), follows.get("line")
    there = hashes.get(str(name))
    if there is None:
        return [f"{path}:1: follows {name}, which is gone"]
    if not isinstance(line, int) or not 0 <= line <= len(there):
        return [f"{path}:1: follows line {line} of {name}, which has {len(there)} lines"]
    if line and there[line - 1] != follows.get("sha256"):
        return [f"{path}:1: line {line} of {name} is not the one that this file follows"]
    return []


def _as_found(path: Path) -> dict[str, Any]:
    """Return what a first line says about another file, as it is on disk now."""
    last, count, torn = None, 0, False
    with path.open("rb") as file:
        for line in file:
            torn = not line.endswith(b"\n")
            if not torn:
                last, count = sha256(line), count + 1
    return {"file": path.name, "line": count, "sha256": last, "torn": torn}


def _files(directory: Path) -> list[Path]:
    return sorted((path for path in directory.iterdir() if _NAME.match(path.name)), key=_number)


def _number(path: Path) -> int:
    return int(path.name.partition(".")[0])
