"""The tool port: what a provider of tools is to the rest of loopd (SPEC 6).

A port lists its tools and runs one. It never raises towards the loop: whatever happens becomes an `Outcome` that
the model can read. The registry joins the ports; executables and MCP servers are ports like the built-in one.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Effect = Literal["read", "write"]
PortState = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool as its port lists it. `name` is unique in its port; `schema` is JSON Schema of the arguments."""

    name: str
    description: str
    schema: dict[str, Any]
    effect: Effect = "read"
    example: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call gave, ready for the log.

    `content` is clean text (no lone surrogates, no NULs). `cut` is how many bytes were left out of the middle,
    `lossy` tells that bytes which are not UTF-8 were replaced, `approval` who allowed or denied it.
    """

    ok: bool
    content: str
    cut: int = 0
    lossy: bool = False
    approval: str | None = None


class ToolPort(Protocol):
    """A provider of tools."""

    @property
    def name(self) -> str:
        """The port's name: `builtin`, an executable's directory, an MCP server's name."""
        ...

    @property
    def state(self) -> PortState:
        """`down` makes the tools unavailable with a clear result; it changes no baseline and fails no start."""
        ...

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools it has now, in a stable order. A port that is down returns those it last had."""
        ...

    async def run(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Run one tool to its end. Cancelling it ends the tool and all its processes."""
        ...

    async def close(self) -> None:
        """End everything the port started."""
        ...
