"""The device reboots; only when asked for."""

import time

import pytest
from checks.device import Device
from checks.instance import Instance
from checks.report import Report
from test_4_conversation import TEXTS, prove_losses_explained

pytestmark = [pytest.mark.stage("serving"), pytest.mark.destructive]


def test_everything_comes_back_after_a_reboot(installed: Instance, device: Device, report: Report) -> None:
    """After a reboot everything serves by itself, and the conversation goes on without a loss, from its saved state.

    Seen failing: loopd.service disabled; loopd-tools.service disabled.
    """
    session = installed.session()
    for number, text in enumerate(TEXTS[:2], start=1):
        installed.say(session, text, f"{session}-{number}")
    began = time.monotonic()
    device.reboot()
    installed.wait()
    device.wait("systemctl is-active loopd-tools.service", why="the unit of tools after the reboot")
    report.figures["reboot to serving"] = round(time.monotonic() - began, 1)
    for number, text in enumerate(TEXTS[2:], start=3):
        installed.say(session, text, f"{session}-{number}")
    rows = installed.usage(session)
    assert len(rows) == len(TEXTS)
    prove_losses_explained(report, "a reboot after the second turn", rows)
    stopped = device.out("journalctl -q -b -1 -o short-monotonic --no-pager | grep -E 'Stopped loopd'")
    for unit in ("loopd-tools.service", "loopd-model.service"):
        assert stopped.rindex("Stopped loopd.service") < stopped.rindex(f"Stopped {unit}")
