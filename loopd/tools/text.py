"""A tool's output: bytes until proven UTF-8, kept head and tail, of bounded size (SPEC 5, 6).

Output may be endless, binary, or both. `Capture` holds at most twice its limit in memory whatever is fed to it.
"""

import codecs
import re
from dataclasses import dataclass

_UNCLEAN = re.compile("[\0\ud800-\udfff]")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_NOTICE_BYTES = 48


@dataclass(frozen=True, slots=True)
class Text:
    """Clean text: valid UTF-8 when encoded, no NUL.

    Attributes:
        text: what was kept, with a notice where something was left out.
        cut: bytes left out of the middle, 0 if all is there.
        lossy: bytes that are not UTF-8, or NULs, were replaced.
    """

    text: str
    cut: int
    lossy: bool


class Capture:
    """Takes bytes as they come and keeps the head and the tail of the text they make.

    Args:
        max_bytes: upper bound of the text in UTF-8, notice included; at least 256.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._start = bytearray()
        self._end = bytearray()
        self._total_bytes = 0
        self._lossy = False

    def feed(self, data: bytes) -> None:
        """Take the next bytes; a character may be split between two calls."""
        self.feed_text(self._decoder.decode(data))

    def feed_text(self, text: str) -> None:
        """Take the next text; lone surrogates and NULs in it are replaced."""
        clean, replaced = _UNCLEAN.subn(_REPLACEMENT, text)
        self._lossy = self._lossy or replaced > 0
        data = clean.encode("utf-8")
        self._total_bytes += len(data)
        room = self._max_bytes // 2 - len(self._start)
        self._start += data[:room]
        self._end += data[room:]
        del self._end[: -self._max_bytes]

    def finish(self) -> Text:
        """Return what was kept; nothing may be fed after it."""
        self.feed_text(self._decoder.decode(b"", final=True))
        if self._total_bytes <= self._max_bytes:
            return Text((self._start + self._end).decode("utf-8"), 0, self._lossy)
        half = (self._max_bytes - _NOTICE_BYTES) // 2
        # Both sides are valid UTF-8 that may now begin or end inside a character: "ignore" drops just that part.
        start = self._start[:half].decode("utf-8", "ignore")
        end = self._end[-half:].decode("utf-8", "ignore")
        cut = self._total_bytes - len(start.encode()) - len(end.encode())
        return Text(f"{start}\n[... {cut} bytes left out ...]\n{end}", cut, self._lossy)


def clean(text: str, max_bytes: int) -> Text:
    """Return `text` as `Capture` keeps it."""
    capture = Capture(max_bytes)
    capture.feed_text(text)
    return capture.finish()
