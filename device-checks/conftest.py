"""Fixtures and hooks of the device checks: options, the leased device, stages, the report."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from checks.device import Device, DeviceLeased
from checks.instance import Instance, Second
from checks.report import Outcome, Report
from checks.stages import STAGES, Latch
from rich.console import Console

_JOURNAL_LINES = 100
_LATCH = pytest.StashKey[Latch]()
_REPORT = pytest.StashKey[Report]()
_DEVICE = pytest.StashKey[Device]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make verify-device`."""
    group = parser.getgroup("device")
    group.addoption("--device", help="a host that ssh knows, or the name of a virtual device")
    group.addoption("--destructive", action="store_true", help="reboot the device too")
    group.addoption("--power-cut", action="store_true", help="cut the power of a machine with the device's release")
    group.addoption("--results", type=Path, default=Path("build/device-checks"), help="where the reports go")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run without a device: it must never pass by skipping."""
    if config.option.help or config.option.collectonly:
        return
    if not config.option.device:
        raise pytest.UsageError("no device given: --device=HOST (make verify-device DEVICE=…)")
    config.stash[_LATCH] = Latch()
    config.stash[_REPORT] = Report(config.option.device)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the checks by stage, and leave out what was not asked for."""
    items.sort(key=lambda item: STAGES.index(_stage(item)))
    unasked = {name for name in ("destructive", "power_cut") if not config.getoption(name)}
    kept = [item for item in items if not any(item.get_closest_marker(name) for name in unasked)]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail at once where an earlier stage has failed, and name the cause."""
    cause = item.config.stash[_LATCH].cause(_stage(item))
    if cause:
        pytest.fail(f"not tried, because of {cause}", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect outcomes; a failure latches its stage and brings the end of the journal."""
    made = yield
    report = item.config.stash[_REPORT]
    if made.failed:
        item.config.stash[_LATCH].fail(_stage(item), item.name)
        if made.when == "call" and _DEVICE in item.config.stash:
            made.sections.append((f"last {_JOURNAL_LINES} lines of the journal", _journal(item.config.stash[_DEVICE])))
    if made.when == "call" or made.outcome != "passed":
        result = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}[made.outcome]
        if made.failed and item.config.stash[_LATCH].cause(_stage(item)):
            result = "not tried"
        claim = (item.function.__doc__ or item.name).strip().splitlines()[0]  # type: ignore[attr-defined]  # a function's item
        why = made.longreprtext if made.failed else ""
        report.outcomes.append(Outcome(item.name, claim, result, made.duration, why))
    return made


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the reports and give the device back."""
    stash = session.config.stash
    if _REPORT in stash:
        stash[_REPORT].write(session.config.option.results / session.config.option.device)
    if _DEVICE in stash:
        stash[_DEVICE].release()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table behind pytest's own lines."""
    if _REPORT in config.stash:
        report = config.stash[_REPORT]
        terminalreporter.ensure_newline()
        report.show(Console(width=140))
        terminalreporter.write_line(f"reports: {config.option.results / report.device}")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Device:
    """The leased device; its facts are in the report."""
    found = Device(request.config.option.device)
    try:
        found.lease()
    except DeviceLeased as error:
        pytest.exit(str(error), returncode=1)
    request.config.stash[_DEVICE] = found
    return found


@pytest.fixture(scope="session")
def installed(device: Device) -> Iterator[Instance]:
    """The installed loopd; the sessions made in it are deleted at the end."""
    instance = Instance(device)
    yield instance
    instance.forget()


@pytest.fixture
def second(device: Device) -> Iterator[Second]:
    """A second loopd, which the check installs as it needs it; it is removed at the end."""
    instance = Second(device)
    yield instance
    instance.remove()


@pytest.fixture(scope="session")
def report(request: pytest.FixtureRequest) -> Report:
    """Where figures and token tables go."""
    return request.config.stash[_REPORT]


def _stage(item: pytest.Item) -> str:
    marker = item.get_closest_marker("stage")
    return str(marker.args[0]) if marker else STAGES[-1]


def _journal(device: Device) -> str:
    units = "-u loopd.service -u loopd-model.service -u loopd-tools.service -u 'loopd-check*.service'"
    try:
        return device.out(f"journalctl --no-pager -q -n {_JOURNAL_LINES} {units}")
    except Exception as error:  # noqa: BLE001 - the failure itself must still be shown
        return f"(not to be had: {error})"
