"""Canonical JSON (SPEC 2.3): sorted keys, no insignificant white space, UTF-8 unescaped, no NaN, stable numbers.

Hashes are over these bytes, so they agree across processes, locales, releases and machines.
"""

import hashlib
import json
import math
from typing import Any

_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False
).encode


def canonical(value: Any) -> bytes:  # noqa: ANN401 - any JSON value
    """Return `value` as canonical JSON, without a newline.

    Raises:
        ValueError: NaN, an infinity, or a lone surrogate, none of which UTF-8 JSON can hold.
        TypeError: not a JSON value.
    """
    return _encode(value).encode("utf-8")


def sha256(data: bytes) -> str:
    """Return `sha256:` and the hex digest of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def object_text(text: str) -> str | None:
    """Return `text` as compact JSON in its own key order if it is a JSON object, else None.

    This is the one place where order is not sorted: what a model wrote goes back to it in its order (SPEC 2.3).
    Numbers that do not survive (an infinity, NaN) and lone surrogates make it None too.
    """
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if not isinstance(value, dict):
            return None
        compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        compact.encode("utf-8")
    except (ValueError, RecursionError):
        return None
    return compact


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number
