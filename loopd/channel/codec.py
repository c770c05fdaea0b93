r"""The channel's framing: bytes to lines, lines to frames and back. Pure: no I/O, no clock (SPEC 8).

A frame is one JSON object in UTF-8, ended by `\n`. A line over the limit is skipped to its newline and reported
once, so the connection lives on and memory stays bounded by the limit. An empty line is ignored. Bytes behind the
last newline are half a frame: they wait for more and mean nothing if the stream ends.
"""

import json

from pydantic import ValidationError

from loopd.errors import FrameInvalid, FrameTooLarge
from loopd.proto.frames import CLIENT_FRAME, SERVER_FRAME, ClientFrame, ServerFrame

_SHOWN_FAULT_CHARS = 200


class LineDecoder:
    """Splits a byte stream into lines, whatever the sizes of its pieces.

    Args:
        max_bytes: the longest line that is passed on, its newline not counted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> list[bytes | FrameTooLarge]:
        """Return what `data` completes, in order: each line without its newline, or the error of one too long."""
        done: list[bytes | FrameTooLarge] = []
        *whole, rest = data.split(b"\n")
        for part in whole:
            self._add(part)
            line = self._take()
            if line:
                done.append(line)
        self._add(rest)
        return done

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._max_bytes:
            self._parts.clear()
        elif part:
            self._parts.append(part)

    def _take(self) -> bytes | FrameTooLarge:
        size, line = self._size, b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        if size > self._max_bytes:
            return FrameTooLarge(f"a frame of {size} bytes was skipped: at most {self._max_bytes} are allowed")
        return line


def encode(frame: ClientFrame | ServerFrame) -> bytes:
    r"""Return the frame as its line, `\n` included. A `ref` that is not set is left out."""
    return frame.model_dump_json(exclude={"ref"} if frame.ref is None else None).encode() + b"\n"


def decode_client(line: bytes) -> ClientFrame:
    """Return the client's frame.

    Raises:
        FrameInvalid: not JSON, of no known type, or a field is missing or wrong.
    """
    try:
        return CLIENT_FRAME.validate_json(line)
    except ValidationError as error:
        raise FrameInvalid(_fault(error), hint="one JSON object a line, with a type of this protocol") from error


def decode_server(line: bytes) -> ServerFrame:
    """Return the server's frame.

    Raises:
        FrameInvalid: as `decode_client`.
    """
    try:
        return SERVER_FRAME.validate_json(line)
    except ValidationError as error:
        raise FrameInvalid(_fault(error)) from error


def ref_of(line: bytes) -> str | None:
    """Return the `ref` of a line that is no valid frame, so that the error can carry it; None where it has none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    ref = value.get("ref") if isinstance(value, dict) else None
    return ref if isinstance(ref, str) else None


def _fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"not a frame: {where + ': ' if where else ''}{fault['msg']}"[:_SHOWN_FAULT_CHARS]
