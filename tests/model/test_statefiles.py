"""The files of saved states: what is whole is kept, everything else is removed."""

from pathlib import Path

import pytest

from loopd.model.statefiles import Ledger, StateFiles
from loopd.model.states import State
from tests.model.test_states import left, state


@pytest.fixture
def files(tmp_path: Path) -> StateFiles:
    found = StateFiles(tmp_path / "slots")
    found.load()
    return found


def saved(files: StateFiles, item: State, *, synced: bool = True) -> State:
    item = item.model_copy(update={"boot": files.boot})
    files.prepare(item.name)
    (files.directory / f"{item.name}.bin").write_bytes(b"x" * item.size_bytes)
    files.add(item)
    if synced:
        files.sync(item.name)
    return files.states[item.name]


def again(files: StateFiles) -> StateFiles:
    found = StateFiles(files.directory)
    found.load()
    return found


def test_a_described_state_is_there_after_a_restart(files: StateFiles) -> None:
    kept = saved(files, state())
    assert kept.boot == ""
    assert again(files).states == {kept.name: kept}


def test_a_file_without_a_description_is_no_state_and_is_removed(files: StateFiles) -> None:
    files.prepare("s.a.0.1.5")
    orphan = files.directory / "s.a.0.1.5.bin"
    orphan.write_bytes(b"half")
    assert again(files).states == {}
    assert not orphan.exists()


@pytest.mark.parametrize("spoil", ["gone", "short", "torn-description", "renamed"])
def test_half_of_a_pair_is_removed(files: StateFiles, spoil: str) -> None:
    name = saved(files, state()).name
    described, file = files.directory / f"{name}.json", files.directory / f"{name}.bin"
    match spoil:
        case "gone":
            file.unlink()
        case "short":
            file.write_bytes(b"x")
        case "torn-description":
            described.write_bytes(described.read_bytes()[:-9])
        case _:
            described.rename(files.directory / "other.json")
    assert again(files).states == {}
    assert list(files.directory.iterdir()) == []


def test_what_was_not_synced_is_good_for_its_boot_only(files: StateFiles) -> None:
    kept = saved(files, state(), synced=False)
    assert again(files).states == {kept.name: kept}
    after = StateFiles(files.directory)
    after.boot = "another boot"
    after.load()
    assert after.states == {}


def test_a_name_that_is_written_again_is_not_described_meanwhile(files: StateFiles) -> None:
    name = saved(files, state()).name
    files.prepare(name)
    assert again(files).states == {}


def test_a_directory_that_somebody_removed_is_made_again(files: StateFiles) -> None:
    saved(files, state())
    for path in files.directory.iterdir():
        path.unlink()
    files.directory.rmdir()
    assert again(files).states == {}
    assert saved(files, state()).name in again(files).states


def test_a_session_s_state_can_become_the_baseline_s(files: StateFiles) -> None:
    kept = files.become_baseline(saved(files, state()))
    assert kept.kind == "baseline"
    assert again(files).states == {kept.name: kept}


def test_the_ledger_is_read_back_and_a_broken_one_is_begun_anew(files: StateFiles) -> None:
    ledger = Ledger(serial=7, day="2026-12-01", day_bytes=9, slots={0: left(), 3: left("b")})
    files.keep(ledger)
    assert StateFiles(files.directory).load() == ledger
    saved(files, state(serial=4))
    (files.directory / "ledger.json").write_bytes(b"{")
    assert StateFiles(files.directory).load() == Ledger(serial=4)
