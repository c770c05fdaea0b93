"""A home, a configuration with a short socket path, and a daemon with a fake engine."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loopd.config import Config, parse_config
from loopd.home import Home
from tests.channel.fakes import Daemon, FakeEngine, new_home, serving, short_directory


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Path:
    return short_directory(request.addfinalizer)


@pytest.fixture
def home(root: Path) -> Home:
    return new_home(root)


@pytest.fixture
def config(root: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.delenv("LOOPD_SOCKET", raising=False)
    return parse_config({"channel": {"socket": str(root / "c.sock")}, "loop": {"min_free_bytes": 0}}, source="test")


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def daemon(home: Home, config: Config, engine: FakeEngine) -> AsyncIterator[Daemon]:
    async with serving(home, config, engine) as running:
        yield running
