"""The power is cut at every kind of moment: nothing acknowledged is lost, and loopd serves again.

The release that is installed on the device runs in a virtual machine, on a disk that forgets what was not flushed.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from checks.device import ROOT, Device
from checks.report import Report
from power.bench import LONG_TEXT, Bench, Point
from power.machine import Machine, make_image
from power.model import GATE, ScriptedModel
from virtual.device import preflight
from virtual.errors import DeviceError

pytestmark = [pytest.mark.stage("serving"), pytest.mark.power_cut]

_TABLE = "power cuts"
_HELD = {"text": LONG_TEXT, "prefill_gate": GATE, "chunk_chars": 512}
_ENDLESS = {"text": LONG_TEXT, "gate": GATE}
_TOOL = {"text": "I look. ", "tool_calls": [{"name": "call_tool", "arguments": '{"name": "clock", "arguments": {}}'}]}
POINTS = (
    Point("idle", "turn_end", {"text": LONG_TEXT}, keep=0.5),
    Point("prefill", "prefill", _HELD),
    Point("prefill", "prefill", _HELD, keep=0.5),
    Point("decode", "delta", _ENDLESS),
    Point("decode", "delta", _ENDLESS, keep=0.5),
    Point("append", "prefill", _HELD, flush=1, keep=0.5),
    Point("append", "prefill", _HELD, flush=2, keep=0.5),
    Point("append", "record", {"text": LONG_TEXT}),
    Point("tool", "tool_started", _TOOL),
    Point("tool", "tool_started", _TOOL, flush=1, keep=0.5),
)
REAL_POINTS = (Point("decode", "delta", {}), Point("prefill", "prefill", {}, keep=0.5))


class Bay:
    """Where the machines of a run stand, one at a time, made of one image."""

    def __init__(self, root: Path, image: Path, folder: Path) -> None:
        self._root, self._image, self._folder = root, image, folder
        self._occupied = ExitStack()

    def bench(self, name: str, *, scripted: bool = True, heeds_flushes: bool = True) -> Bench:
        """End the machine before, and return a fresh one that serves."""
        self.clear()
        folder = self._folder / name
        machine = Machine(self._root, self._image, folder, heeds_flushes=heeds_flushes)
        self._occupied.callback(machine.close)
        model = ScriptedModel(folder) if scripted else None
        if model is not None:
            self._occupied.callback(model.kill)
        return Bench(machine, model)

    def clear(self) -> None:
        """End the machine that stands here."""
        self._occupied.close()


@pytest.fixture(scope="module")
def bay(device: Device) -> Iterator[Bay]:
    """The image of a disk with the device's release, and a place for machines."""
    folder = ROOT / "build" / "power-cut" / device.name
    shutil.rmtree(folder, ignore_errors=True)
    try:
        preflight("qemu")
        root, image = make_image(device, folder)
    except DeviceError as error:
        pytest.fail(f"{error.message}{error.hint and f' ({error.hint})'}", pytrace=False)
    made = Bay(root, image, folder)
    yield made
    made.clear()
    image.unlink()


@pytest.fixture(scope="module")
def scripted(bay: Bay) -> Bench:
    """A machine with the scripted model."""
    return bay.bench("scripted")


@pytest.fixture(scope="module")
def real(bay: Bay) -> Bench:
    """A machine with the real model in it."""
    return bay.bench("real", scripted=False)


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_power_cut_loses_nothing_acknowledged(scripted: Bench, report: Report, point: Point) -> None:
    """After a power cut every acknowledged record is there, each log opens or is refused by line, and loopd serves.

    Seen failing: a loopd whose `fdatasync` does nothing.
    """
    report.tables.setdefault(_TABLE, []).append(scripted.cut(point))


def test_disk_that_ignores_flushes_is_found_out(bay: Bay) -> None:
    """The check itself can fail: on a disk that says it has flushed and has not, acknowledged records are lost."""
    bench = bay.bench("negative", heeds_flushes=False)
    with pytest.raises(AssertionError, match="acknowledged records are lost"):
        bench.cut(Point("idle", "turn_end", {"text": LONG_TEXT}))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", REAL_POINTS, ids=str)
def test_power_cut_loses_nothing_of_the_real_model(real: Bench, report: Report, point: Point) -> None:
    """With the real model on the machine, a power cut loses nothing acknowledged either."""
    report.tables.setdefault(_TABLE, []).append(real.cut(point))
