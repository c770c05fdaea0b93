"""A served home with a fake engine, and `bxctl` pointed at it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loopd.config import Config, parse_config
from loopd.home import Home
from tests.channel.fakes import FakeEngine, new_home, short_directory
from tests.cli.daemon import Bxctl, daemon_thread


@pytest.fixture
def root(request: pytest.FixtureRequest) -> Path:
    return short_directory(request.addfinalizer)


@pytest.fixture
def home(root: Path) -> Home:
    return new_home(root)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def bxctl(root: Path, home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Bxctl:
    monkeypatch.setenv("LOOPD_HOME", str(home.path))
    monkeypatch.setenv("LOOPD_CONFIG", str(root / "loopd.toml"))
    monkeypatch.setenv("LOOPD_SOCKET", str(root / "c.sock"))
    return Bxctl(capsys, monkeypatch)


@pytest.fixture
def config(root: Path) -> Config:
    return parse_config({"channel": {"socket": str(root / "c.sock")}, "loop": {"min_free_bytes": 0}}, source="test")


@pytest.fixture
def served(home: Home, config: Config, engine: FakeEngine, bxctl: Bxctl) -> Iterator[Bxctl]:
    with daemon_thread(home, config, engine):
        yield bxctl
