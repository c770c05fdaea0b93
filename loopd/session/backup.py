"""Backup and restore of a home's sessions as one tar, for a disk that dies or a device that is exchanged (SPEC 9).

    sessions/<id>/<epoch>.baseline.json, <epoch>.jsonl     of every session, the refused ones as they are
    backup.json                                            last: the format, and the SHA-256 of each file before it

A backup that broke off lacks its last member and is refused. It needs no lock and may be made while the daemon
serves: of a live log it takes the whole batches that are there. States of slots, models and the audit log are not in
it: the first two are caches, and the audit log tells what was done in this home, on this device.
"""

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from loopd.errors import HomeError, SessionExists, SessionIoError
from loopd.home import Home
from loopd.proto.ids import is_session_id
from loopd.session import files
from loopd.session.reader import settled_epoch, summaries

FORMAT = 1
_MANIFEST = "backup.json"
_MEMBER = re.compile(r"sessions/([^/]+)/(\d+(?:\.jsonl|\.baseline\.json))\Z")


@dataclass(frozen=True, slots=True)
class Contents:
    """What is in a backup: sessions by id, and those of them that were refused when it was made."""

    sessions: tuple[str, ...]
    refused: tuple[str, ...]


def backup(home: Home, target: BinaryIO) -> Contents:
    """Write every session of `home` to `target`; on return it is on disk.

    Raises:
        SessionIoError: a file cannot be read, or `target` does not take it.
    """
    hashes: dict[str, str] = {}
    sessions, refused = [], []
    with files.io("", Path(getattr(target, "name", "the backup")), "write"):
        with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for summary in sorted(summaries(home), key=lambda it: it.id):
                sessions.append(summary.id)
                good = True
                for path, size, epoch_good in _parts(home, summary.id):
                    good = good and epoch_good
                    _add(archive, hashes, f"sessions/{summary.id}/{path.name}", _head(summary.id, path, size))
                refused += [] if good else [summary.id]
            facts = {"format": FORMAT, "sha256": hashes, "sessions": sessions, "refused": refused}
            _add(archive, {}, _MANIFEST, json.dumps(facts, indent=1, sort_keys=True).encode())
        target.flush()
        os.fsync(target.fileno())
    return Contents(tuple(sessions), tuple(refused))


def restore(home: Home, source: BinaryIO) -> Contents:
    """Put the sessions of a backup into `home`, each whole or not at all; the daemon must not run.

    Nothing is written unless the whole backup is good and no session of it is there with other contents. Sessions
    that are there already, byte for byte, are left alone, so that a restore that broke off is simply run again.

    Raises:
        HomeError: the file is no whole backup of ours, or of a newer format.
        SessionExists: a session of the same id but other contents is there.
        SessionIoError: the disk does not take it.
    """
    contents, members = _read(source)
    missing = {}
    for session_id, parts in members.items():
        there = home.sessions / session_id
        if not os.path.lexists(there):
            missing[session_id] = parts
        elif _bytes_of(session_id, there) != parts:
            raise SessionExists(
                session_id,
                f"{there} is there and is not what the backup holds; nothing was restored",
                hint=f"bxctl delete {session_id}, or restore into another home with --home DIR",
            )
    for session_id, parts in missing.items():
        draft = home.sessions / f".restore-{session_id}"
        shutil.rmtree(draft, ignore_errors=True)
        with files.io(session_id, draft, "restore"):
            draft.mkdir(mode=0o700)
            for name, data in parts.items():
                files.write_new(session_id, draft / name, [data])
            files.sync_directory(draft)
            draft.rename(home.sessions / session_id)
            files.sync_directory(home.sessions)
    return contents


def _parts(home: Home, session_id: str) -> Iterator[tuple[Path, int | None, bool]]:
    """Yield the files of a session, how many bytes of each to take (None for all), and whether its epoch is good."""
    directory = home.sessions / session_id
    for epoch in files.epochs(session_id, directory):
        fault, _, good_bytes = settled_epoch(session_id, directory, epoch)
        baseline = files.baseline_path(directory, epoch)
        if baseline.exists():
            yield baseline, None, fault is None
        yield files.log_path(directory, epoch), None if fault else good_bytes, fault is None


def _head(session_id: str, path: Path, size: int | None) -> bytes:
    with files.io(session_id, path, "read"), path.open("rb") as file:
        return file.read() if size is None else file.read(size)


def _add(archive: tarfile.TarFile, hashes: dict[str, str], name: str, data: bytes) -> None:
    facts = tarfile.TarInfo(name)
    facts.size, facts.mode = len(data), 0o600
    archive.addfile(facts, io.BytesIO(data))
    hashes[name] = hashlib.sha256(data).hexdigest()


def _read(source: BinaryIO) -> tuple[Contents, dict[str, dict[str, bytes]]]:
    """Return what is in a backup; every name, hash and the end are checked.

    Raises:
        HomeError: it is no whole backup of ours.
    """
    members: dict[str, dict[str, bytes]] = {}
    hashes: dict[str, str] = {}
    facts = None
    try:
        with tarfile.open(fileobj=source, mode="r:") as archive:
            for member in archive:
                file = archive.extractfile(member)
                data = file.read() if file else b""
                if member.name == _MANIFEST:
                    facts = json.loads(data)
                    continue
                match = _MEMBER.match(member.name)
                if match is None or not member.isreg() or not is_session_id(match[1]):
                    raise HomeError(f"this is no backup of loopd: it holds {member.name!r}")
                members.setdefault(match[1], {})[match[2]] = data
                hashes[member.name] = hashlib.sha256(data).hexdigest()
    except (tarfile.TarError, ValueError) as error:
        raise HomeError(f"this is no backup of loopd: {error}") from error
    if facts is None:
        raise HomeError(
            "the backup is not whole: it broke off while it was made", hint="make it again: loopd backup FILE"
        )
    if facts.get("format") != FORMAT:
        raise HomeError(f"the backup is of format {facts.get('format')}, this release reads {FORMAT}")
    if facts["sha256"] != hashes:
        wrong = sorted(
            name for name in facts["sha256"].keys() | hashes if facts["sha256"].get(name) != hashes.get(name)
        )
        raise HomeError(f"the backup is damaged: {wrong[0]} is not what was saved")
    return Contents(tuple(facts["sessions"]), tuple(facts["refused"])), members


def _bytes_of(session_id: str, directory: Path) -> dict[str, bytes]:
    try:
        return {path.name: path.read_bytes() for path in directory.iterdir()}
    except OSError as error:
        raise SessionIoError(session_id, directory, "read", error) from error
