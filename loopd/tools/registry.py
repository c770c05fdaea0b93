"""The registry joins the ports: what the model may call, and running a call to a result (SPEC 6)."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from loopd.clock import now
from loopd.config import ToolsTable
from loopd.errors import ToolError
from loopd.tools.call import Call, Find, Prepared, Refused, prepare
from loopd.tools.catalogue import Absent, Catalogue
from loopd.tools.counts import Counts
from loopd.tools.find import answer
from loopd.tools.indexing import Indexer
from loopd.tools.meta import DEFINITIONS
from loopd.tools.policy import decide
from loopd.tools.port import Outcome, Tool, ToolPort, doubt
from loopd.tools.text import clean

_Listed = tuple[tuple[str, tuple[Tool, ...]], ...]

_MAX_WHY_CHARS = 400
_LOOK_S = 2.0
_INDEX_WAIT_S = 1.0
_FIRST_INDEX_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class PortPlan:
    """A port that the configuration asks for.

    Attributes:
        name: the port's.
        settings: what it is made from; a port whose settings have not changed is kept.
        make: makes it.
    """

    name: str
    settings: Any
    make: Callable[[], ToolPort]


class Registry:
    """All ports together. What they list may change at any time; the definitions that the model sees never do.

    Args:
        plans: the ports, with names of their own; their order decides between equal hits.
        table: `[tools]`.
        vectors: the file that keeps the vectors of semantic ranking; None for none.

    Attributes:
        definitions: OpenAI tool definitions, the same in every baseline.
    """

    definitions: tuple[dict[str, Any], ...] = DEFINITIONS

    def __init__(self, plans: Iterable[PortPlan], table: ToolsTable, *, vectors: Path | None = None) -> None:
        self._ports: dict[str, ToolPort] = {}
        self._settings: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._listed: _Listed | None = None
        self._indexer = Indexer(vectors)
        self._catalogue = Catalogue((), self._indexer)
        self._counts = Counts()
        self.reconfigure(plans, table)

    def reconfigure(self, plans: Iterable[PortPlan], table: ToolsTable) -> None:
        """Take another set of ports into use from the next call on; a port with the same settings goes on."""
        before, settings = self._ports, self._settings
        self._table, self._ports, self._settings, self._listed = table, {}, {}, None
        for plan in plans:
            same = plan.name in before and settings[plan.name] == plan.settings
            self._ports[plan.name] = before[plan.name] if same else plan.make()
            self._settings[plan.name] = plan.settings
        self._changed.set()

    async def keep(self) -> None:
        """Keep every port up, and the index of what they list, until cancelled, which ends all that they started."""
        kept: dict[ToolPort, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._changed.clear()
                for port in kept.keys() - set(self._ports.values()):
                    kept.pop(port).cancel()
                for port in self._ports.values():
                    if port not in kept:
                        kept[port] = group.create_task(port.keep())
                await self._look_until_changed()

    def close(self) -> None:
        """End what makes the index; the ports end with `keep`."""
        self._indexer.close()

    def prepare(self, name: str, arguments_text: str) -> Call:
        """Return what a call of the model means now; see `loopd.tools.call`."""
        try:
            return prepare(name, arguments_text, self._current().beside(self._absent()))
        except Absent as absent:
            return Refused(ok=False, content=absent.message, fault="unknown_tool")

    async def run(self, call: Call, *, timeout_s: float, max_bytes: int) -> Outcome:
        """Run a call to its result, whatever happens to the tool.

        Args:
            call: what `prepare` returned.
            timeout_s: the tool is cancelled after it.
            max_bytes: of the result's text in UTF-8; at least 256.

        Returns:
            clean text: head and tail with a count where it was longer. Never raises but on cancellation.
        """
        if isinstance(call, Prepared):
            outcome = await self._run_tool(call, timeout_s)
        elif isinstance(call, Find):
            outcome = await self._found(call.query, timeout_s)
        else:
            outcome = call
        text = clean(outcome.content, max_bytes)
        return replace(outcome, content=text.text, cut=outcome.cut + text.cut, lossy=outcome.lossy or text.lossy)

    def describe(self, session_id: str = "") -> list[dict[str, Any]]:
        """Return ports and tools for `bxctl tools`.

        Args:
            session_id: whose calls the policy decides about; "" for those of a session that no rule names.
        """
        return [
            {
                "port": port.name,
                "state": port.state,
                "reason": port.reason,
                "tools": [self._described(f"{port.name}.{tool.name}", tool, session_id) for tool in port.tools()],
            }
            for port in self._ports.values()
        ]

    async def describe_found(self, query: str, session_id: str = "") -> list[dict[str, Any]]:
        """Return the same with only the tools that find_tool finds, each with its place as `rank`, 1 being the best."""
        self._current()
        await self._indexer.ready(first_s=_FIRST_INDEX_WAIT_S, next_s=_INDEX_WAIT_S)
        hits = await asyncio.to_thread(self._current().find, query, self._table.find_hits)
        ranks = {entry.name: rank for rank, entry in enumerate(hits, 1)}
        ports = self.describe(session_id)
        for port in ports:
            named = ((ranks.get(f"{port['port']}.{tool['name']}"), tool) for tool in port["tools"])
            port["tools"] = [tool | {"rank": rank} for rank, tool in named if rank]
        return ports

    def _described(self, name: str, tool: Tool, session_id: str) -> dict[str, Any]:
        verdict = decide(self._table.policy, session_id, name, tool.effect)
        return {
            "name": tool.name,
            "description": tool.description,
            "effect": tool.effect,
            "decision": verdict.decision,
            "rule": verdict.rule,
            **self._counts.describe(name),
        }

    async def _run_tool(self, call: Prepared, timeout_s: float) -> Outcome:
        """Run a tool and count how it went; one that is cancelled has neither worked nor failed."""
        self._counts.began(call.name)
        outcome = await self._outcome(call, timeout_s)
        if not outcome.ok:
            self._counts.failed(call.name, outcome.content, now())
        return outcome

    async def _outcome(self, call: Prepared, timeout_s: float) -> Outcome:
        port = self._ports.get(call.port)
        if port is None:
            return Outcome(ok=False, content=f"{call.name} is unavailable: {call.port} was removed from [tools].")
        timeout_s = min(timeout_s, call.tool.timeout_s or timeout_s)
        if port.state == "down":
            return Outcome(ok=False, content=f"{call.name} is unavailable: {_down(port)}. Try again later.")
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await port.run(call.tool.name, call.arguments)
        except ToolError as error:
            return Outcome(ok=False, content=error.message)
        except Exception as error:  # noqa: BLE001 - a tool's failure is a result, never an exception of the loop
            if deadline.expired():
                text = f"{call.name} was stopped: not done after {timeout_s:g} s.{doubt(call.effect)}"
                return Outcome(ok=False, content=text)
            return Outcome(ok=False, content=f"{call.name} failed: {type(error).__name__}: {error}")

    async def _found(self, query: str, timeout_s: float) -> Outcome:
        """Return the answer of find_tool. It waits a moment for an index of what is new, then the last one answers."""
        self._current()
        await self._indexer.ready(first_s=timeout_s, next_s=min(_INDEX_WAIT_S, timeout_s))
        return await asyncio.to_thread(answer, query, self._current(), self._table, self._down(), list(self._absent()))

    def _current(self) -> Catalogue:
        """Return the catalogue of what the ports list now; where that has changed, its index is made meanwhile."""
        listed = tuple((port.name, port.tools()) for port in self._ports.values())
        if listed != self._listed:
            self._listed, self._catalogue = listed, Catalogue(listed, self._indexer)
            tools = [(entry.port, entry.tool) for entry in self._catalogue.entries]
            self._indexer.want(tools, self._table.ranking)
        return self._catalogue

    async def _look_until_changed(self) -> None:
        """Look every now and then at what the ports list, so that its index is there before it is asked for."""
        while not self._changed.is_set():
            self._current()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()

    def _absent(self) -> dict[str, str]:
        """Return why each port is down that has no tools to name, not even those it once had."""
        down = (port for port in self._ports.values() if port.state == "down" and not port.tools())
        return {port.name: shorten(_down(port), _MAX_WHY_CHARS, placeholder=" ..") for port in down}

    def _down(self) -> set[str]:
        return {port.name for port in self._ports.values() if port.state == "down"}


def _down(port: ToolPort) -> str:
    return f"{port.name} is down now" + (f" ({port.reason})" if port.reason else "")
