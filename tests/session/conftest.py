import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopd.home import Home
from loopd.session.store import Session
from tests.session.builders import create, make_home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home")


@pytest.fixture
def session(home: Home) -> Iterator[Session]:
    with_it = create(home)
    yield with_it
    with_it.close()


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of thousands of sessions that are not about durability."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda _descriptor: None)
