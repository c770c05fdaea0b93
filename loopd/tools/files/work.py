"""What a call of a file tool is given beside its arguments, and how it is told to end."""

import threading
from dataclasses import dataclass, field

from loopd.tools.files.roots import Roots

PAGE_BYTES = 8000
"""Of an answer, some 2,700 tokens."""


class Stopped(Exception):
    """The call was cancelled; nobody waits for what it would have given."""


class Stop:
    """Tells work in a thread to end; it asks at every step."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """End the work at its next step."""
        self._event.set()

    def check(self) -> None:
        """Raise `Stopped` if the work is to end."""
        if self._event.is_set():
            raise Stopped


@dataclass(frozen=True, slots=True)
class Work:
    """One call.

    Attributes:
        roots: below which it works.
        page_bytes: about so long may an answer be, its first line left out.
        stop: ends it early.
    """

    roots: Roots
    page_bytes: int = PAGE_BYTES
    stop: Stop = field(default_factory=Stop)
