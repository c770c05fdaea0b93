"""The machine whose power is cut: its disk image, and one process of QEMU for each boot."""

import os
import shutil
import socket
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from checks.device import ROOT, Device
from virtual import image, qemu
from virtual.errors import DeviceError

from power import guest, relay
from power.disk import SECTOR_BYTES, ForgetfulDisk
from power.nbd import Server

_HERE = Path(__file__).parent
_END_TIMEOUT_S = 20


def make_image(device: Device, folder: Path) -> tuple[Path, Path]:
    """Make the image of a disk with the release and the model that are installed on the device under check.

    Returns:
        The root that it was made of, and the image.

    Raises:
        DeviceError: the device runs a system whose programs the virtual machine's would not.
    """
    system = device.out('. /etc/os-release; echo "$VERSION_CODENAME $(uname -m)"')
    if system != f"{image.SUITE} x86_64":
        raise DeviceError(f"power cuts are tried on releases for Debian {image.SUITE} on x86_64, and this is {system}")
    root = image.ensure(ROOT / "build", kernel=True)
    upper, work, merged, disk = (folder / name for name in ("upper", "work", "root", "disk.img"))
    for made in (upper, work, merged):
        made.mkdir(parents=True)
    gguf = device.out("sed -n '/^gguf = /p' /etc/loopd/loopd.toml")
    release = device.out("readlink -f /opt/loopd/current")
    _copy(device, upper, "/opt/loopd/current", release, gguf.split('"')[1])
    _add_program(upper, gguf)
    subprocess.run(
        ["unshare", "--mount", "--", "sh", "-c", 'mount -t overlay -o "$1" overlay "$2" && shift 2 && exec "$@"', "sh",
         f"lowerdir={root},upperdir={upper},workdir={work}", str(merged), *image.disk_command(merged, disk)],
        check=True,
    )  # fmt: skip
    shutil.rmtree(upper)
    return root, disk


class Machine:
    """A machine on a forgetful disk. One boot at a time; `channel` leads to the daemon in it.

    Args:
        root: the root whose kernel it boots.
        image: the disk as it is at first; it is not written.
        folder: for sockets and the console.
        heeds_flushes: as `ForgetfulDisk`.
    """

    def __init__(self, root: Path, image: Path, folder: Path, *, heeds_flushes: bool = True) -> None:
        folder.mkdir(parents=True)
        self.channel = folder / "channel.sock"
        self.console = folder / "console.log"
        self._root = root
        self._folder = folder
        self._stack = ExitStack()
        self._base = self._stack.enter_context(image.open("rb"))
        self.disk = ForgetfulDisk(self._read_base, image.stat().st_size, heeds_flushes=heeds_flushes)
        self._port = free_port()
        listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(self.channel))
        listener.listen()
        thread = threading.Thread(target=relay.serve, args=(listener, self._connect), name="channel")
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(listener.shutdown, socket.SHUT_RDWR)
        self._power = ExitStack()

    def boot(self, model: str | None) -> None:
        """Begin a boot on what survived the last cut.

        Args:
            model: URL of the model server as seen from inside; None for the real one, in there.
        """
        self.disk.power_on()
        path = self._folder / "disk.sock"
        server = Server(self.disk, path)
        self._power.callback(path.unlink)
        self._power.callback(server.close)
        # Without what ext4 does by itself in the background.
        words = f"rootflags=noinit_itable,commit=900 init={guest.INIT}" + (f" model={model}" if model else "")
        disk = f"driver=nbd,server.type=unix,server.path={path}"
        # One that cannot boot ends, and does not try again for ever.
        more = ["-no-reboot"]
        for kind in ("logical", "physical"):
            more += ["-global", f"virtio-blk-device.{kind}_block_size={SECTOR_BYTES}"]
        command = qemu.command(
            self._root, disk, outside=f"127.0.0.1:{self._port}", port=guest.PORT, words=words,
            more=more,
        )  # fmt: skip
        console: BinaryIO = self._power.enter_context(self.console.open("ab"))
        # Killed with this process, however that ends.
        process = self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._power.callback(process.wait, _END_TIMEOUT_S)
        self._power.callback(process.kill)

    def check(self) -> None:
        """Make sure that it runs.

        Raises:
            AssertionError: it has ended; the last words of its console are in the message.
        """
        ended = self._process.poll() is not None
        assert not ended, f"the machine has ended: {self.console.read_text(errors='replace')[-800:]}"

    def kill(self) -> None:
        """End the processor; the disk was cut before."""
        self._power.close()

    def close(self) -> None:
        """End everything."""
        self.kill()
        self._stack.close()

    def _read_base(self, offset: int, length: int) -> bytes:
        return os.pread(self._base.fileno(), length, offset)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port))


def _copy(device: Device, target: Path, *paths: str) -> None:
    """Copy files and folders from the device, under their own paths."""
    ssh = ["ssh", "-F", str(device.ssh_config), device.name]
    pack = ["sudo", "tar", "-C", "/", "-c", *(path.lstrip("/") for path in paths)]
    with subprocess.Popen([*ssh, *pack], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as sent:
        subprocess.run(["tar", "-x", "-C", str(target)], stdin=sent.stdout, check=True)
    assert sent.returncode == 0, f"the release could not be copied from {device.name}"


def _add_program(target: Path, gguf: str) -> None:
    program = target / guest.HERE.relative_to("/")
    shutil.copytree(_HERE, program / _HERE.name, ignore=shutil.ignore_patterns("__pycache__"))
    (program / "loopd.toml").write_text(guest.CONFIG.format(gguf=gguf))
    init = target / guest.INIT.relative_to("/")
    init.write_text(guest.INIT_TEXT)
    init.chmod(0o755)


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
