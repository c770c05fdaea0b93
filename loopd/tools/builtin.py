"""The built-in port: the clock, and facts about the device (SPEC 6). Both only read."""

import asyncio
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from loopd import clock
from loopd.errors import ToolError
from loopd.tools.port import Outcome, PortState, Tool
from loopd.tools.services import failed_services, service_state

FACTS = ("load", "memory", "disk", "temperature", "uptime", "services")
_CLOCK = Tool(
    name="clock",
    description="Tell what time it is now: current date, time, weekday and time zone, here or in another zone.",
    schema={
        "type": "object",
        "properties": {
            "zone": {"type": "string", "description": "IANA name, e.g. Europe/Zurich; default: the device's"}
        },
        "additionalProperties": False,
    },
    example={"zone": "Europe/Zurich"},
)
_DEVICE = Tool(
    name="device",
    description=(
        "Read this device's state: processor (CPU) load, free memory (RAM), free disk space, temperature of its "
        "sensors, uptime since boot, and services. Tells which systemd services have failed and whether one is running."
    ),
    schema={
        "type": "object",
        "properties": {
            "fact": {"enum": list(FACTS), "description": "only this one; default: all"},
            "service": {
                "type": "string",
                "pattern": r"^[A-Za-z0-9@_][A-Za-z0-9@:._\\-]{0,199}$",
                "description": "only the state of this service, e.g. ssh",
            },
        },
        "additionalProperties": False,
    },
)


class Builtin:
    """The port `builtin`.

    Args:
        enabled: names of the tools to offer (`[tools] builtin`).
        disk: the directory whose disk is reported.
        root: where `/proc` and `/sys` are found.
    """

    name = "builtin"
    state: PortState = "up"
    reason = ""

    def __init__(self, enabled: Collection[str], *, disk: Path, root: Path = Path("/")) -> None:
        self._tools = tuple(tool for tool in (_CLOCK, _DEVICE) if tool.name in enabled)
        self._disk, self._root = disk, root

    def tools(self) -> tuple[Tool, ...]:
        """Return the enabled tools."""
        return self._tools

    async def run(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Run one of the tools; files under `/sys` and `systemctl` may be slow, so they are asked in a thread."""
        if name == _CLOCK.name:
            return Outcome(ok=True, content=_time(arguments.get("zone")))
        wanted = (arguments.get("fact"), arguments.get("service"))
        content = await asyncio.to_thread(device_facts, self._root, self._disk, *wanted)
        return Outcome(ok=True, content=content)

    async def keep(self) -> None:
        """There is nothing to keep."""


def _time(zone: str | None) -> str:
    try:
        return clock.local_time(zone or None)
    except ValueError as error:
        raise ToolError(f"{error}; zones are IANA names such as Europe/Zurich or UTC") from error


def device_facts(root: Path, disk: Path, fact: str | None = None, service: str | None = None) -> str:
    """Return one line for each fact that the device tells; what it does not tell is left out.

    Args:
        root: where `proc`, `sys` and `run` are.
        disk: a directory on the disk that is reported.
        fact: only this one of `FACTS`; None for all, or none where a service is asked for.
        service: a unit of systemd whose state is told.
    """
    told: dict[str, Callable[[], str]] = {
        "load": lambda: _load(root),
        "memory": lambda: _memory(root),
        "disk": lambda: _disk_space(disk),
        "temperature": lambda: _temperatures(root),
        "uptime": lambda: _duration(clock.uptime_s()),
        "services": lambda: failed_services(root),
    }
    wanted = [fact] if fact else [] if service else list(FACTS)
    lines = [_told(name, told[name]) for name in wanted]
    if service:
        lines.append(f"service {service}: {service_state(root, service)}")
    return "\n".join(line for line in lines if line) or f"This device does not tell its {fact}."


def _told(label: str, fact: Callable[[], str]) -> str:
    try:
        text = fact()
    except (OSError, LookupError, ValueError):
        return ""
    return f"{label}: {text}" if text else ""


def _load(root: Path) -> str:
    one, five, fifteen = (root / "proc/loadavg").read_text(encoding="ascii").split()[:3]
    return f"{one} (1 min), {five} (5 min), {fifteen} (15 min) on {os.cpu_count() or 1} processors"


def _memory(root: Path) -> str:
    pairs = (line.split() for line in (root / "proc/meminfo").read_text(encoding="ascii").splitlines())
    kibibytes = {pair[0].rstrip(":"): int(pair[1]) for pair in pairs}
    free, whole = kibibytes["MemAvailable"] * 1024, kibibytes["MemTotal"] * 1024
    return f"{_size(free)} available of {_size(whole)}"


def _disk_space(directory: Path) -> str:
    space = shutil.disk_usage(directory)
    return f"{_size(space.free)} free of {_size(space.total)}"


def _temperatures(root: Path) -> str:
    """Return every sensor that answers; a thermal zone that is switched off refuses to be read."""
    zones = ((path.parent / "type", path) for path in sorted(root.glob("sys/class/thermal/thermal_zone*/temp")))
    chips = ((path.parent / "name", path) for path in sorted(root.glob("sys/class/hwmon/hwmon*/temp*_input")))
    found: list[str] = []
    for label, value in (*zones, *chips):
        try:
            degrees = int(value.read_text(encoding="ascii")) / 1000
            found.append(f"{label.read_text(encoding='utf-8').strip()} {degrees:.1f} °C")
        except (OSError, ValueError):
            continue
    return ", ".join(dict.fromkeys(found))


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _duration(seconds: float) -> str:
    minutes = int(seconds // 60)
    return f"{minutes // 1440} days {minutes // 60 % 24} hours {minutes % 60} minutes"
