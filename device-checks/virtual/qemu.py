"""QEMU without KVM: a root with a kernel, booted as a machine of its own under software emulation."""

from collections.abc import Sequence
from pathlib import Path

from virtual import image

MEMORY_MIB = 1536
_GUEST_ADDRESS = "10.0.2.15"


def command(root: Path, disk: str, *, outside: str, port: int, words: str = "", more: Sequence[str] = ()) -> list[str]:
    """Return the command that boots a disk; its console is standard output.

    Args:
        root: the root that the disk was made of; the kernel and the initramfs are taken from it.
        disk: QEMU's options for the block device named `disk`.
        outside: ADDRESS:PORT out here that leads to the port inside.
        port: the port inside.
        words: more of the kernel's command line.
        more: more options of QEMU.
    """
    kernel, initramfs = image.boot_files(root)
    return [
        *("nice", "-n", "19", "qemu-system-x86_64", "-nodefaults", "-display", "none", "-serial", "stdio"),
        # KVM is never used: where hosts list it, it may still not work.
        *("-machine", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", f"{MEMORY_MIB}M"),
        *("-kernel", str(kernel), "-initrd", str(initramfs)),
        *("-append", f"root=/dev/vda rw console=ttyS0 net.ifnames=0 quiet panic=-1 {words}".rstrip()),
        *("-blockdev", f"{disk},node-name=disk", "-device", "virtio-blk-pci,drive=disk"),
        *("-netdev", f"user,id=net,hostfwd=tcp:{outside}-{_GUEST_ADDRESS}:{port}"),
        *("-device", "virtio-net-pci,netdev=net", *more),
    ]
