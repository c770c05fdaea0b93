"""The tool port: what a provider of tools is to the rest of loopd (SPEC 6).

A port lists its tools and runs one. It never raises towards the loop: whatever happens becomes an `Outcome` that
the model can read. The registry joins the ports; executables and MCP servers are ports like the built-in one.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from loopd.config import Effect

PortState = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool as its port lists it. `name` is unique in its port; `schema` is JSON Schema of the arguments.

    `timeout_s` bounds a call more tightly than `[loop] tool_timeout_s`; None leaves it at that.
    """

    name: str
    description: str
    schema: dict[str, Any]
    effect: Effect = "read"
    example: dict[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None


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


def doubt(effect: Effect) -> str:
    """Return what must be said of a call that began and was not seen to end: nothing where it only reads."""
    if effect == "read":
        return ""
    return " Whether it took effect is unknown: look at what is there before you call it again."


class ToolPort(Protocol):
    """A provider of tools."""

    @property
    def name(self) -> str:
        """The port's name: `builtin`, `files`, `executables`, or that of an MCP server."""
        ...

    @property
    def state(self) -> PortState:
        """`down` makes the tools unavailable with a clear result; it changes no baseline and fails no start."""
        ...

    @property
    def reason(self) -> str:
        """Why it is down, or what of it is left out while it is up, in one line; "" if there is nothing to say."""
        ...

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools it has now, in a stable order. A port that is down returns those it last had."""
        ...

    async def run(self, name: str, arguments: dict[str, Any]) -> Outcome:
        """Run one tool to its end. Cancelling it ends the tool and all its processes."""
        ...

    async def keep(self) -> None:
        """Keep the port up until cancelled: connect, list, connect again. Returns where there is nothing to keep.

        Cancelling it ends everything that the port started. Never raises anything else.
        """
        ...
