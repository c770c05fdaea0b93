"""The root file system of virtual devices: made once by mmdebstrap, cached by its inputs.

The packages come from the mirror that this machine's own apt sources name. What must differ between devices (host
key, machine id, host name) is scrubbed here and written by `inside` before a boot.
"""

import hashlib
import shutil
import subprocess
from pathlib import Path

from virtual.errors import DeviceError

SUITE = "bookworm"
PACKAGES = (
    "systemd-sysv,dbus,udev,openssh-server,sudo,python3,python3-apt,ca-certificates,iproute2,netbase,libgomp1,procps,"
    "tzdata"
)
USER = "device"
# Runs on this machine with the new root as $1. An empty machine-id makes a boot `degraded`; mmdebstrap copies this
# machine's resolv.conf and host name. The journal is kept over reboots, so that checks can read the boot before.
CUSTOMIZE = f"""
set -eu
rm -f "$1"/etc/ssh/ssh_host_*_key "$1"/etc/ssh/ssh_host_*_key.pub "$1"/etc/resolv.conf "$1"/etc/hostname
: > "$1"/etc/machine-id
rm -f "$1"/var/lib/dbus/machine-id
mkdir -p "$1"/var/log/journal
: > "$1"/etc/default/locale
chroot "$1" useradd --create-home --shell /bin/bash --groups sudo {USER}
printf '%s ALL=(ALL) NOPASSWD: ALL\\n' {USER} > "$1"/etc/sudoers.d/{USER}
chmod 0440 "$1"/etc/sudoers.d/{USER}
printf 'PasswordAuthentication no\\nPermitRootLogin no\\nUseDNS no\\n' > "$1"/etc/ssh/sshd_config.d/device.conf
for unit in apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer fstrim.timer e2scrub_all.timer; do
  ln -sf /dev/null "$1"/etc/systemd/system/"$unit"
done
"""
# A root that boots as a machine of its own has a kernel, an initramfs with just the drivers of that machine (the
# kernel of a cloud image has ext4 built in), and the address that QEMU's user network expects.
KERNEL_PACKAGES = "linux-image-cloud-amd64,initramfs-tools"
KERNEL_CUSTOMIZE = """
set -eu
echo MODULES=list > "$1"/etc/initramfs-tools/conf.d/device
printf '%s\\n' virtio_pci virtio_blk virtio_net > "$1"/etc/initramfs-tools/modules
chroot "$1" update-initramfs -u
printf '[Match]\\nType=ether\\n[Network]\\nAddress=10.0.2.15/24\\n' > "$1"/etc/systemd/network/device.network
chroot "$1" systemctl enable systemd-networkd
"""
_DISK_BYTES = 4 * 1024**3
_MIN_FREE_BYTES = 3 * 1024**3


def ensure(build: Path, *, kernel: bool = False) -> Path:
    """Return the cached root below `build`, making it first where its inputs changed or it is missing.

    Args:
        build: the folder of everything that is made.
        kernel: a root that can boot as a virtual machine too.

    Raises:
        DeviceError: mmdebstrap failed (its last lines are in the message), or the disk is nearly full.
    """
    sources = _sources()
    root, other = (build / "image" / _name(sources, kernel=wanted) for wanted in (kernel, not kernel))
    if root.exists():
        return root
    for left in root.parent.glob("*.part"):
        shutil.rmtree(left)
    free = shutil.disk_usage(build).free
    if free < _MIN_FREE_BYTES:
        raise DeviceError(f"{free // 2**20} MiB are free below {build}, a device needs {_MIN_FREE_BYTES // 2**20}")
    part = root.with_suffix(".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    print("device: making the image (once; a few minutes from the mirror, less from cached packages)", flush=True)
    _mmdebstrap(part, build / "image" / "debs", sources, kernel=kernel)
    part.rename(root)
    for old in root.parent.iterdir():
        if old.is_dir() and old not in (root, other, root.parent / "debs") and not _in_use(old):
            shutil.rmtree(old)
    return root


def disk_command(root: Path, disk: Path) -> list[str]:
    """Return the command that makes a disk image with one ext4 file system, holding everything below `root`."""
    size = f"{_DISK_BYTES // 1024}k"
    return ["mke2fs", "-q", "-F", "-t", "ext4", "-E", "root_owner=0:0", "-d", str(root), str(disk), size]


def boot_files(root: Path) -> tuple[Path, Path]:
    """Return the kernel and the initramfs of a root made with a kernel."""
    (kernel,), (initramfs,) = root.glob("boot/vmlinuz-*"), root.glob("boot/initrd.img-*")
    return kernel, initramfs


def _name(sources: list[str], *, kernel: bool) -> str:
    added = (KERNEL_PACKAGES, KERNEL_CUSTOMIZE) if kernel else ()
    inputs = "\0".join((SUITE, PACKAGES, CUSTOMIZE, *added, *sources))
    return hashlib.sha256(inputs.encode()).hexdigest()[:16]


def _mmdebstrap(target: Path, debs: Path, sources: list[str], *, kernel: bool) -> None:
    debs.mkdir(exist_ok=True)
    archives = "/var/cache/apt/archives"
    command = [
        *("mmdebstrap", "--mode=root", "--variant=minbase", f"--include={PACKAGES}"),
        *((f"--include={KERNEL_PACKAGES}", f"--customize-hook={KERNEL_CUSTOMIZE}") if kernel else ()),
        *("--skip=essential/unlink,cleanup/apt/cache,download/empty", "--dpkgopt=path-exclude=/usr/share/doc/*"),
        *("--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/locale/*"),
        f'--setup-hook=mkdir -p "$1{archives}"',
        f'--setup-hook=find "{debs}" -name "*.deb" -exec cp -t "$1{archives}" {{}} +',
        f'--customize-hook=find "$1{archives}" -name "*.deb" -exec mv -t "{debs}" {{}} +',
        f"--customize-hook={CUSTOMIZE}",
        *(SUITE, str(target), *sources),
    ]
    log = target.with_suffix(".log")
    with log.open("wb") as output:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        shutil.rmtree(target, ignore_errors=True)
        tail = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise DeviceError(f"mmdebstrap failed: {' '.join(tail)}", hint=f"its whole log is {log}")
    log.unlink()


def _sources() -> list[str]:
    """Return `deb …` lines for SUITE from the mirrors that this machine's apt uses."""
    form = "$(REPO_URI)|$(SUITE)|$(CODENAME)|$(RELEASE)|$(COMPONENT)"
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", form, "Created-By: Packages", "Origin: Debian"],
        capture_output=True, text=True, check=False,
    ).stdout  # fmt: skip
    lines = []
    for target in dict.fromkeys(listed.split()):
        uri, *names, component = target.split("|")
        suite = next((name for name in names if name == SUITE or name.startswith(f"{SUITE}-")), None)
        if suite is not None and component == "main":
            lines.append(f"deb {uri} {suite} main")
    if not lines:
        raise DeviceError(f"this machine's apt knows no Debian {SUITE} mirror", hint="run apt-get update once")
    return sorted(lines)


def _in_use(root: Path) -> bool:
    """Tell whether some process has `root` in its mounts (as the lower layer of a device)."""
    for pid in (path.name for path in Path("/proc").iterdir() if path.name.isdigit()):
        try:
            if str(root) in Path("/proc", pid, "mounts").read_text():
                return True
        except OSError:
            continue
    return False
