from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from power.disk import SECTOR_BYTES, Cut, ForgetfulDisk, PowerIsOff

SECTORS = 16
SIZE = SECTORS * SECTOR_BYTES


def made(**options: bool) -> ForgetfulDisk:
    return ForgetfulDisk(lambda _offset, length: bytes(length), SIZE, **options)


def sector(fill: int) -> bytes:
    return bytes([fill]) * SECTOR_BYTES


def after_cut(disk: ForgetfulDisk, keep: float = 0.0) -> bytes:
    disk.cut_now(keep, Random(1))
    disk.power_on()
    return disk.read(0, SIZE)


def test_what_was_written_is_read_before_it_is_flushed() -> None:
    disk = made()
    disk.write(SECTOR_BYTES, sector(1) + sector(2))
    assert disk.read(0, 4 * SECTOR_BYTES) == sector(0) + sector(1) + sector(2) + sector(0)


def test_cut_forgets_what_was_not_flushed_and_keeps_what_was() -> None:
    disk = made()
    disk.write(0, sector(1) + sector(1))
    disk.flush()
    disk.write(SECTOR_BYTES, sector(2) + sector(2))
    assert after_cut(disk)[: 3 * SECTOR_BYTES] == sector(1) + sector(1) + sector(0)
    assert disk.cut == Cut(unflushed=2, kept=0)


def test_cut_may_keep_a_part_of_the_unflushed_sectors_each_whole() -> None:
    disk = made()
    disk.write(0, sector(1) * SECTORS)
    data = after_cut(disk, keep=0.5)
    sectors = [data[start : start + SECTOR_BYTES] for start in range(0, SIZE, SECTOR_BYTES)]
    assert set(sectors) == {sector(0), sector(1)}
    assert disk.cut == Cut(unflushed=SECTORS, kept=sectors.count(sector(1)))


def test_disk_that_ignores_flushes_forgets_everything() -> None:
    disk = made(heeds_flushes=False)
    disk.write(0, sector(1))
    disk.flush()
    assert disk.read(0, SECTOR_BYTES) == sector(1)
    assert after_cut(disk) == bytes(SIZE)


def test_power_is_cut_at_the_flush_asked_for_before_it_is_done() -> None:
    disk = made()
    disk.cut_at_flush(2, 0.0, Random(1))
    disk.write(0, sector(1))
    disk.flush()
    disk.write(0, sector(2))
    with pytest.raises(PowerIsOff):
        disk.flush()
    assert disk.off.is_set()
    disk.power_on()
    disk.flush()
    assert disk.read(0, SECTOR_BYTES) == sector(1)


@pytest.mark.parametrize(
    "use", [lambda disk: disk.read(0, 0), lambda disk: disk.write(0, b""), lambda disk: disk.flush()]
)
def test_nothing_is_done_without_power(use: Callable[[ForgetfulDisk], object]) -> None:
    disk = made()
    disk.cut_now(0.0, Random(1))
    with pytest.raises(PowerIsOff):
        use(disk)


@pytest.mark.parametrize(("offset", "length"), [(1, SECTOR_BYTES), (0, 1), (SIZE, SECTOR_BYTES), (-SECTOR_BYTES, 0)])
def test_what_is_no_whole_sector_of_the_disk_is_refused(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="no whole sectors"):
        made().read(offset, length)


@given(st.lists(st.tuples(st.integers(0, SECTORS - 1), st.integers(1, 255), st.booleans())), st.floats(0, 1))
def test_each_sector_is_after_a_cut_what_was_flushed_or_what_was_written_last(
    writes: list[tuple[int, int, bool]], keep: float
) -> None:
    disk = made()
    flushed, written = {}, {}
    for number, fill, flush in writes:
        disk.write(number * SECTOR_BYTES, sector(fill))
        written[number] = fill
        if flush:
            disk.flush()
            flushed = dict(written)
    data = after_cut(disk, keep)
    for number in range(SECTORS):
        found = data[number * SECTOR_BYTES : (number + 1) * SECTOR_BYTES]
        assert found in {sector(flushed.get(number, 0)), sector(written.get(number, 0))}
