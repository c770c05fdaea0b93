"""A port whose tools, state and behaviour a test sets."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from loopd.tools.port import Outcome, PortState, Tool, ToolPort
from loopd.tools.registry import PortPlan

Behaviour = Callable[[str, dict[str, Any]], Awaitable[Outcome]]


async def echo(name: str, arguments: dict[str, Any]) -> Outcome:
    return Outcome(ok=True, content=f"{name} {arguments}")


class FakePort:
    def __init__(self, name: str, *tools: Tool, behaviour: Behaviour = echo) -> None:
        self.name = name
        self.state: PortState = "up"
        self.reason = ""
        self.listed = tools
        self.behaviour = behaviour
        self.kept = asyncio.Event()

    def tools(self) -> tuple[Tool, ...]:
        return self.listed

    async def run(self, name: str, arguments: dict[str, Any]) -> Outcome:
        return await self.behaviour(name, arguments)

    async def keep(self) -> None:
        self.kept.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.kept.clear()


def planned(*ports: ToolPort) -> list[PortPlan]:
    """Plans that give these very ports."""
    return [PortPlan(port.name, id(port), lambda port=port: port) for port in ports]  # type: ignore[misc]


def tool(name: str, description: str = "", **properties: dict[str, Any]) -> Tool:
    """A tool whose arguments are all required."""
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return Tool(name, description, schema)
