"""Vectors by a stand-in, whose vector of a text counts its letters, and once by the real encoder of the extra."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from loopd.tools.ranking import Index
from loopd.tools.semantic import Encoder, Vector, made
from tests.tools.fake import tool

TOOLS = [("s", tool("aaa", "Aaa.")), ("s", tool("bbb", "Bbb. Ccc ddd.")), ("s", tool("zzz"))]


class Letters:
    def __init__(self, name: str = "letters 1") -> None:
        self.name = name
        self.embedded: list[str] = []

    def embed(self, text: str) -> Vector:
        self.embedded.append(text)
        counts = np.array([text.lower().count(chr(ord("a") + n)) for n in range(26)], dtype=np.float32)
        return np.asarray(counts / (np.linalg.norm(counts) or 1), dtype=np.float32)


def nearest(query: str, store: Path | None = None, embedder: Letters | None = None) -> list[int]:
    vectors = made(TOOLS, embedder or Letters(), store, wanted=lambda: True)
    assert vectors is not None
    return vectors.nearest(query, 2)


def test_the_nearest_in_meaning_come_first_and_equals_keep_their_order() -> None:
    assert nearest("bbbb") == [1, 0]
    assert nearest("qqqq") == [0, 1]
    assert nearest(" \n\0") == []


def test_a_tool_is_its_name_and_its_server_name_and_first_sentence() -> None:
    embedder = Letters()
    nearest("x", embedder=embedder)
    assert embedder.embedded[2:4] == ["bbb", "s bbb: Bbb."]


def test_after_a_restart_nothing_is_embedded_anew_and_the_order_is_the_same(tmp_path: Path) -> None:
    store = tmp_path / "vectors.db"
    before = nearest("azb", store)
    embedder = Letters()
    assert nearest("azb", store, embedder) == before
    assert embedder.embedded == ["azb"]


def test_another_model_takes_nothing_from_the_store(tmp_path: Path) -> None:
    store = tmp_path / "vectors.db"
    nearest("a", store)
    embedder = Letters("letters 2")
    nearest("a", store, embedder)
    assert len(embedder.embedded) == 2 * len(TOOLS) + 1


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096])
def test_a_damaged_store_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    store = tmp_path / "vectors.db"
    store.write_bytes(damage)
    assert nearest("b", store) == [1, 0]
    embedder = Letters()
    nearest("b", store, embedder)
    assert embedder.embedded == ["b"]


def test_a_store_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    assert nearest("b", tmp_path / "no such directory" / "vectors.db") == [1, 0]


def test_what_is_not_wanted_any_longer_is_given_up_and_what_was_made_is_kept(tmp_path: Path) -> None:
    store, embedder = tmp_path / "vectors.db", Letters()
    assert made(TOOLS, embedder, store, wanted=lambda: len(embedder.embedded) < 2) is None
    assert embedder.embedded == ["aaa", "s aaa: Aaa."]
    with sqlite3.connect(store) as file:
        assert file.execute("SELECT count(*) FROM vector").fetchone() == (1,)
    file.close()


def test_vectors_of_tools_that_are_gone_are_dropped_when_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "vectors.db"
    made([("old", tool(f"t{n}")) for n in range(5)], Letters(), store, wanted=lambda: True)
    monkeypatch.setattr("loopd.tools.semantic._MAX_STORED", 5)
    nearest("b", store)
    with sqlite3.connect(store) as file:
        assert file.execute("SELECT count(*) FROM vector").fetchone() == (len(TOOLS),)
    file.close()


def test_lone_surrogates_and_nuls_of_a_foreign_list_do_no_harm() -> None:
    vectors = made([("s\ud800", tool("a\ud800b\0c", "d\udfff\0e"))], Letters(), None, wanted=lambda: True)
    assert vectors is not None
    assert vectors.nearest("\ud800 a", 3) == [0]


def test_the_encoder_finds_tools_that_share_no_word_also_in_other_languages() -> None:
    tools = [
        ("lights", tool("set_brightness", "Set the brightness of a lamp.")),
        ("mail", tool("send_message", "Send an email.")),
        ("weather", tool("forecast", "Weather forecast for a place.")),
        ("bank", tool("list_transactions", "List the transactions of an account.")),
        ("empty", tool("", "")),
    ]
    encoder, index = Encoder(), Index(tools)
    index.vectors = made(tools, encoder, None, wanted=lambda: True)
    assert index.rank("will I get wet tomorrow", 1) == ["weather.forecast"]
    assert index.rank("mach es im Wohnzimmer heller", 1) == ["lights.set_brightness"]
    assert index.rank("\ud800🙂 予報 " + "word " * 10_000, 5)
    assert np.array_equal(encoder.embed("send an email"), encoder.embed("send an email"))
