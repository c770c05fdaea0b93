"""Stage reachable: the device answers on SSH and is a machine that loopd can run on."""

import json
import time

import paramiko
import pytest
from checks.device import Device
from checks.pinned import PinnedBackend
from checks.report import Report

pytestmark = pytest.mark.stage("reachable")

_FACTS = """
import json, os, platform
os_release = dict(l.rstrip().split('=', 1) for l in open('/etc/os-release') if '=' in l)
mem = next(int(l.split()[1]) // 1024 for l in open('/proc/meminfo') if l.startswith('MemTotal'))
print(json.dumps({'system': os_release['PRETTY_NAME'].strip('"'), 'kernel': platform.release(),
  'architecture': platform.machine(), 'cores': os.cpu_count(), 'memory_mib': mem, 'python': platform.python_version(),
  'model': open('/proc/device-tree/model').read().strip('\\0') if os.path.exists('/proc/device-tree/model') else ''}))
"""


def test_device_answers_on_ssh_with_its_known_key(device: Device, report: Report) -> None:
    """The device answers on SSH with the host key that is known, and root may be had by sudo."""
    assert device.out("id -u") == "0"
    report.facts |= json.loads(device.out("python3 -c %s", _FACTS))


def test_wrong_host_key_is_refused(device: Device, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A host key that is not the known one is refused before anything is sent."""
    folder = tmp_path_factory.mktemp("wrong")
    wrong = paramiko.ECDSAKey.generate()
    entry = paramiko.SSHConfig.from_path(str(device.ssh_config)).lookup(device.name)
    host, port = entry.get("hostname", device.name), entry.get("port", "22")
    known = host if port == "22" else f"[{host}]:{port}"
    (folder / "known_hosts").write_text(f"{known} {wrong.get_name()} {wrong.get_base64()}\n")
    options = [f"UserKnownHostsFile {folder / 'known_hosts'}", "GlobalKnownHostsFile /dev/null"]
    text = device.ssh_config.read_text()
    (folder / "config").write_text("\n".join(["Host *", *options, text]))
    stranger = PinnedBackend(device.name, ssh_config=str(folder / "config"), timeout=30)
    with pytest.raises(paramiko.SSHException):
        stranger.run("true")
    stranger.drop()


def test_clock_is_right(device: Device) -> None:
    """The device's clock is within a minute of ours."""
    assert abs(float(device.out("date +%s.%N")) - time.time()) < 60


def test_disk_has_headroom(device: Device) -> None:
    """At least 256 MiB are free where conversations are kept."""
    assert int(device.out("df --output=avail -BM /var/lib | tail -n 1").rstrip("M")) >= 256


def test_system_is_up_without_failed_units(device: Device) -> None:
    """The system has booted and none of its units has failed."""
    assert device.out("systemctl --failed --plain --no-legend | grep -v '^loopd' || true") == ""
