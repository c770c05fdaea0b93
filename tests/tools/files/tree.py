"""A root with something beside it that must never be seen, and ways to ask for it."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from loopd.config import parse_config
from loopd.errors import ToolError
from loopd.home import Home
from loopd.tools.files.listing import list_directory
from loopd.tools.files.reading import read
from loopd.tools.files.roots import Roots
from loopd.tools.files.searching import search
from loopd.tools.files.work import Work
from loopd.tools.files.writing import write

HIDDEN = "hidden-treasure"
INSIDE = "inside"
TOOLS = {"read": read, "list": list_directory, "search": search, "write": write}


def roots_of(home: Path, **files: list[Path]) -> Roots:
    table = {kind: list(map(str, paths)) for kind, paths in files.items()}
    return Roots.of(parse_config({"tools": {"files": table}}, source="test"), Home(home))


@dataclass
class Tree:
    """`docs` is the root; `outside` beside it holds secrets in contents and names."""

    path: Path
    writable: bool = True

    def __post_init__(self) -> None:
        self.docs, self.outside = self.path / "docs", self.path / "outside"
        for directory in (self.docs, self.outside):
            directory.mkdir(parents=True)
        self.put("docs/note.txt", f"{INSIDE}\n")
        self.put("docs/door/note.txt", f"{INSIDE}\n")
        self.put("outside/note.txt", f"{HIDDEN}\n")
        self.put(f"outside/{HIDDEN}.txt", f"{HIDDEN}\n")

    @cached_property
    def roots(self) -> Roots:
        return roots_of(self.path / "home", **{"write" if self.writable else "read": [self.docs]})

    def put(self, path: str, text: str) -> Path:
        file = self.path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def __call__(self, tool: str, **arguments: Any) -> str:
        return TOOLS[tool](Work(self.roots), arguments)

    def fault(self, tool: str, **arguments: Any) -> str:
        """Run what must fail and return its one line."""
        with pytest.raises(ToolError) as caught:
            self(tool, **arguments)
        assert "\n" not in caught.value.message
        assert HIDDEN not in caught.value.message
        return caught.value.message

    def beside(self) -> dict[str, str]:
        """Return all that is outside, to see whether anything was written there."""
        files = (path for path in self.path.rglob("*") if self.docs not in path.parents)
        return {str(path): path.read_text(encoding="utf-8") for path in files if path.is_file()}

    def leftovers(self) -> list[str]:
        """Return the drafts of files that were not removed."""
        return [path.name for path in self.path.rglob(".loopd-*")]


@contextmanager
def public_directory() -> Iterator[Path]:
    """A directory that every user may reach."""
    directory = Path(tempfile.mkdtemp(prefix="loopd-"))
    directory.chmod(0o755)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Be no root for the time of a block: to root nothing is denied."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was == 0:
            os.seteuid(0)
