"""Which ports the configuration asks for: the one place that knows every kind (SPEC 6)."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from loopd.config import Config
from loopd.home import Home
from loopd.tools.builtin import Builtin
from loopd.tools.children import Children
from loopd.tools.executables import Executables
from loopd.tools.files.port import Files
from loopd.tools.files.roots import Roots
from loopd.tools.mcp.port import McpPort
from loopd.tools.registry import PortPlan


def plans(config: Config, home: Home, children: Children) -> Iterator[PortPlan]:
    """Yield the ports of `[tools]`, in the order that decides between equal hits.

    Args:
        config: `[tools]` says which ports, `[loop]` how large a result may be.
        home: whose disk is reported, and where the lists of MCP servers are kept.
        children: starts the processes of tools.
    """
    table, max_bytes = config.tools, config.loop.max_result_bytes
    yield PortPlan("builtin", table.builtin, lambda: Builtin(table.builtin, disk=home.path))
    if "files" in table.builtin and (table.files.read or table.files.write):
        roots = Roots.of(config, home)
        yield PortPlan("files", (roots, max_bytes), lambda: Files(roots, max_bytes))
    if table.executables:
        directory = Path(table.executables)
        yield PortPlan("executables", (directory, max_bytes), lambda: Executables(directory, children, max_bytes))
    for name, server in table.mcp.items():
        make = partial(McpPort, name, server, lists=home.tool_lists, children=children, max_bytes=max_bytes)
        yield PortPlan(name, (server, max_bytes), make)
