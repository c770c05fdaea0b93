"""The disk as a network block device: the fixed newstyle handshake and simple replies of the NBD protocol.

See https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md; the client is QEMU's block driver.
"""

import errno
import socket
import struct
import threading
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from power.disk import ForgetfulDisk, PowerIsOff

_OPTION_MAGIC = b"IHAVEOPT"
_GREETING = struct.Struct(">8s8sH")
_OPTION = struct.Struct(">8sII")
_OPTION_REPLY = struct.Struct(">QIII")
_REQUEST = struct.Struct(">IHHQQI")
_REPLY = struct.Struct(">IIQ")
_REQUEST_MAGIC, _REPLY_MAGIC, _OPTION_REPLY_MAGIC = 0x25609513, 0x67446698, 0x3E889045565A9
_FIXED_NEWSTYLE_NO_ZEROES = 3
_OPT_ABORT, _OPT_GO = 2, 7
_REP_ACK, _REP_INFO, _REP_UNSUPPORTED = 1, 3, 0x80000001
_HAS_FLAGS_AND_FLUSH = 0b101
READ, WRITE, DISCONNECT, FLUSH = 0, 1, 2, 3


class Request(NamedTuple):
    """One request of the client; the data of a write follow it."""

    magic: int
    flags: int
    command: int
    cookie: int
    offset: int
    length: int


def answer(disk: ForgetfulDisk, request: Request, data: bytes) -> bytes:
    """Do what is asked and return the reply.

    Raises:
        PowerIsOff: there is none.
    """
    error, found = 0, b""
    try:
        if request.command == READ:
            found = disk.read(request.offset, request.length)
        elif request.command == WRITE:
            disk.write(request.offset, data)
        elif request.command == FLUSH:
            disk.flush()
        else:
            error = errno.EINVAL
    except ValueError:
        error = errno.EINVAL
    return _REPLY.pack(_REPLY_MAGIC, error, request.cookie) + found


class Server:
    """Serves one client on a Unix socket, in a thread; without power it neither answers nor ends the connection."""

    def __init__(self, disk: ForgetfulDisk, path: Path) -> None:
        self._disk = disk
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, name="nbd")
        self._thread.start()

    def close(self) -> None:
        """End the service; the client must have gone."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # closed before anybody came
        # The client is killed, perhaps in mid-request.
        with connection, connection.makefile("rb") as incoming, suppress(ConnectionError, struct.error):
            try:
                if self._shake_hands(connection, incoming):
                    while self._serve_one(connection, incoming):
                        pass
            except PowerIsOff:
                while incoming.read1():
                    pass

    def _shake_hands(self, connection: socket.socket, incoming: BufferedReader) -> bool:
        connection.sendall(_GREETING.pack(b"NBDMAGIC", _OPTION_MAGIC, _FIXED_NEWSTYLE_NO_ZEROES))
        incoming.read(4)  # the client's flags
        while True:
            _, option, length = _OPTION.unpack(incoming.read(_OPTION.size))
            incoming.read(length)

            def reply(kind: int, data: bytes = b"", option: int = option) -> None:
                connection.sendall(_OPTION_REPLY.pack(_OPTION_REPLY_MAGIC, option, kind, len(data)) + data)

            if option == _OPT_GO:
                reply(_REP_INFO, struct.pack(">HQH", 0, self._disk.size_bytes, _HAS_FLAGS_AND_FLUSH))
                reply(_REP_ACK)
                return True
            if option == _OPT_ABORT:
                reply(_REP_ACK)
                return False
            reply(_REP_UNSUPPORTED)

    def _serve_one(self, connection: socket.socket, incoming: BufferedReader) -> bool:
        request = Request(*_REQUEST.unpack(incoming.read(_REQUEST.size)))
        if request.magic != _REQUEST_MAGIC or request.command == DISCONNECT:
            return False
        data = incoming.read(request.length) if request.command == WRITE else b""
        connection.sendall(answer(self._disk, request, data))
        return True
