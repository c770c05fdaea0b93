"""A port of an MCP server with everything real below it: the runner, the process, the SDK."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loopd.config import McpTable, ToolsTable
from loopd.tools.children import Children
from loopd.tools.mcp.port import McpPort

PATIENCE_S = 60.0
FAKE = Path(__file__).parent / "fake_server.py"


class Held:
    """What a test holds in its hand.

    Attributes:
        port: named `fake`.
        config_path: of the fake server.
    """

    def __init__(self, directory: Path, table: McpTable, children: Children) -> None:
        self.config_path = directory / "fake.json"
        self.port = McpPort("fake", table, lists=directory / "tool-lists", children=children, max_bytes=4096)
        self.kept: asyncio.Task[None] | None = None
        self._log = _Log()

    def stop(self) -> None:
        assert self.kept is not None
        self.kept.cancel()

    def configure(self, **settings: Any) -> None:
        self.config_path.write_text(json.dumps(settings), encoding="utf-8")

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until it is so; looked at whenever the port has logged something."""
        async with asyncio.timeout(PATIENCE_S):
            while not done():
                await self._log.more()

    async def up(self) -> None:
        await self.until(lambda: self.port.state == "up")

    async def logged(self, words: str) -> None:
        await self.until(lambda: words in self.log())

    def log(self) -> str:
        return "\n".join(self._log.lines)

    def names(self) -> list[str]:
        return [tool.name for tool in self.port.tools()]

    async def call(self, name: str, text: str = "") -> str:
        async with asyncio.timeout(PATIENCE_S):
            outcome = await self.port.run(name, {"text": text})
        return outcome.content if outcome.ok else f"not ok: {outcome.content}"


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._news = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self._news.set()

    async def more(self) -> None:
        self._news.clear()
        await self._news.wait()

    def __enter__(self) -> None:
        logger = logging.getLogger("loopd.mcp")
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("loopd.mcp").removeHandler(self)


def table(directory: Path, **keys: Any) -> McpTable:
    """Settings for the fake server, or for another by `url` or `command`."""
    command = (sys.executable, "-ES", str(FAKE), str(directory / "fake.json"))
    return McpTable(**{"command": () if "url" in keys else command, **keys})


@asynccontextmanager
async def held(directory: Path, settings: dict[str, Any] | None = None, **keys: Any) -> AsyncIterator[Held]:
    """Keep a port for the time of a block. `settings` are the fake server's, `keys` those of `[tools.mcp.fake]`."""
    children = Children(ToolsTable, directory / "run")
    holding = Held(directory, table(directory, **keys), children)
    holding.configure(**(settings or {}))
    with holding._log:
        async with asyncio.TaskGroup() as group:
            runner = group.create_task(children.keep())
            holding.kept = group.create_task(holding.port.keep())
            try:
                yield holding
            finally:
                # The runner goes last, as in the daemon: whoever has a child closes it.
                holding.stop()
                await asyncio.wait([holding.kept])
                runner.cancel()
