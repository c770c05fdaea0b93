"""A disk that forgets: pure, but for the lock that makes a cut one instant.

A sector that was written lies in a volatile cache until the next flush, as in a real disk. A cut empties the cache;
of what was in it, it may keep some sectors at random, as a real disk does that was just writing them. A sector is
written whole or not at all; as in today's disks it has 4 KiB (ext4 does not mount again after a commit block of its
journal that was torn between smaller ones).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random

SECTOR_BYTES = 4096


class PowerIsOff(Exception):
    """The disk has no power: nothing is read, written or answered."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a cut did to the sectors that were not flushed."""

    unflushed: int
    kept: int


class ForgetfulDisk:
    """The disk; offsets and lengths are whole sectors.

    Args:
        read_base: what was on it at first: the bytes at (offset, length).
        size_bytes: how large it is.
        heeds_flushes: False makes a disk that says it has flushed and has not.

    Attributes:
        off: set while there is no power.
        cut: what the last cut did, None before the first.
    """

    def __init__(self, read_base: Callable[[int, int], bytes], size_bytes: int, *, heeds_flushes: bool = True) -> None:
        self.size_bytes = size_bytes
        self.off = threading.Event()
        self.cut: Cut | None = None
        self._read_base = read_base
        self._heeds_flushes = heeds_flushes
        self._durable: dict[int, bytes] = {}
        self._cache: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._armed: tuple[int, float, Random] | None = None

    def read(self, offset: int, length: int) -> bytes:
        """Return what was written last."""
        first, count = self._sectors(offset, length)
        with self._powered():
            data = bytearray(self._read_base(offset, length))
            for number in range(first, first + count):
                sector = self._cache.get(number) or self._durable.get(number)
                if sector is not None:
                    start = (number - first) * SECTOR_BYTES
                    data[start : start + SECTOR_BYTES] = sector
            return bytes(data)

    def write(self, offset: int, data: bytes) -> None:
        """Write into the cache."""
        first, count = self._sectors(offset, len(data))
        with self._powered():
            for index in range(count):
                self._cache[first + index] = data[index * SECTOR_BYTES : (index + 1) * SECTOR_BYTES]

    def flush(self) -> None:
        """Make everything written so far durable, unless this is the flush at which the power is cut.

        Raises:
            PowerIsOff: it was cut, now or before.
        """
        with self._powered():
            if self._armed is not None:
                left, keep, random = self._armed
                self._armed = (left - 1, keep, random)
                if left == 1:
                    self._lose(keep, random)
                    raise PowerIsOff
            if self._heeds_flushes:
                self._durable |= self._cache
                self._cache.clear()

    def cut_now(self, keep: float, random: Random) -> None:
        """Cut the power; each sector in the cache is kept with the probability `keep`."""
        with self._lock:
            if not self.off.is_set():
                self._lose(keep, random)

    def cut_at_flush(self, number: int, keep: float, random: Random) -> None:
        """Cut the power when the number-th flush from now is asked for, before it is done."""
        with self._lock:
            self._armed = (number, keep, random)

    def power_on(self) -> None:
        """Be there again, with what survived."""
        with self._lock:
            self.off.clear()

    def _lose(self, keep: float, random: Random) -> None:
        kept = {number: data for number, data in self._cache.items() if random.random() < keep}
        self.cut = Cut(len(self._cache), len(kept))
        self._durable |= kept
        self._cache.clear()
        self._armed = None
        self.off.set()

    @contextmanager
    def _powered(self) -> Iterator[None]:
        with self._lock:
            if self.off.is_set():
                raise PowerIsOff
            yield

    def _sectors(self, offset: int, length: int) -> tuple[int, int]:
        if offset % SECTOR_BYTES or length % SECTOR_BYTES or not 0 <= offset <= offset + length <= self.size_bytes:
            raise ValueError(f"{length} bytes at {offset} are no whole sectors of a disk of {self.size_bytes} bytes")
        return offset // SECTOR_BYTES, length // SECTOR_BYTES
