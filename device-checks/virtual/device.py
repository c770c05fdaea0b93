"""One virtual device: its folder below `build/devices`, its keys, and the process that owns it."""

import json
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from virtual import image, qemu
from virtual.errors import DeviceError

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
ADDRESS = "192.0.2.2"  # documentation range; every device has it, in a network of its own
VIRTS = ("nspawn", "qemu")
_CGROUP_PREFIX = "loopd-device-"
_MIN_MEMORY_BYTES = {"nspawn": 1024**3, "qemu": (qemu.MEMORY_MIB + 512) * 1024**2}
_BOOT_TIMEOUT_S = {"nspawn": 120.0, "qemu": 600.0}
_END_TIMEOUT_S = 20.0
_COMMANDS = {
    "mmdebstrap": "mmdebstrap", "systemd-nspawn": "systemd-container", "ip": "iproute2",
    "nsenter": "util-linux", "unshare": "util-linux", "ssh-keygen": "openssh-client", "ssh": "openssh-client",
}  # fmt: skip
_QEMU_COMMANDS = {"qemu-system-x86_64": "qemu-system-x86", "mke2fs": "e2fsprogs", "setpriv": "util-linux"}


@dataclass(frozen=True, slots=True)
class Device:
    """The paths of one device. Its folder exists exactly while the device does, or until its remains are swept."""

    name: str

    @property
    def folder(self) -> Path:
        """Everything of the device: keys, overlay, console, list of boots."""
        return BUILD / "devices" / self.name

    @property
    def ssh_config(self) -> Path:
        """The file that makes `ssh -F FILE NAME` work."""
        return self.folder / "ssh_config"

    @property
    def boots(self) -> Path:
        """One line for each boot, appended when it starts."""
        return self.folder / "boots"

    def supervisor(self) -> int | None:
        """Return the process that owns the device, or None where it does not run.

        The process is known by number and start time, so that a number used again is not taken for it.
        """
        try:
            known = json.loads((self.folder / "supervisor.json").read_text())
        except (OSError, ValueError):
            return None
        return known["pid"] if _start_time(known["pid"]) == known["start"] else None


def up(name: str, virt: str) -> Device:
    """Boot a fresh device and return when it answers on SSH; a device that runs is left alone.

    Args:
        name: what it is called.
        virt: one of `VIRTS`.

    Raises:
        DeviceError: not root, packages or memory missing, or the device does not come up.
    """
    device = Device(name)
    preflight(virt)
    sweep()
    if device.supervisor() is not None:
        print(f"device: {name} is up already")
        return device
    root = image.ensure(_made(BUILD), kernel=virt == "qemu")
    began = time.monotonic()
    shutil.rmtree(device.folder, ignore_errors=True)
    _prepare(device)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "device-checks")}
    with (device.folder / "console.log").open("wb") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "virtual", "own", name, str(root), "--virt", virt],
            stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True,
            env=environment, cwd="/",
        )  # fmt: skip
    known = {"pid": process.pid, "start": _start_time(process.pid)}
    (device.folder / "supervisor.json").write_text(json.dumps(known))
    try:
        wait_for_ssh(device, _BOOT_TIMEOUT_S[virt])
    except DeviceError:
        down(name, keep_folder=True)
        raise
    print(f"device: {name} is up after {time.monotonic() - began:.1f} s: ssh -F {device.ssh_config} {name}")
    return device


def down(name: str, *, keep_folder: bool = False) -> None:
    """End the device at once, as a power cut would, and remove what was left of it."""
    device = Device(name)
    pid = device.supervisor()
    if pid is not None:
        descriptor = os.pidfd_open(pid)
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while device.supervisor() is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        os.close(descriptor)
    if not keep_folder:
        shutil.rmtree(device.folder, ignore_errors=True)
    deadline = time.monotonic() + _END_TIMEOUT_S
    while not sweep() and time.monotonic() < deadline:
        time.sleep(0.05)


def own(name: str, virt: str, root: Path) -> None:
    """Become the process that owns the device: a control group and namespaces of its own, then the boot loop."""
    device = Device(name)
    for tree in _cgroup_trees():
        group = tree / f"{_CGROUP_PREFIX}{name}-{os.getpid()}"
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    os.execvp(
        "unshare",
        ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--",
         sys.executable, "-m", "virtual", "inside", name, str(root), str(device.folder), "--virt", virt],
    )  # fmt: skip


