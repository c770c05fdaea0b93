"""Stage installed: what the rollout promised is on disk, with the rights it promised."""

import json
import re

import pytest
from checks.device import Device
from checks.report import Report

pytestmark = pytest.mark.stage("installed")

UNITS = ("loopd.service", "loopd-model.service", "loopd-tools.service")
# path, mode, owner, group
FILES = [
    ("/etc/loopd", "755", "root", "root"),
    ("/etc/loopd/loopd.toml", "644", "root", "root"),
    ("/etc/systemd/system/loopd.service", "644", "root", "root"),
    ("/etc/systemd/system/loopd-model.service", "644", "root", "root"),
    ("/etc/systemd/system/loopd-tools.service", "644", "root", "root"),
    ("/etc/systemd/system/loopd-tools.socket", "644", "root", "root"),
    ("/opt/loopd", "755", "root", "root"),
    ("/var/lib/loopd", "700", "loopd", "loopd-daemon"),
    ("/var/lib/loopd-tools", "700", "loopd-tools", "loopd-tools"),
]


@pytest.mark.parametrize(("path", "mode", "owner", "group"), FILES, ids=[row[0] for row in FILES])
def test_file_has_owner_and_mode(device: Device, path: str, mode: str, owner: str, group: str) -> None:
    """Files and folders belong to whom they should, and nobody else may change them.

    Seen failing: `chmod 666 /etc/loopd/loopd.toml`.
    """
    assert device.out("stat -c '%%a %%U %%G' %s", path) == f"{mode} {owner} {group}"


def test_program_cannot_be_changed_by_the_daemon(device: Device) -> None:
    """Nothing below /opt/loopd is writable by anyone but root.

    Seen failing: `chmod o+w /opt/loopd/current/bin/loopd`.
    """
    loose = device.out("find /opt/loopd ! -type l \\( ! -user root -o -perm /022 \\) | head -n 5")
    assert loose == ""


def test_daemons_group_is_its_own(device: Device) -> None:
    """The user loopd cannot log in, and nobody else is in its primary group.

    Seen failing: `usermod -aG loopd-daemon` for somebody.
    """
    user = device.host.user("loopd")
    assert (user.group, user.shell, user.home) == ("loopd-daemon", "/usr/sbin/nologin", "/var/lib/loopd")
    assert device.host.group("loopd-daemon").members == []


def test_tools_have_a_user_of_their_own(device: Device) -> None:
    """The user loopd-tools cannot log in, is in no group but its own, and nobody else is in that.

    Seen failing: `usermod -aG loopd loopd-tools`.
    """
    user = device.host.user("loopd-tools")
    assert (user.groups, user.shell) == (["loopd-tools"], "/usr/sbin/nologin")
    assert device.host.group("loopd-tools").members == []


def test_release_is_whole(device: Device, report: Report) -> None:
    """Every installed file has the hash that its package recorded, and nothing that is needed is missing.

    Seen failing: a file of a package removed.
    """
    release = device.out("basename $(readlink /opt/loopd/current)")
    assert device.out("cat /opt/loopd/current/.complete") == release
    found = json.loads(device.python(_HASHES))
    report.facts |= {"release": release, "packages": found["packages"]}
    assert found["wrong"] == []
    assert found["missing"] == []


def test_model_file_is_the_one_of_its_name(device: Device, report: Report) -> None:
    """The model file has the hash by which its folder is named.

    Seen failing: one byte added to it.
    """
    path = device.out("sed -n 's/^gguf = \"\\(.*\\)\"$/\\1/p' /etc/loopd/loopd.toml")
    digest = device.out("sha256sum %s", path, timeout_s=300).split()[0]
    report.facts |= {"model": path.rsplit("/", 1)[-1], "model_sha256": digest}
    assert path.split("/")[-2] == digest[:16]


def test_configuration_is_taken_by_loopd(device: Device) -> None:
    """`loopd config check` takes the installed configuration: of loopd's release, and of the model server's.

    Seen failing: a key added that there is not; the link of the model server on a release that lacks a key.
    """
    for link in ("current", "model-server"):
        device.out("/opt/loopd/%s/bin/loopd config check /etc/loopd/loopd.toml", link)


@pytest.mark.parametrize("unit", UNITS)
def test_unit_is_enabled_and_known(device: Device, unit: str) -> None:
    """The unit starts at boot and is what its file says; after a crash it restarts, but not after exit status 2.

    The runner of tools is started by the next request for it.

    Seen failing: `systemctl disable loopd.service`; a unit file changed without a reload.
    """
    shown = _shown(
        device,
        "systemctl show %s -p UnitFileState -p NeedDaemonReload -p Restart -p RestartPreventExitStatus"
        " -p StartLimitIntervalUSec -p User -p Group -p MemoryMax -p TasksMax -p Type -p LoadState -p TriggeredBy",
        unit,
    )
    assert shown["LoadState"] == "loaded"
    assert shown["UnitFileState"] == "enabled"
    assert shown["NeedDaemonReload"] == "no"
    assert shown["StartLimitIntervalUSec"] == "0"
    if unit == "loopd-tools.service":
        assert (shown["User"], shown["Group"], shown["Type"]) == ("loopd-tools", "loopd-tools", "exec")
        assert (shown["Restart"], shown["TriggeredBy"]) == ("no", "loopd-tools.socket")
    else:
        assert (shown["User"], shown["Group"], shown["Type"]) == ("loopd", "loopd-daemon", "notify")
        assert (shown["Restart"], shown["RestartPreventExitStatus"]) == ("on-failure", "2")
    assert "infinity" not in (shown["MemoryMax"], shown["TasksMax"])


@pytest.mark.parametrize("unit", UNITS)
def test_exposure_is_small(device: Device, unit: str) -> None:
    """Systemd rates the exposure of the unit 2.0 or less.

    Seen failing: a drop-in without the sandbox.
    """
    rated = device.out("systemd-analyze security --no-pager %s | tail -n 1", unit)
    exposure = re.search(r"(\d+\.\d+)", rated)
    assert exposure is not None
    assert float(exposure[1]) <= 2.0


def test_loopd_stops_before_its_tools_and_the_model_server(device: Device) -> None:
    """A planned stop ends loopd first, then its tools and the model server, and gives it the time it needs.

    A hang is noticed by the watchdog, and what ends loopd ends its tools.

    Seen failing: a drop-in with WatchdogSec=0.
    """
    shown = _shown(device, "systemctl show loopd.service -p After -p BoundBy -p TimeoutStopUSec -p WatchdogUSec")
    assert {"loopd-model.service", "loopd-tools.service"} <= set(shown["After"].split())
    assert shown["BoundBy"] == "loopd-tools.service"
    assert shown["TimeoutStopUSec"] != "infinity"
    assert shown["WatchdogUSec"] != "0"


def _shown(device: Device, command: str, *arguments: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in device.out(command, *arguments).splitlines())


_HASHES = """
import base64, hashlib, json
from importlib import metadata
wrong, missing, packages = [], [], {}
def norm(n): return n.lower().replace('_', '-').replace('.', '-')
dists = list(metadata.distributions())
for dist in dists:
    packages[norm(dist.name)] = dist.version
    for file in dist.files or ():
        path = file.locate()
        if file.hash is None:
            continue
        if not path.exists():
            missing.append(str(file)); continue
        digest = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, path.read_bytes()).digest()).rstrip(b'=').decode()
        if digest != file.hash.value:
            wrong.append(str(file))
print(json.dumps({'wrong': wrong, 'missing': missing, 'packages': packages}))
"""
