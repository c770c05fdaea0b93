"""What runs as process 1 of a device's namespaces: overlay, network, and the boot loop or the machine."""

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from virtual import image, qemu
from virtual.device import ADDRESS
from virtual.image import USER

_REBOOT = 133  # systemd-nspawn's exit status when the container asked for a reboot


def run(name: str, virt: str, lower: Path, folder: Path) -> int:
    """Boot the device until it powers off, again after each reboot; return the last exit status."""
    root = folder / "root"
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "tmpfs", "-o", "mode=0755", "run", "/run")
    layers = f"lowerdir={lower},upperdir={folder}/upper,workdir={folder}/work"
    _run("mount", "-t", "overlay", "-o", layers, "device", str(root))
    _own_identity(name, folder, root)
    # An address that is not a loopback one, so that checks see what listens beyond; it needs no driver of the kernel.
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "address", "add", f"{ADDRESS}/32", "dev", "lo")
    return _boot_machine(lower, folder, root) if virt == "qemu" else _boot_container(name, folder, root)


def _boot_container(name: str, folder: Path, root: Path) -> int:
    status = _REBOOT
    while status == _REBOOT:
        with (folder / "boots").open("a") as boots:
            boots.write(datetime.now(UTC).isoformat() + "\n")
        # The network namespace is the one around us: its addresses are set from here, and nothing inside may
        # change them. Registration is off because this machine need not run systemd.
        status = subprocess.run(
            ["systemd-nspawn", "--boot", f"--directory={root}", f"--machine={name}", "--register=no", "--keep-unit",
             "--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=pipe", "--quiet"],
            stdin=subprocess.DEVNULL, check=False,
        ).returncode  # fmt: skip
    return status


def _boot_machine(lower: Path, folder: Path, root: Path) -> int:
    """Boot a disk with what is in the overlay; QEMU itself boots it again after a reboot."""
    disk = folder / "disk.img"
    _run(*image.disk_command(root, disk))
    command = qemu.command(lower, f"driver=file,filename={disk}", outside=f"{ADDRESS}:22", port=22)
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def _own_identity(name: str, folder: Path, root: Path) -> None:
    """Write what makes this device itself: host key, machine id, names, and who may log in."""
    etc = root / "etc"
    (etc / "hostname").write_text(f"{name}\n")
    (etc / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n::1 localhost ip6-localhost\n")
    (etc / "machine-id").write_text((folder / "machine_id").read_text())
    for suffix, mode in (("", 0o600), (".pub", 0o644)):
        key = etc / "ssh" / f"ssh_host_ed25519_key{suffix}"
        key.write_text((folder / f"host_key{suffix}").read_text())
        key.chmod(mode)
    home = root / "home" / USER
    ssh = home / ".ssh"
    ssh.mkdir(mode=0o700, exist_ok=True)
    keys = ssh / "authorized_keys"
    keys.write_text((folder / "user_key.pub").read_text())
    keys.chmod(0o600)
    owner = home.stat()
    for path in (ssh, keys):
        path.chmod(0o700 if path is ssh else 0o600)
        os.chown(path, owner.st_uid, owner.st_gid)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
