"""The bundle of a folder of programs; those of wheels need a package index and are proved by a rollout."""

import tarfile
from pathlib import Path

import pytest

from tests.rollout.scripts import loaded

bundle = loaded("bundle.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    (folder / "lib").mkdir(parents=True)
    (folder / "hello").write_text("#!/bin/sh\n")
    (folder / "hello").chmod(0o775)
    (folder / "hello.toml").write_text('description = "Say hello"\n')
    (folder / "lib" / "words").write_text("hello\n")
    return folder


def test_programs_are_packed_with_their_folders_and_stay_executable(folder: Path, tmp_path: Path) -> None:
    facts = bundle.programs(folder, tmp_path / "build")
    with tarfile.open(facts["tar"]) as tar:
        assert {file.name: file.mode for file in tar} == {"hello": 0o755, "hello.toml": 0o644, "lib/words": 0o644}
    assert facts["name"] == f"programs-{facts['sha256'][:12]}"


def test_bundle_is_named_by_content_and_rights_alone(folder: Path, tmp_path: Path) -> None:
    before = bundle.programs(folder, tmp_path / "build")
    (folder / "hello").touch()
    assert bundle.programs(folder, tmp_path / "elsewhere")["sha256"] == before["sha256"]
    (folder / "hello").chmod(0o644)
    assert bundle.programs(folder, tmp_path / "build")["sha256"] != before["sha256"]


def test_what_is_hidden_is_left_out(folder: Path, tmp_path: Path) -> None:
    before = bundle.programs(folder, tmp_path / "build")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("")
    (folder / ".hello.swp").write_text("")
    assert bundle.programs(folder, tmp_path / "build")["sha256"] == before["sha256"]


def test_what_cannot_be_copied_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    (folder / "gone").symlink_to("nowhere")
    with pytest.raises(bundle.BundleError, match="programs/gone: neither a file nor a folder"):
        bundle.programs(folder, tmp_path / "build")
    with pytest.raises(bundle.BundleError, match="none: there is no such folder"):
        bundle.programs(tmp_path / "none", tmp_path / "build")
