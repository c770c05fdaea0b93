from pathlib import Path

import pytest

from loopd.tools import services
from loopd.tools.services import failed_services, service_state

SSH = r"""
echo Result=success
echo Id=ssh.service
echo Description=OpenBSD Secure Shell server
echo LoadState=loaded
echo ActiveState=active
echo SubState=running
echo UnitFileState=enabled
echo 'StateChangeTimestamp=Tue 2026-12-01 18:31:10 UTC'
"""


def with_systemd(root: Path, script: str) -> Path:
    """A device whose `systemctl` is a shell script."""
    (root / "run/systemd/system").mkdir(parents=True)
    (root / "usr/bin").mkdir(parents=True)
    program = root / "usr/bin/systemctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return root


def test_a_device_without_systemd_tells_nothing(tmp_path: Path) -> None:
    assert failed_services(tmp_path) == ""
    assert service_state(tmp_path, "ssh") == "not known: this device does not run systemd"


def test_failed_services_are_named_with_what_they_are(tmp_path: Path) -> None:
    root = with_systemd(tmp_path, "echo 'broken.service loaded failed failed Broken on purpose'; echo 'a.mount'")
    assert failed_services(root) == "2 failed: broken.service (Broken on purpose), a.mount"


def test_of_many_failed_services_the_first_are_named(tmp_path: Path) -> None:
    root = with_systemd(tmp_path, "for n in 1 2 3 4 5 6 7 8 9 10 11 12; do echo $n.service loaded failed failed; done")
    assert failed_services(root).endswith("10.service and 2 more")


def test_none_failed_is_said(tmp_path: Path) -> None:
    assert failed_services(with_systemd(tmp_path, "exit 0")) == "none failed"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (SSH, "active (running) since Tue 2026-12-01 18:31:10 UTC, enabled; OpenBSD Secure Shell server"),
        (SSH.replace("=success", "=exit-code").replace("=active", "=failed"), "failed (running) since Tue 2026-12-01 "),
        ("echo LoadState=not-found", "there is none of that name"),
        ("echo Failed to connect to bus: No such file >&2; exit 1", "not known: systemd does not answer (Failed to "),
        ("exit 1", "not known: systemd does not answer (1)"),
        ("echo", "unknown (unknown); "),
        (r"printf '\377=\377\n'", "unknown (unknown); "),
    ],
)
def test_the_state_of_a_service_is_told_in_a_line(tmp_path: Path, script: str, expected: str) -> None:
    told = service_state(with_systemd(tmp_path, script), "ssh")
    assert told.startswith(expected)
    assert "\n" not in told


def test_the_name_stands_behind_the_options_and_nothing_of_loopds_environment_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = with_systemd(tmp_path, 'echo "Description=$*, $LOOPD_HOME."')
    monkeypatch.setenv("LOOPD_HOME", "/somewhere")
    assert service_state(root, "ssh").endswith(" -- ssh, .")


def test_one_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_PATIENCE_S", 0.05)
    root = with_systemd(tmp_path, "exec tail -f /dev/null")
    assert failed_services(root) == "not known: systemd did not answer within 0.05 s"


def test_systemd_without_systemctl_is_said(tmp_path: Path) -> None:
    root = with_systemd(tmp_path, "")
    (root / "usr/bin/systemctl").unlink()
    assert failed_services(root) == "not known: there is no systemctl"