def sweep() -> bool:
    """Remove the control groups of devices whose owner died; tell whether those that are empty are all gone.

    A group stays busy for a moment after its last process has ended.
    """
    clean = True
    for tree in _cgroup_trees():
        for group in tree.glob(f"{_CGROUP_PREFIX}*"):
            try:
                if _empty(group):
                    for folder, _, _ in os.walk(group, topdown=False):
                        Path(folder).rmdir()
            except OSError:
                clean = False
    return clean


def preflight(virt: str) -> None:
    """Make sure that this machine can carry a device.

    Raises:
        DeviceError: no Linux, not root, or packages or memory are missing.
    """
    if sys.platform != "linux":
        raise DeviceError(f"a virtual device needs Linux, this is {sys.platform}", hint="use a real device instead")
    if os.geteuid() != 0:
        raise DeviceError("a virtual device needs root", hint="run the same command with sudo")
    if virt == "qemu" and platform.machine() != "x86_64":
        raise DeviceError(f"VIRT=qemu needs an x86_64 machine, this is {platform.machine()}", hint="make device-up")
    commands = _COMMANDS | _QEMU_COMMANDS if virt == "qemu" else _COMMANDS
    missing = sorted({package for command, package in commands.items() if shutil.which(command) is None})
    if missing:
        hint = "make setup-device" + (" VIRT=qemu" if virt == "qemu" else "")
        raise DeviceError(f"Debian packages are missing: {' '.join(missing)}", hint=hint)
    for line in Path("/proc/meminfo").read_text().splitlines():
        field, _, value = line.partition(":")
        wanted = _MIN_MEMORY_BYTES[virt]
        if field == "MemAvailable" and (free := int(value.split()[0]) * 1024) < wanted:
            raise DeviceError(f"{free // 2**20} MiB of memory are free, a device needs {wanted // 2**20}")


def wait_for_ssh(device: Device, timeout_s: float) -> None:
    """Return when a command runs on the device over SSH.

    Raises:
        DeviceError: it did not within `timeout_s`, or its owner ended.
    """
    deadline = time.monotonic() + timeout_s
    console = device.folder / "console.log"
    said = ""
    while time.monotonic() < deadline:
        if device.supervisor() is None:
            said = f"its owner ended: {_last_line(console.read_text(errors='replace'))}"
            break
        tried = subprocess.run(
            ["ssh", "-F", str(device.ssh_config), "-o", "ConnectTimeout=5", device.name, "true"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if tried.returncode == 0:
            return
        said = _last_line(tried.stderr)
        time.sleep(0.2)
    raise DeviceError(f"the device {device.name} does not come up: {said}", hint=f"its console: {console}")


def _prepare(device: Device) -> None:
    """Make the folder with fresh keys and an ssh_config that pins the host key."""
    folder = _made(device.folder)
    folder.chmod(0o700)
    for directory in ("upper", "work", "root"):
        (folder / directory).mkdir()
    # The overlay's root takes its mode and owner from the upper directory.
    (folder / "upper").chmod(0o755)
    for key in ("host_key", "user_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", device.name, "-f", str(folder / key)], check=True
        )
    host = (folder / "host_key.pub").read_text().split()
    (folder / "known_hosts").write_text(f"{ADDRESS} {host[0]} {host[1]}\n")
    (folder / "machine_id").write_text(secrets.token_hex(16) + "\n")
    proxy = f'env PYTHONPATH="{ROOT / "device-checks"}" "{sys.executable}" -m virtual proxy {device.name}'
    device.ssh_config.write_text(
        f"Host {device.name}\n"
        f"  HostName {ADDRESS}\n  HostKeyAlias {ADDRESS}\n  User {image.USER}\n"
        f'  IdentityFile "{folder / "user_key"}"\n  IdentitiesOnly yes\n'
        f'  UserKnownHostsFile "{folder / "known_hosts"}"\n  GlobalKnownHostsFile /dev/null\n'
        f"  StrictHostKeyChecking yes\n  PasswordAuthentication no\n  ServerAliveInterval 15\n"
        f"  ProxyCommand {proxy}\n"
    )


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _cgroup_trees() -> list[Path]:
    """Return the hierarchies that systemd inside a device uses: one of version 2, or the two of a hybrid setup."""
    base = Path("/sys/fs/cgroup")
    if (base / "cgroup.controllers").exists():
        return [base]
    return [tree for tree in (base / "systemd", base / "unified") if (tree / "cgroup.procs").exists()]


def _empty(group: Path) -> bool:
    return not any(path.read_text().strip() for path in group.rglob("cgroup.procs"))


def _start_time(pid: int) -> int | None:
    """Return when the process started (clock ticks since boot), or None where there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
