import pytest

from loopd.tools.mcp import port


@pytest.fixture(autouse=True)
def _tried_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "_FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(port, "_LISTING_PAUSE_S", 0.01)
