"""Prompts as the server's own template makes them, compared: does a later one only add to an earlier one?"""

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from loopd.model.client import ModelClient


class Renderer:
    """Renders conversations with fixed tools and template options."""

    def __init__(self, client: ModelClient, tools: bytes, options: Mapping[str, Any]) -> None:
        self._client, self._tools, self._options = client, tools, options

    async def request(self, messages: Sequence[bytes]) -> str:
        """Return the prompt of a request of these messages.

        Raises:
            ModelRejected: the template refuses them.
        """
        return await self._client.render(messages, self._tools, options=self._options)

    async def first_rewritten(self, former: Sequence[bytes], messages: Sequence[bytes]) -> str:
        """Name the first message whose text is another in the request of `messages` than it was in the former's.

        Args:
            former: the messages of an earlier request.
            messages: the same ones, its answer and more.

        Returns:
            `message 3`, counted from 1; '' where the former request stands unchanged in the later one, with its whole
            answer behind it.
        """
        now = await self.request(messages)
        before = await self.request(former)
        if not now.startswith(before):
            return f"message {await self._locate(former, now, common_length(now, before))}"
        number = len(former) + 1
        answer = json.loads(messages[number - 1]) if number <= len(messages) else {}
        parts = (answer.get(name) or "" for name in ("reasoning_content", "content"))
        return "" if all(part.strip() in now[len(before) :] for part in parts) else f"message {number}"

    async def _locate(self, messages: Sequence[bytes], now: str, same: int) -> int:
        """Return the number of the message that the first character after `same` belongs to, by bisection."""
        # A server continues an answer that stands last, so only what is said to the model can be rendered as an end.
        ends = [0, *(end for end, message in enumerate(messages, start=1) if not is_answer(message))]
        good, bad = 0, len(ends) - 1
        while bad - good > 1:
            middle = (good + bad) // 2
            text = await self._history(messages[: ends[middle]])
            if len(text) <= same and now.startswith(text):
                good = middle
            else:
                bad = middle
        first, last = ends[good] + 1, ends[bad]
        if first == last:
            return last
        text = await self._history(messages[:last])
        return last if same >= text.rfind(json.loads(messages[last - 1])["content"]) else first

    async def _history(self, messages: Sequence[bytes]) -> str:
        """Return the messages as they stand inside a longer prompt."""
        fields = {"add_generation_prompt": False}
        return await self._client.render(messages, self._tools, options=self._options, fields=fields)


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many items two sequences share from the start."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def is_answer(message: bytes) -> bool:
    """Tell whether an encoded message is of the model."""
    return b'"role":"assistant"' in message
