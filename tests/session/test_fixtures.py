"""A session of every release is replayed byte for byte, for ever: by any process, in any locale (SPEC 2.3).

Each directory `tests/fixtures/session-<n>/` holds one: its two files as the release wrote them, and the
serialisation of the request that asks `One more` after them.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loopd.home import Home
from loopd.proto.records import Usage, decode_record, encode_record
from loopd.session import reader
from loopd.session.baseline import Baseline
from loopd.session.replay import Replay, replay, serialisation
from loopd.session.store import Session, dir_for
from tests.session.builders import LIMITS

FIXTURES = sorted(path for path in (Path(__file__).parents[1] / "fixtures").glob("session-*"))
SCRIPT = """
import sys
from pathlib import Path
from loopd.proto.records import decode_record
from loopd.session.baseline import Baseline
from loopd.session.replay import Replay, serialisation
directory = Path(sys.argv[1])
state = Replay(Baseline.decode((directory / "0.baseline.json").read_bytes()))
for line in (directory / "0.jsonl").read_bytes().splitlines(keepends=True):
    state.add(decode_record(line))
sys.stdout.buffer.write(serialisation(state.request("One more").messages))
"""


def lines_of(directory: Path) -> list[bytes]:
    return (directory / "0.jsonl").read_bytes().splitlines(keepends=True)


def test_there_is_a_fixture() -> None:
    assert FIXTURES


@pytest.mark.parametrize("directory", FIXTURES, ids=lambda path: path.name)
def test_a_session_of_a_release_is_replayed_byte_for_byte(directory: Path) -> None:
    baseline = Baseline.decode((directory / "0.baseline.json").read_bytes())
    records = [decode_record(line) for line in lines_of(directory)]
    expected = (directory / "replay.jsonl").read_bytes()
    messages = replay(baseline, records)
    assert serialisation(messages) == expected[: expected.rindex(b"\n", 0, -1) + 1]
    state = Replay(baseline)
    for record in records:
        state.add(record)
        assert state.violation == ""
    assert serialisation(state.request("One more").messages) == expected


@pytest.mark.parametrize("directory", FIXTURES, ids=lambda path: path.name)
def test_a_session_of_a_release_is_written_again_byte_for_byte(directory: Path) -> None:
    for line in lines_of(directory):
        assert encode_record(decode_record(line)) == line
    encoded = (directory / "0.baseline.json").read_bytes()
    assert Baseline.decode(encoded).encoded() == encoded


@pytest.mark.parametrize("directory", FIXTURES, ids=lambda path: path.name)
def test_a_session_of_a_release_opens_and_goes_on(directory: Path, home: Home) -> None:
    shutil.copytree(directory, dir_for(home, "old"), ignore=shutil.ignore_patterns("replay.jsonl"))
    assert reader.verify(home, "old").faults == ()
    session = Session.open(home, "old", limits=LIMITS)
    usages = [record for _, record in session.records() if isinstance(record, Usage)]
    assert session.lines == len(lines_of(directory))
    assert session.last_usage == [usage for usage in usages if usage.prompt_tokens is not None][-1]
    assert serialisation(session.request("One more").messages) == (directory / "replay.jsonl").read_bytes()
    session.close()


@pytest.mark.parametrize(
    "settings",
    [
        {"PYTHONHASHSEED": "0", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "4242", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "1"},
        {"PYTHONHASHSEED": "random", "LC_ALL": "tr_TR.UTF-8", "TZ": "Pacific/Kiritimati", "PYTHONUTF8": "0"},
    ],
    ids=lambda settings: settings["LC_ALL"],
)
@pytest.mark.parametrize("directory", FIXTURES, ids=lambda path: path.name)
def test_replay_is_the_same_in_every_process_and_locale(
    directory: Path, settings: dict[str, str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | settings,
        cwd=tmp_path,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == (directory / "replay.jsonl").read_bytes()
