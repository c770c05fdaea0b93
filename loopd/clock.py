"""The only place that imports time: wall-clock stamps for records, monotonic seconds for durations."""

import time
from datetime import UTC, datetime


def now() -> str:
    """Return the wall clock as RFC 3339 in UTC with microseconds, e.g. `2026-12-01T14:00:00.000123Z`.

    Stamps are for people. Nothing compares them: a clock that steps back changes no outcome (SPEC 2.1).
    """
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def stamp(seconds: float) -> str:
    """Return a file's time stamp (seconds since 1970) in the form of `now`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def monotonic_s() -> float:
    """Return seconds on a clock that never steps back; only differences mean anything."""
    return time.monotonic()


def uptime_s() -> float:
    """Return seconds since the device booted, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def local_time(zone: str | None = None) -> str:
    """Return the time with weekday and zone, for a person or a model to read.

    Args:
        zone: an IANA name such as `Europe/Zurich`; None for the device's own.

    Raises:
        ValueError: there is no such zone.
    """
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # noqa: PLC0415 - costs a start-up what few calls need

    try:
        moment = datetime.now(ZoneInfo(zone)) if zone else datetime.now().astimezone()
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise ValueError(f"no time zone named {zone!r}") from error
    return moment.strftime("%A %Y-%m-%d %H:%M:%S %Z (UTC%z)")
