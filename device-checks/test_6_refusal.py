"""What is broken is refused by name, and everything else goes on."""

import pytest
from checks.device import Device
from checks.instance import Second

pytestmark = pytest.mark.stage("serving")


def test_torn_log_is_refused_with_file_and_line(second: Second, device: Device) -> None:
    """A log cut in mid-line is refused with its file and line; the daemon serves the rest; verify and fork work.

    Seen failing: the log left whole.
    """
    second.install(script={})
    torn, whole = second.session(), second.session()
    for session in (torn, whole):
        second.say(session, "Hello.", f"{session}-1")
    second.say(torn, "And again.", f"{torn}-2")
    log = f"{second.home}/sessions/{torn}/0.jsonl"
    device.out(f"systemctl stop {second.unit}", timeout_s=120)
    lines = int(device.out("wc -l <%s", log))
    device.out("truncate -s -20 %s", log)
    device.out(f"systemctl start {second.unit}", timeout_s=120)
    second.wait()
    place = f"{log}:{lines}:"
    assert place in second.bxctl("chat --session %s --message Hello", torn, ok=False)
    assert [row["session"] for row in second.json("status")["refused"]] == [torn]
    status, _, errors = second.loopd("session verify")
    assert status == 4
    assert place in errors
    second.say(whole, "Still there?", f"{whole}-2")
    fork = second.bxctl("fork %s --upto 4", torn).strip()
    assert second.say(fork, "Go on.", f"{fork}-2")[-1]["reason"] == "completed"


def test_full_disk_loses_nothing(second: Second, device: Device) -> None:
    """With the disk full a turn is refused or fails in words; what was acknowledged is there, and room mends it.

    Seen failing: the disk left full.
    """
    second.install(script={}, home_bytes=8 * 1024 * 1024)
    session = second.session()
    second.say(session, "Hello.", f"{session}-1")
    before = second.json("show %s", session)["records"]
    # Longer than the room that the log's last page on the disk may still have.
    long = "More. " * 2000
    device.run("dd if=/dev/zero of=%s bs=4k", f"{second.home}/fill")
    said = second.bxctl("chat --session %s --message %s --key %s", session, long, f"{session}-2", ok=False)
    assert "error:" in said
    assert "Traceback" not in said
    device.out("rm %s", f"{second.home}/fill")
    second.restart()
    assert second.say(session, long, f"{session}-2")[-1]["reason"] == "completed"
    after = second.json("show %s", session)["records"]
    assert after[: len(before)] == before


def test_wrong_configuration_is_no_restart_loop(second: Second, device: Device) -> None:
    """A configuration that loopd refuses ends the unit with status 2, once; a crash is restarted.

    Seen failing: a unit without RestartPreventExitStatus.
    """
    second.install(script={})
    second.configure("max_steps = 0")
    device.run(f"systemctl restart {second.unit}", timeout_s=120)
    device.wait(f"[ $(systemctl show -p ActiveState --value {second.unit}) = failed ]")
    shown = device.out(f"systemctl show -p NRestarts -p ExecMainStatus {second.unit}")
    assert "NRestarts=0" in shown
    assert "ExecMainStatus=2" in shown
    second.configure()
    device.out(f"systemctl start {second.unit}", timeout_s=120)
    second.wait()
    second.crash()
