"""Session ids and idempotency keys: checked before they touch a path (SPEC 2)."""

import re
import secrets

from loopd.errors import UsageError

_SESSION_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}\Z")

MAX_KEY_CHARS = 128


def is_session_id(text: str) -> bool:
    """Tell whether `text` is 1-64 of `a-z 0-9 - _`, beginning with a letter or digit."""
    return _SESSION_ID.match(text) is not None


def check_session_id(text: str) -> str:
    """Return `text` if it is a session id.

    Raises:
        UsageError: it is not; nothing was looked up on disk.
    """
    if not is_session_id(text):
        raise UsageError(
            f"{text[:80]!r} is not a session id: 1-64 of a-z 0-9 - _, beginning with a letter or digit",
            hint="bxctl sessions lists the ids",
        )
    return text


def new_session_id() -> str:
    """Return a fresh id of 10 characters, easy to type and to select with a double click."""
    return "s" + secrets.token_hex(5)[:9]


def new_key() -> str:
    """Return a fresh idempotency key (128 random bits)."""
    return secrets.token_hex(16)
