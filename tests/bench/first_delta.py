"""Time to the first text of an answer: through loopd, against the same conversation held with the model server itself.

Both conversations have a slot of their own, the same texts and the same seed, so both evaluate the same tokens.
"""

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tests.bench.harness import Row, at_most, seconds
from tests.bench.talk import Talk
from tests.integration.appliance import Appliance, running
from tests.servers import model_file, start_model_server

ROUNDS = 20
LIMIT_MS = 5.0


class Direct:
    """A client that only appends messages, in slot 1."""

    def __init__(self, url: str, exported: dict[str, Any]) -> None:
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=url.removeprefix("unix:")), base_url="http://model", timeout=300
        )
        self._fixed = {"tools": exported["tools"], "id_slot": 1, "temperature": 0, "max_tokens": 8, "stream": True}
        self._messages = exported["messages"][:1]

    def first_delta_s(self, text: str) -> float:
        self._messages.append({"role": "user", "content": text})
        answer: list[str] = []
        request = self._http.build_request(
            "POST", "/v1/chat/completions", json={**self._fixed, "messages": self._messages}
        )
        responses: list[httpx.Response] = []

        def first() -> None:
            responses.append(self._http.send(request, stream=True))
            self._lines = responses[0].iter_lines()
            while not answer:
                answer.extend(_text(next(self._lines)))

        taken_s = seconds(first)
        for line in self._lines:
            answer.extend(_text(line))
        responses[0].close()
        self._messages.append({"role": "assistant", "content": "".join(answer)})
        return taken_s


def _text(line: str) -> list[str]:
    if not line.startswith("data: {"):
        return []
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return [choices[0]["delta"]["content"]] if choices and choices[0]["delta"].get("content") else []


def run() -> list[Row]:
    with TemporaryDirectory() as directory:
        root = Path(directory)
        with start_model_server(root / "m.sock", gguf=model_file(), slots=2) as url:
            device = Appliance(root, url, loop={"max_completion_tokens": 8})
            with running(device):
                talk = Talk(device.socket, "b")
                direct = Direct(url, device.json("export", "b"))
                texts = [f"Say something about the number {number}." for number in range(ROUNDS + 1)]
                pairs = [(talk.first_delta_s(text), direct.first_delta_s(text)) for text in texts][1:]
                talk.close()
    ours_s, theirs_s = (statistics.median(side) for side in zip(*pairs, strict=True))
    more_ms = 1000 * statistics.median(ours - theirs for ours, theirs in pairs)
    reference = f"directly: {1000 * theirs_s:.1f} ms, through loopd: {1000 * ours_s:.1f} ms, medians of {ROUNDS}"
    return [at_most("first text through loopd, more than directly", more_ms, "ms", LIMIT_MS, reference=reference)]
