import json
import re
from pathlib import Path

import pytest

from loopd.config import ToolsTable
from loopd.tools.builtin import Builtin, device_facts
from loopd.tools.port import Outcome
from loopd.tools.registry import Registry
from tests.tools.fake import planned
from tests.tools.test_services import with_systemd


def made(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return directory


async def called(tmp_path: Path, name: str, arguments: object) -> Outcome:
    tools = Registry(planned(Builtin(("clock", "device"), disk=tmp_path)), ToolsTable())
    try:
        return await tools.run(tools.prepare(name, json.dumps(arguments)), timeout_s=30, max_bytes=4096)
    finally:
        tools.close()


@pytest.mark.parametrize(("arguments", "offset"), [({"zone": "Asia/Tokyo"}, r"\+0900"), ({}, r"[+-]\d{4}")])
async def test_the_clock_tells_weekday_date_time_and_zone(
    tmp_path: Path, arguments: dict[str, str], offset: str
) -> None:
    outcome = await called(tmp_path, "clock", arguments)
    assert outcome.ok
    assert re.fullmatch(rf"\w+day \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d \S+ \(UTC{offset}\)", outcome.content)


@pytest.mark.parametrize("zone", ["Nowhere/Land", "../../etc/passwd", "\0"])
async def test_an_unknown_zone_is_a_result_that_tells_what_a_zone_is(tmp_path: Path, zone: str) -> None:
    outcome = await called(tmp_path, "clock", {"zone": zone})
    assert not outcome.ok
    assert "zones are IANA names such as Europe/Zurich" in outcome.content


async def test_the_device_tells_what_this_machine_has(tmp_path: Path) -> None:
    outcome = await called(tmp_path, "device", {})
    labels = [line.split(":")[0] for line in outcome.content.splitlines()]
    assert [label for label in labels if label not in {"temperature", "services"}] == [
        *("load", "memory", "disk", "uptime")
    ]


def test_the_device_facts_are_read_from_proc_and_sys(tmp_path: Path) -> None:
    root = made(
        tmp_path,
        proc__loadavg="0.10 0.20 0.30 1/200 4242\n",
        proc__meminfo="MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 2000000 kB\n",
        sys__class__thermal__thermal_zone0__temp="45500\n",
        sys__class__thermal__thermal_zone0__type="cpu-thermal\n",
        sys__class__hwmon__hwmon3__temp1_input="38000\n",
        sys__class__hwmon__hwmon3__name="nvme\n",
        sys__class__thermal__thermal_zone1__temp="switched off\n",
        sys__class__thermal__thermal_zone1__type="gpu-thermal\n",
    )
    lines = device_facts(root, root).splitlines()
    assert lines[0].startswith("load: 0.10 (1 min), 0.20 (5 min), 0.30 (15 min) on ")
    assert lines[1] == "memory: 2.0 GB available of 8.2 GB"
    assert re.fullmatch(r"disk: \d+\.\d GB free of \d+\.\d GB", lines[2])
    assert lines[3] == "temperature: cpu-thermal 45.5 °C, nvme 38.0 °C"
    assert re.fullmatch(r"uptime: \d+ days \d+ hours \d+ minutes", lines[4])


def test_a_fact_that_the_device_does_not_tell_is_left_out(tmp_path: Path) -> None:
    root = made(tmp_path, proc__meminfo="garbage\n")
    assert [line.split(":")[0] for line in device_facts(root, root).splitlines()] == ["disk", "uptime"]


def test_only_the_enabled_tools_are_listed(tmp_path: Path) -> None:
    assert [tool.name for tool in Builtin(("device",), disk=tmp_path).tools()] == ["device"]


@pytest.mark.parametrize(
    ("arguments", "labels"),
    [
        ({"fact": "memory"}, ["memory"]),
        ({"fact": "services"}, ["services"]),
        ({"service": "ssh"}, ["service ssh"]),
        ({"fact": "load", "service": "ssh"}, ["load", "service ssh"]),
    ],
)
async def test_one_fact_may_be_asked_for(tmp_path: Path, arguments: dict[str, str], labels: list[str]) -> None:
    root = with_systemd(tmp_path, "echo ActiveState=active")
    made(root, proc__loadavg="0.10 0.20 0.30 1/2 3\n", proc__meminfo="MemTotal: 8 kB\nMemAvailable: 2 kB\n")
    tools = Registry(planned(Builtin(("device",), disk=tmp_path, root=root)), ToolsTable())
    outcome = await tools.run(tools.prepare("device", json.dumps(arguments)), timeout_s=30, max_bytes=4096)
    tools.close()
    assert [line.partition(":")[0] for line in outcome.content.splitlines()] == labels


async def test_a_fact_that_this_device_does_not_tell_is_said_when_asked_for(tmp_path: Path) -> None:
    assert device_facts(tmp_path, tmp_path, "temperature") == "This device does not tell its temperature."


@pytest.mark.parametrize("arguments", [{"fact": "weather"}, {"service": "-x"}, {"service": "a b"}, {"service": "a\0"}])
async def test_an_unknown_fact_and_what_is_no_service_name_are_refused(tmp_path: Path, arguments: object) -> None:
    outcome = await called(tmp_path, "device", arguments)
    assert not outcome.ok
    assert "do not fit its schema" in outcome.content
