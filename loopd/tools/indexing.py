"""Makes the index of what the ports list in a thread of its own; the one before ranks meanwhile (SPEC 6).

With vectors (`[tools] ranking = "semantic"`) a new index ranks by words until its vectors are there.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from loopd.clock import monotonic_s
from loopd.config import Ranking
from loopd.tools.port import Tool
from loopd.tools.ranking import Index, Vectors

if TYPE_CHECKING:
    from loopd.tools.semantic import Embedder

log = logging.getLogger(__name__)

_Tools = Sequence[tuple[str, Tool]]


class Indexer:
    """Ranks by the newest index that is ready. Used from one thread; it keeps one more at work.

    Args:
        store: file in which vectors outlive a restart (a cache); None keeps them in memory only.
    """

    def __init__(self, store: Path | None = None) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="index")
        self._index = Index(())
        self._wanted: object = None
        self._made: Future[None] | None = None
        self._embedder: Embedder | None = None

    def rank(self, query: str, limit: int) -> list[str]:
        """Return the full names of up to `limit` tools for a need in words, the best first."""
        return self._index.rank(query, limit)

    def want(self, tools: _Tools, ranking: Ranking) -> None:
        """Have the index made of these tools; what was wanted before is given up."""
        self._wanted = tools
        self._made = self._pool.submit(self._make, tools)
        if ranking == "semantic":
            self._pool.submit(self._add_vectors, tools)

    async def ready(self, *, first_s: float, next_s: float) -> None:
        """Wait until the index is the wanted one: up to `first_s` if there was none before, else up to `next_s`."""
        if self._made:
            timeout_s = next_s if self._index.names else first_s
            await asyncio.wait([asyncio.wrap_future(self._made)], timeout=timeout_s)

    def close(self) -> None:
        """End the thread; what it is at is given up."""
        self._wanted = None
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, tools: _Tools) -> None:
        if tools is not self._wanted:
            return
        try:
            self._index = Index(tools)
        except (sqlite3.Error, MemoryError) as error:
            log.error("index_failed tools=%d error=%r", len(tools), str(error))  # noqa: TRY400 - the message tells

    def _add_vectors(self, tools: _Tools) -> None:
        """Give the index its vectors. Whatever goes wrong with them, words go on ranking."""
        index, began_s = self._index, monotonic_s()
        if tools is not self._wanted:
            return
        try:
            vectors = self._vectors(tools)
        except Exception as error:  # noqa: BLE001 - the end of a thread's work, in another's code and on disk
            log.warning("vectors_failed tools=%d error=%r", len(tools), f"{type(error).__name__}: {error}")
            return
        if vectors:
            index.vectors = vectors
            log.info("vectors tools=%d s=%.1f", len(tools), monotonic_s() - began_s)

    def _vectors(self, tools: _Tools) -> Vectors | None:
        # It imports numpy and 130 MB of weights: only for who asks for it.
        from loopd.tools.semantic import Encoder, made  # noqa: PLC0415

        self._embedder = self._embedder or Encoder()
        return made(tools, self._embedder, self._store, wanted=lambda: tools is self._wanted)
