"""A socket path that is short enough for a Unix socket."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def socket_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="loopd-") as directory:
        yield f"unix:{Path(directory) / 'model.sock'}"
