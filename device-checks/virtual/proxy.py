"""The way into a device: SSH's standard input and output, relayed to port 22 in the device's network namespace."""

import contextlib
import ctypes
import os
import selectors
import socket
import sys

from virtual.device import ADDRESS, Device
from virtual.errors import DeviceError

_CLONE_NEWNET = 0x40000000


def run(name: str) -> int:
    """Relay until either side ends.

    Raises:
        DeviceError: the device does not run, its network cannot be entered, or nothing answers there.
    """
    pid = Device(name).supervisor()
    if pid is None:
        raise DeviceError(f"the virtual device {name} is not up", hint="make device-up")
    # os.setns is there from Python 3.12 on.
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:  # noqa: PTH123 - a handle, not a file
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise DeviceError(f"cannot enter the network of {name}: {os.strerror(ctypes.get_errno())}")
    try:
        remote = socket.create_connection((ADDRESS, 22), timeout=10)
    except OSError as error:
        raise DeviceError(f"nothing answers on port 22 of {name}: {error}") from error
    remote.settimeout(None)
    _relay(remote)
    return 0


def _relay(remote: socket.socket) -> None:
    selector = selectors.DefaultSelector()
    with contextlib.suppress(OSError, ValueError):
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    selector.register(remote, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is remote:
                data = remote.recv(65_536)
                if not data:
                    return
                view = memoryview(data)
                while view:
                    view = view[os.write(sys.stdout.fileno(), view) :]
            else:
                data = os.read(sys.stdin.fileno(), 65_536)
                if not data:
                    return
                remote.sendall(data)
