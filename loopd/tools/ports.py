"""Which ports the configuration asks for: the one place that knows every kind (SPEC 6)."""

from collections.abc import Iterator

from loopd.config import ToolsTable
from loopd.home import Home
from loopd.tools.builtin import Builtin
from loopd.tools.files.port import Files
from loopd.tools.files.roots import Roots
from loopd.tools.registry import PortPlan


def plans(table: ToolsTable, home: Home) -> Iterator[PortPlan]:
    """Yield the ports of `[tools]`, in the order that decides between equal hits.

    Args:
        table: `[tools]`.
        home: whose disk is reported, and where the lists of MCP servers are kept.
    """
    yield PortPlan("builtin", table.builtin, lambda: Builtin(table.builtin, disk=home.path))
    if "files" in table.builtin and (table.files.read or table.files.write):
        roots = Roots.of(table.files, home)
        yield PortPlan("files", roots, lambda: Files(roots))
