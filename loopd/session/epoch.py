"""One epoch of a session: opened from its log, or made whole beside the one before (SPEC 2.1, 2.2).

A new epoch's baseline is written first and its log under another name, which it gives up for its own when it is
whole: a crash at any point leaves no new epoch or a whole one. What is left over then is removed by `settle`.
"""

import contextlib
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loopd.proto.records import Record, SessionStart, decode_record
from loopd.session import files
from loopd.session.baseline import Baseline
from loopd.session.log import Log
from loopd.session.replay import Replay


@dataclass(slots=True)
class Epoch:
    """An epoch as it is open.

    Attributes:
        path: its log.
        file: the log's descriptor; whoever opened the epoch closes it.
        log: what the records add up to.
        offsets: where each record begins, and the log's end.
        start: line 1.
        baseline: what every request holds.
        replay: the messages of the next request.
    """

    path: Path
    file: int
    log: Log
    offsets: "array[int]"
    start: SessionStart
    baseline: Baseline
    replay: Replay

    @classmethod
    def open(cls, session_id: str, directory: Path, number: int) -> "Epoch":
        """Read an epoch, after what is going to be read was synced.

        Raises:
            TornLog: the first line that is not what was written.
            BaselineError: the baseline is not the log's.
            SessionIoError: the disk or the rights do not allow it.
        """
        path, log = files.log_path(directory, number), Log(number)
        offsets = array("Q", [0])
        with files.io(session_id, path, "open"):
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with files.io(session_id, path, "sync"):
                os.fdatasync(file)
                files.sync_directory(directory)
                files.sync_directory(directory.parent)
            for entry in files.scan(session_id, path, log):
                if isinstance(entry.record, SessionStart):
                    start = entry.record
                    baseline = files.read_baseline(session_id, directory, start)
                    replay = Replay(baseline)
                replay.add(entry.record)
                offsets.append(entry.offset + entry.length)
            return cls(path, file, log, offsets, start, baseline, replay)
        except BaseException:
            os.close(file)
            raise

    def records(self, session_id: str, start: int, stop: int | None) -> Iterator[tuple[int, Record]]:
        """Read the records of lines `start` up to, not including, `stop` back from disk, each with its line.

        Raises:
            SessionIoError: the disk could not be read, or the log is closed.
        """
        last = len(self.offsets)
        for line in range(start, min(stop or last, last)):
            begin, end = self.offsets[line - 1], self.offsets[line]
            with files.io(session_id, self.path, "read"):
                data = os.pread(self.file, end - begin, begin)
            yield line, decode_record(data)


def make(session_id: str, directory: Path, number: int, baseline: bytes, log: bytes) -> None:
    """Make an epoch in a session's directory. What is durable on return is all of it but the log's own name.

    Raises:
        SessionIoError: the disk does not take it; nothing is left behind.
    """
    target, draft = files.log_path(directory, number), files.draft_path(directory, number)
    frozen = files.baseline_path(directory, number)
    try:
        files.write_new(session_id, frozen, [baseline])
        files.write_new(session_id, draft, [log])
        with files.io(session_id, directory, "sync"):
            files.sync_directory(directory)
        with files.io(session_id, draft, "rename"):
            draft.rename(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
            frozen.unlink(missing_ok=True)
        raise


def settle(session_id: str, directory: Path, numbers: Sequence[int]) -> None:
    """Remove what a crash left of an epoch that never began.

    Args:
        session_id: for the errors.
        directory: of the session, whose lock is held.
        numbers: the epochs that exist.

    Raises:
        SessionIoError: it cannot be removed.
    """
    kept = {files.baseline_path(directory, number) for number in numbers}
    with files.io(session_id, directory, "clean up"):
        for orphan in {*directory.glob("*.baseline.json"), *directory.glob(".*.jsonl")} - kept:
            orphan.unlink()
