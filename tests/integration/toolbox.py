"""`loopd` with one more tool port, `hand`, whose tools write to files; run as `python -m tests.integration.toolbox`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loopd import serve
from loopd.cli.loopd import main
from loopd.config import ToolsTable
from loopd.home import Home
from loopd.tools.port import Outcome, Tool
from loopd.tools.ports import plans
from loopd.tools.registry import PortPlan
from tests.tools.fake import FakePort

_PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_TOOLS = (
    Tool("note", "Write a line to a file.", _PATH, effect="write"),
    Tool("hang", "Write a line to a file and never end.", _PATH, effect="write"),
    Tool("look", "Read a file.", _PATH),
)


async def _behave(name: str, arguments: dict[str, Any]) -> Outcome:
    content = _look(**arguments) if name == "look" else _note(**arguments)
    if name == "hang":
        await asyncio.Event().wait()
    return Outcome(ok=True, content=content)


def _look(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _note(path: str, line: str = "a line") -> str:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")
    return "written"


def _with_hand(table: ToolsTable, home: Home) -> Iterator[PortPlan]:
    yield from plans(table, home)
    yield PortPlan("hand", None, lambda: FakePort("hand", *_TOOLS, behaviour=_behave))


if __name__ == "__main__":
    setattr(serve, "plans", _with_hand)  # noqa: B010 - it is no public name of that module
    main()
