"""What holds for every test: no example is judged by how long it took, since machines are noisy; no umask stays."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("loopd", deadline=None)
settings.load_profile("loopd")


@pytest.fixture(autouse=True)
def _own_umask() -> Iterator[None]:
    """Take back a umask that a server in this process has set for its own."""
    before = os.umask(0o022)
    yield
    os.umask(before)
