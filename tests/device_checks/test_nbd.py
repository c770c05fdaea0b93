import errno
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from power.disk import SECTOR_BYTES, ForgetfulDisk
from power.nbd import DISCONNECT, FLUSH, READ, WRITE, Request, Server, answer

SIZE = 8 * SECTOR_BYTES
MAGIC = 0x25609513
PATIENCE_S = 30
SECTOR = b"x" * SECTOR_BYTES


def made() -> ForgetfulDisk:
    return ForgetfulDisk(lambda _offset, length: bytes(length), SIZE)


def asked(command: int, offset: int = 0, length: int = 0) -> Request:
    return Request(MAGIC, 0, command, 7, offset, length)


def replied(error: int, data: bytes = b"") -> bytes:
    return struct.pack(">IIQ", 0x67446698, error, 7) + data


def test_requests_are_answered_under_their_cookie() -> None:
    disk = made()
    assert answer(disk, asked(WRITE, 0, SECTOR_BYTES), SECTOR) == replied(0)
    assert answer(disk, asked(READ, 0, SECTOR_BYTES), b"") == replied(0, SECTOR)
    assert answer(disk, asked(FLUSH), b"") == replied(0)


@pytest.mark.parametrize("request_", [asked(READ, SIZE, SECTOR_BYTES), asked(READ, 0, 3), asked(99)])
def test_request_that_cannot_be_done_is_an_error_and_no_end(request_: Request) -> None:
    assert answer(made(), request_, b"") == replied(errno.EINVAL)


class Client:
    """What QEMU does, in a few lines."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(path))

    def take(self, length: int) -> bytes:
        return self.socket.recv(length, socket.MSG_WAITALL)

    def option(self, number: int) -> tuple[int, bytes]:
        self.socket.sendall(struct.pack(">8sII", b"IHAVEOPT", number, 2) + b"\0\0")
        magic, option, kind, length = struct.unpack(">QIII", self.take(20))
        assert (magic, option) == (0x3E889045565A9, number)
        return kind, self.take(length)

    def send(self, command: int, offset: int = 0, data: bytes = b"") -> None:
        self.socket.sendall(struct.pack(">IHHQQI", MAGIC, 0, command, 7, offset, len(data)) + data)


@pytest.fixture
def disk() -> ForgetfulDisk:
    return made()


@pytest.fixture
def client(disk: ForgetfulDisk, tmp_path: Path) -> Iterator[Client]:
    server = Server(disk, tmp_path / "s")
    found = Client(tmp_path / "s")
    yield found
    found.socket.close()
    server.close()


def test_client_shakes_hands_writes_and_flushes(client: Client, disk: ForgetfulDisk) -> None:
    assert client.take(18) == b"NBDMAGICIHAVEOPT\0\3"
    client.socket.sendall(b"\0\0\0\3")
    assert client.option(8) == (0x80000001, b"")
    kind, export = client.option(7)
    assert (kind, struct.unpack(">HQH", export)) == (3, (0, SIZE, 0b101))
    assert struct.unpack(">QIII", client.take(20))[2] == 1
    for command, data in ((WRITE, SECTOR), (FLUSH, b"")):
        client.send(command, data=data)
        assert client.take(16) == replied(0)
    client.send(DISCONNECT)
    assert client.take(1) == b""
    disk.cut_now(0.0, Random(1))
    disk.power_on()
    assert disk.read(0, SECTOR_BYTES) == SECTOR


def test_client_without_power_gets_no_answer_and_no_end(client: Client, disk: ForgetfulDisk) -> None:
    client.take(18)
    client.socket.sendall(b"\0\0\0\3")
    client.option(7)
    client.take(20)
    disk.cut_now(0.0, Random(1))
    client.send(FLUSH)
    client.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.take(1)


def test_server_that_nobody_came_to_is_closed(tmp_path: Path) -> None:
    Server(made(), tmp_path / "s").close()
