"""Streams between sockets: what connects here is connected there. Used outside and, as a file alone, in the machine."""

import contextlib
import socket
import threading
from collections.abc import Callable


def serve(listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
    """Relay each connection to a new one made by `connect`, until the listener is shut down."""
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_relay, args=(near, connect), daemon=True).start()


def _relay(near: socket.socket, connect: Callable[[], socket.socket]) -> None:
    with near, contextlib.suppress(OSError), connect() as far:
        back = threading.Thread(target=_copy, args=(far, near), daemon=True)
        back.start()
        _copy(near, far)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
