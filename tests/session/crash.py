"""Really kill a process before or after each call that changes the disk."""

import os
from collections.abc import Callable
from typing import Any

CHANGES = ("open", "mkdir", "rename", "write", "fsync", "fdatasync", "ftruncate", "unlink", "rmdir")
_KILLED, _DONE, _FAILED = 9, 0, 1


class _Countdown:
    def __init__(self, point: int) -> None:
        self.left = point

    def tick(self) -> None:
        if self.left == 0:
            os._exit(_KILLED)
        self.left -= 1

    def around(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            value = real(*args, **kwargs)
            self.tick()
            return value

        return call


def killed_at(point: int, action: Callable[[], object]) -> bool:
    """Run `action` in a child that dies at its point-th chance; False if it ended before that."""
    child = os.fork()
    if child == 0:
        try:
            countdown = _Countdown(point)
            for name in CHANGES:
                setattr(os, name, countdown.around(getattr(os, name)))
            action()
            os._exit(_DONE)
        finally:
            os._exit(_FAILED)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in {_KILLED, _DONE}, f"the child ended with {status}"
    return status == _KILLED
