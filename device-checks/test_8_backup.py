"""Conversations saved to one file come back, and go on."""

import pytest
from checks.device import Device
from checks.instance import Second

pytestmark = pytest.mark.stage("serving")


def test_saved_conversations_come_back_and_go_on(second: Second, device: Device) -> None:
    """A backup made while loopd serves brings a deleted session back, record for record, and it goes on.

    Seen failing: the file emptied before the restore.
    """
    second.install(script={})
    session, file = second.session(), "/run/loopd-checks/saved.tar"
    second.say(session, "Hello.", f"{session}-1")
    before = second.json("show %s", session)["records"]
    assert second.loopd("backup %s", file)[0] == 0
    second.bxctl("delete --yes %s", session)
    assert second.loopd("restore %s", file)[0] != 0, "a restore beside a running daemon was not refused"
    device.out(f"systemctl stop {second.unit}", timeout_s=120)
    assert second.loopd("restore %s", file) == (0, "restored: 1 sessions\n", "")
    device.out(f"systemctl start {second.unit}", timeout_s=120)
    second.wait()
    assert second.json("show %s", session)["records"] == before
    assert second.say(session, "Go on.", f"{session}-2")[-1]["reason"] == "completed"
