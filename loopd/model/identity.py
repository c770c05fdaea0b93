"""Which model and which template a server has (SPEC 2.3). The hash of a large file is computed once."""

import asyncio
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from loopd.model.client import ServerFacts
from loopd.model.templates import DEFAULT_TEMPLATE, bundled_template
from loopd.proto.canonical import sha256
from loopd.proto.model_identity import ModelIdentity, TemplateIdentity

FIXED_DATE = "01 Jan 2025"


class FileHash(BaseModel):
    """The hash of a file, and what tells that it is still the same file."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    inode: int
    size: int
    mtime_ns: int
    sha256: str


async def model_identity(
    facts: ServerFacts, known: Mapping[str, FileHash]
) -> tuple[ModelIdentity, dict[str, FileHash]]:
    """Return the model's identity, and the hashes to keep: `known` and, where it was computed, the new one."""
    hashes = dict(known)
    digest = None
    if facts.model_path:
        digest = await asyncio.to_thread(_hash, Path(facts.model_path), hashes)
    return ModelIdentity(alias=facts.alias, sha256=digest, size=facts.model_size), hashes


def template_identity(facts: ServerFacts) -> TemplateIdentity:
    """Return the template's identity: the text is what counts, and a bundled one is known by its name.

    A template that asks for the date gets a fixed one, where it takes it from its options.
    """
    text = facts.template or ""
    name = DEFAULT_TEMPLATE if text == bundled_template(DEFAULT_TEMPLATE) else "server"
    options = {"date_string": FIXED_DATE} if "date_string" in text else {}
    return TemplateIdentity(name=name, sha256=sha256(text.encode()), options={**options})


def _hash(path: Path, hashes: dict[str, FileHash]) -> str | None:
    """Return the file's hash, from `hashes` if it is still the same file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            now = os.fstat(file.fileno())
            known = hashes.get(str(path))
            if known and (known.inode, known.size, known.mtime_ns) == (now.st_ino, now.st_size, now.st_mtime_ns):
                return known.sha256
            digest = "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
    hashes[str(path)] = FileHash(inode=now.st_ino, size=now.st_size, mtime_ns=now.st_mtime_ns, sha256=digest)
    return digest
