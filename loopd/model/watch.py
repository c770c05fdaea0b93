"""What the model server is now: asked before each turn, checked anew only when model, template or build changed."""

import asyncio
from collections.abc import Callable

from loopd.errors import ModelUnavailable
from loopd.home import Home
from loopd.model.check import ModelCheck, load_or_check
from loopd.model.client import Event, ModelClient, ServerFacts
from loopd.model.keeper import StateKeeper
from loopd.model.slots import SlotPool
from loopd.model.states import Fit


class ModelWatch:
    """Keeps the check of the model that is served, the pool at its number of slots, the keeper at what states fit.

    Attributes:
        context_tokens: of one slot, as the server last said; None before it was asked or where it does not say.
    """

    def __init__(self, home: Home, client: ModelClient, pool: SlotPool, keeper: StateKeeper) -> None:
        self.context_tokens: int | None = None
        self._home, self._client, self._pool, self._keeper = home, client, pool, keeper
        self._facts: ServerFacts | None = None
        self._check: ModelCheck | None = None
        self._one_at_a_time = asyncio.Lock()

    @property
    def user_after_tool(self) -> bool:
        """Whether the template takes a user message after a tool result; False until that is known."""
        return self._check is not None and self._check.forms.user_after_tool

    async def current(self, on_event: Callable[[Event], None] = lambda _event: None) -> ModelCheck:
        """Ask the server and return the check of what it has now.

        Args:
            on_event: is told when the server is still loading and is waited for.

        Raises:
            ModelError: it does not answer, or cannot be asked for its forms.
        """
        async with self._one_at_a_time:
            try:
                facts = await self._client.facts()
            except ModelUnavailable:
                await self._client.wait_ready(on_event)
                facts = await self._client.facts()
            if self._check is None or facts != self._facts:
                self._check = await load_or_check(self._home, self._client, facts)
                self._facts = facts
                self.context_tokens = facts.context_tokens
                self._pool.process = facts.process
                self._pool.resize(facts.slots)
                self._keeper.serve(_fit(self._check, facts))
            return self._check


def _fit(check: ModelCheck, facts: ServerFacts) -> Fit:
    return Fit(
        model=check.model,
        template=check.template.sha256,
        build=facts.build,
        context_tokens=facts.context_tokens,
    )
