"""Backup and restore of a home's sessions as one tar, for a disk that dies or a device that is exchanged (SPEC 9).

    sessions/<id>/<epoch>.baseline.json, <epoch>.jsonl     of every session, the refused ones as they are
    audit/<n>.jsonl                                        the audit log, as it is
    backup.json                                            last: the format, and the SHA-256 of each file before it

A backup that broke off lacks its last member and is refused. It needs no lock and may be made while the daemon
serves: of a live log it takes the whole batches that are there. States of slots and models are not in it, they are
caches; nor is what `repair` kept under `refused/`. Files go through in pieces, so that neither way needs memory for
them.

A restore never merges two audit logs: each tells, in one chain, what was done in one home. The audit log of a backup
that this home does not hold already comes to stand whole in `<home>/audit/restored-<hash>/`.
"""

import hashlib
import json
import os
import re
import shutil
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol, cast

from loopd.errors import HomeError, SessionError, SessionExists, SessionIoError
from loopd.home import Home
from loopd.proto.ids import is_session_id
from loopd.session import files
from loopd.session.reader import settled_epoch, summaries

FORMAT = 1
_MANIFEST = "backup.json"
_SESSION_MEMBER = re.compile(r"sessions/([^/]+)/\d+(?:\.jsonl|\.baseline\.json)\Z")
_AUDIT_MEMBER = re.compile(r"audit/[1-9]\d{0,8}\.jsonl\Z")
_PIECE_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a backup: sessions by id, and those of them that were refused when it was made."""

    sessions: tuple[str, ...]
    refused: tuple[str, ...]


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class _Part(NamedTuple):
    """A file in a backup."""

    sha256: str
    size: int


class _Draft(NamedTuple):
    """What is made under a hidden name first: where it belongs in the end, and its members in the backup."""

    place: Path
    names: list[str]


def backup(home: Home, target: BinaryIO) -> Contents:
    """Write every session and the audit log of `home` to `target`; on return it is on disk.

    Raises:
        SessionIoError: a file cannot be read, or `target` does not take it.
    """
    sessions, refused = [], []
    with files.io("", Path(getattr(target, "name", "the backup")), "write"):
        with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
            packer = _Packer(archive)
            for summary in sorted(summaries(home), key=lambda it: it.id):
                good = _pack_session(packer, home, summary.id)
                if good is not None:
                    sessions.append(summary.id)
                    refused += [] if good else [summary.id]
            # The newest first: what a file says about an older one is then true of the older one's copy too.
            for path in sorted(_audit_files(home.audit), key=lambda it: int(it.stem), reverse=True):
                with files.io("", path, "read"), path.open("rb") as file:
                    packer.add(f"audit/{path.name}", file, os.fstat(file.fileno()).st_size)
            facts = {"format": FORMAT, "sha256": packer.hashes, "sessions": sessions, "refused": refused}
            manifest = json.dumps(facts, indent=1, sort_keys=True).encode()
            packer.add(_MANIFEST, BytesIO(manifest), len(manifest))
        target.flush()
        os.fsync(target.fileno())
    return Contents(tuple(sessions), tuple(refused))


def restore(home: Home, source: BinaryIO) -> Contents:
    """Put the sessions of a backup into `home`, each whole or not at all; the daemon must not run.

    Nothing is written unless the whole backup is good and no session of it is there with other contents. Sessions
    that are there already, byte for byte, are left alone, so that a restore that broke off is simply run again.

    Args:
        home: its owner calls.
        source: a file that can be read twice; the first time it is only checked.

    Raises:
        HomeError: the file is no whole backup of ours, or of a newer format.
        SessionExists: a session of the same id but other contents is there.
        SessionIoError: the disk does not take it.
    """
    contents, parts = _checked(source)
    drafts = _missing_sessions(home, parts) | _missing_audit(home, parts)
    for directory in drafts:
        shutil.rmtree(directory, ignore_errors=True)
        with files.io("", directory, "make"):
            directory.mkdir(mode=0o700)
    places = {name: directory / Path(name).name for directory, draft in drafts.items() for name in draft.names}
    _unpack(source, parts, places)
    for directory, draft in drafts.items():
        with files.io("", draft.place, "restore"):
            files.sync_directory(directory)
            directory.rename(draft.place)
            files.sync_directory(draft.place.parent)
    return contents


class _Packer:
    """Adds files to a tar in pieces and keeps their hashes."""

    def __init__(self, archive: tarfile.TarFile) -> None:
        self.hashes: dict[str, str] = {}
        self._archive = archive

    def add(self, name: str, file: BinaryIO, size: int) -> None:
        facts = tarfile.TarInfo(name)
        facts.size, facts.mode = size, 0o600
        reader = _HashingReader(file)
        self._archive.addfile(facts, cast("BinaryIO", reader))
        self.hashes[name] = reader.digest.hexdigest()


class _HashingReader:
    """What tarfile reads from: it hashes what goes by."""

    def __init__(self, file: _Readable) -> None:
        self.digest = hashlib.sha256()
        self._file = file

    def read(self, size: int, /) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _pack_session(packer: _Packer, home: Home, session_id: str) -> bool | None:
    """Add a session; return whether it is good, or None where it was deleted meanwhile."""
    directory = home.sessions / session_id
    with ExitStack() as stack:
        parts = []
        good = True
        try:
            for path, size, epoch_good in _parts(session_id, directory):
                file = stack.enter_context(path.open("rb"))
                parts.append((path.name, file, os.fstat(file.fileno()).st_size if size is None else size))
                good = good and epoch_good
        except (OSError, SessionError) as error:
            if not directory.exists():
                return None
            if isinstance(error, OSError):
                raise SessionIoError(session_id, directory, "read", error) from error
            raise
        for name, file, size in parts:
            packer.add(f"sessions/{session_id}/{name}", file, size)
    return good


def _parts(session_id: str, directory: Path) -> Iterator[tuple[Path, int | None, bool]]:
    """Yield the files of a session, how many bytes of each to take (None for all), and whether its epoch is good."""
    for epoch in files.epochs(session_id, directory):
        fault, _, good_bytes = settled_epoch(session_id, directory, epoch)
        baseline = files.baseline_path(directory, epoch)
        if baseline.exists():
            yield baseline, None, fault is None
        yield files.log_path(directory, epoch), None if fault else good_bytes, fault is None


def _audit_files(directory: Path) -> list[Path]:
    return [path for path in directory.glob("*.jsonl") if _AUDIT_MEMBER.match(f"audit/{path.name}")]


def _checked(source: BinaryIO) -> tuple[Contents, dict[str, _Part]]:
    """Read a whole backup and return what is in it.

    Raises:
        HomeError: it is no whole backup of ours: a name, a hash, the format or the end is wrong.
    """
    parts: dict[str, _Part] = {}
    facts = None
    try:
        with tarfile.open(fileobj=source, mode="r:") as archive:
            for member in archive:
                file = archive.extractfile(member)
                if member.name == _MANIFEST and file:
                    facts = json.loads(file.read())
                    continue
                if not file or not member.isreg() or not _is_ours(member.name):
                    raise HomeError(f"this is no backup of loopd: it holds {member.name!r}")
                parts[member.name] = _Part(_sha256(_pieces(file, member.size)), member.size)
    except (tarfile.TarError, ValueError) as error:
        raise HomeError(f"this is no backup of loopd: {error}") from error
    if facts is None:
        raise HomeError(
            "the backup is not whole: it broke off while it was made", hint="make it again: loopd backup FILE"
        )
    if facts.get("format") != FORMAT:
        raise HomeError(f"the backup is of format {facts.get('format')}, this release reads {FORMAT}")
    if wrong := sorted(name for name, _ in facts["sha256"].items() ^ {(n, part.sha256) for n, part in parts.items()}):
        raise HomeError(f"the backup is damaged: {wrong[0]} is not what was saved")
    return Contents(tuple(facts["sessions"]), tuple(facts["refused"])), parts


def _is_ours(name: str) -> bool:
    session = _SESSION_MEMBER.match(name)
    return is_session_id(session[1]) if session else bool(_AUDIT_MEMBER.match(name))


def _missing_sessions(home: Home, parts: dict[str, _Part]) -> dict[Path, _Draft]:
    """Return the sessions that are not there, by the directory to make each in.

    Raises:
        SessionExists: one is there with other contents.
    """
    sessions: dict[str, list[str]] = defaultdict(list)
    for name in parts:
        if match := _SESSION_MEMBER.match(name):
            sessions[match[1]].append(name)
    missing = {}
    for session_id, names in sessions.items():
        there = home.sessions / session_id
        if not os.path.lexists(there):
            missing[home.sessions / f".restore-{session_id}"] = _Draft(there, names)
        elif not _is_same(session_id, there, {Path(name).name: parts[name] for name in names}):
            raise SessionExists(
                session_id,
                f"{there} is there and is not what the backup holds; nothing was restored",
                hint=f"bxctl delete {session_id}, or restore into another home with --home DIR",
            )
    return missing


def _missing_audit(home: Home, parts: dict[str, _Part]) -> dict[Path, _Draft]:
    """Return the same for the audit log, unless this home holds it: as its own, or restored before."""
    names = [name for name in parts if _AUDIT_MEMBER.match(name)]
    key = hashlib.sha256("".join(sorted(parts[name].sha256 for name in names)).encode()).hexdigest()[:12]
    place = home.audit / f"restored-{key}"
    if place.exists() or all(_begins_with(home.path / name, parts[name]) for name in names):
        return {}
    return {home.audit / ".restore": _Draft(place, names)}


def _is_same(session_id: str, directory: Path, parts: dict[str, _Part]) -> bool:
    with files.io(session_id, directory, "read"):
        sizes = {path.name: path.stat().st_size for path in directory.iterdir()}
    return sizes == {name: part.size for name, part in parts.items()} and all(
        _begins_with(directory / name, part) for name, part in parts.items()
    )


def _begins_with(path: Path, part: _Part) -> bool:
    """Tell whether a file begins with the bytes of a part; it may have grown since."""
    with files.io("", path, "read"):
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            return _sha256(_pieces(file, part.size)) == part.sha256


def _unpack(source: BinaryIO, parts: dict[str, _Part], places: dict[str, Path]) -> None:
    """Write the members that are wanted; what was checked must still be what is read.

    Raises:
        HomeError: it is not.
    """
    source.seek(0)
    with tarfile.open(fileobj=source, mode="r:") as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name in places else None
            if file is None:
                continue
            reader = _HashingReader(file)
            files.write_new("", places[member.name], _pieces(reader, member.size))
            if reader.digest.hexdigest() != parts[member.name].sha256:
                raise HomeError(f"the backup changed while it was read: {member.name}")


def _sha256(pieces: Iterator[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _pieces(file: _Readable, size: int) -> Iterator[bytes]:
    while size > 0 and (piece := file.read(min(size, _PIECE_BYTES))):
        size -= len(piece)
        yield piece
