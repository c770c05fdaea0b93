"""A scripted model server: real HTTP over TCP or a Unix socket, llama.cpp's protocol, answers from a script.

It stands in for the model in tests and for trying loopd out without one (`loopd model serve --script FILE`).
Nothing in it depends on time: gates make a request wait until a test opens them, in process (`gate`) or by
`POST /gates/NAME`; `GET /gates/NAME` answers once a request waits there.
"""

import asyncio
import json
import secrets
from collections.abc import Coroutine
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import h11

from loopd.model.script import Script, SimulatedSlot, Step, deltas, play, render, tokenize
from loopd.model.templates import DEFAULT_TEMPLATE, bundled_template

_READ_BYTES = 65_536


class Gate:
    """A place where a request waits. `reached` is set when one does; `open` lets it and all later ones pass."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    def open(self) -> None:
        """Let requests pass."""
        self.opened.set()

    async def wait(self) -> None:
        """Be the request that waits here."""
        self.reached.set()
        await self.opened.wait()


class _Exchange:
    """One request and its answer on one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.SERVER)

    async def read_request(self) -> tuple[str, str, bytes] | None:
        """Return method, target and body; None if the client left before it had sent them."""
        request: h11.Request | None = None
        body = b""
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ_BYTES))
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return request.method.decode(), request.target.decode(), body
            else:
                return None

    async def gone(self) -> None:
        """Return once the client has closed its end."""
        while await self._reader.read(_READ_BYTES):
            pass

    async def respond(self, status: int, value: Any) -> None:  # noqa: ANN401 - any JSON value
        """Send a whole answer; a str is sent as text."""
        data = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        kind = "text/plain" if isinstance(value, str) else "application/json"
        await self._start(status, kind, [("Content-Length", str(len(data)))])
        await self._send(h11.Data(data=data))
        await self.end()

    async def start_stream(self) -> None:
        """Send the head of an event stream."""
        await self._start(200, "text/event-stream", [])

    async def event(self, data: str) -> None:
        """Send one event."""
        await self._send(h11.Data(data=f"data: {data}\n\n".encode()))

    async def keepalive(self) -> None:
        """Send a comment."""
        await self._send(h11.Data(data=b":\n\n"))

    async def end(self) -> None:
        """End the answer."""
        await self._send(h11.EndOfMessage())

    def drop(self) -> None:
        """Cut the connection as a dying process would."""
        self._writer.transport.abort()

    async def _start(self, status: int, kind: str, headers: list[tuple[str, str]]) -> None:
        headers = [("Content-Type", kind), ("Connection", "close"), *headers]
        await self._send(h11.Response(status_code=status, headers=headers))

    async def _send(self, event: h11.Event) -> None:
        self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()


class ScriptedServer:
    """The server; `async with` starts and ends it.

    Attributes:
        url: where it listens; with port 0, the port that it was given.
        requests: the decoded bodies of the completions asked for so far.
        transfers: `(save or restore, slot, file)` so far.
        slots: what is in the simulated slots.
    """

    def __init__(self, script: Script, url: str) -> None:
        self.script = script
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.transfers: list[tuple[str, int, str]] = []
        self.slots: list[SimulatedSlot] = []
        self._arrived = asyncio.Condition()
        self._gates: dict[str, Gate] = {}
        self._locks = [asyncio.Lock() for _ in range(script.slots)]
        self._loading = script.loading_requests
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._evaluated = self._reused = 0
        self.restart()

    def restart(self) -> None:
        """Be a server that has just started: empty slots, tasks counted from 0."""
        self.slots = [SimulatedSlot(number, rolls_back=self.script.rolls_back) for number in range(self.script.slots)]
        self._task = 0
        self._process = f"<__media_{secrets.token_hex(8)}__>"

    def gate(self, name: str) -> Gate:
        """Return the gate of that name."""
        return self._gates.setdefault(name, Gate())

    async def wait_requests(self, count: int) -> None:
        """Return once `count` completions have been asked for since the start."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: len(self.requests) >= count)

    async def __aenter__(self) -> Self:
        if self.url.startswith("unix:"):
            self._server = await asyncio.start_unix_server(self._connected, self.url.removeprefix("unix:"))
            return self
        address = urlsplit(self.url)
        self._server = await asyncio.start_server(self._connected, address.hostname, address.port)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://{address.hostname}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._connections.values():
            writer.transport.abort()
        for gate in self._gates.values():
            gate.open()
        await asyncio.gather(*self._connections)
        await self._server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = writer
        exchange = _Exchange(reader, writer)
        try:
            request = await exchange.read_request()
            if request is not None:
                await _until_gone(exchange, self._answer(exchange, *request))
        except* ConnectionError:
            pass  # the client went away, or a step cut the connection
        finally:
            del self._connections[task]
            writer.close()

    # --- endpoints --------------------------------------------------------------------------------------------

    async def _answer(self, exchange: _Exchange, method: str, target: str, body: bytes) -> None:
        path = urlsplit(target).path
        if path.startswith("/gates/"):
            await self._answer_gate(exchange, method, path.removeprefix("/gates/"))
        elif self._loading > 0:
            self._loading -= 1
            await exchange.respond(503, _error(503, "unavailable_error", "Loading model"))
        elif path == "/v1/chat/completions" and method == "POST":
            await self._complete(exchange, json.loads(body))
        elif path == "/v1/models":
            await exchange.respond(200, {"object": "list", "data": [{"id": self.script.alias, "object": "model"}]})
        elif self.script.llama_cpp and path.startswith("/slots/"):
            await self._transfer(exchange, path, urlsplit(target).query, json.loads(body))
        elif self.script.llama_cpp and (value := self._look_up(path, body)) is not None:
            await exchange.respond(*value)
        else:
            await exchange.respond(404, _error(404, "not_found_error", "File Not Found"))

    async def _answer_gate(self, exchange: _Exchange, method: str, name: str) -> None:
        gate = self.gate(name)
        if method == "POST":
            gate.open()
        else:
            await gate.reached.wait()
        await exchange.respond(200, {"name": name})

    async def _transfer(self, exchange: _Exchange, path: str, query: str, body: dict[str, Any]) -> None:
        """Save or restore a slot; as in llama.cpp's server, not while it processes a request."""
        if not self.script.states:
            words = "This server does not support slots action. Start it with `--slot-save-path`"
            await exchange.respond(501, _error(501, "not_supported_error", words))
            return
        slot = self.slots[int(path.removeprefix("/slots/"))]
        file = Path(self.script.states, body["filename"])
        self.transfers.append((query.removeprefix("action="), slot.id, body["filename"]))
        try:
            async with self._locks[slot.id]:
                if query == "action=save":
                    await exchange.respond(200, slot.save(file))
                else:
                    await exchange.respond(200, slot.restore(file, usable=self.script.restores))
        except (OSError, ValueError):
            words = "Unable to restore slot: No available space in KV cache or invalid slot save file"
            await exchange.respond(400, _error(400, "invalid_request_error", words))

    def _look_up(self, path: str, body: bytes) -> tuple[int, Any] | None:
        """Return status and value of the endpoints that answer at once."""
        match path:
            case "/apply-template":
                return _rendered(json.loads(body))
            case "/health":
                value: Any = {"status": "ok"}
            case "/props":
                value = self._props()
            case "/slots":
                value = [self._slot(slot) for slot in self.slots]
            case "/tokenize":
                value = {"tokens": tokenize(json.loads(body)["content"])}
            case "/metrics":
                counters = {"prompt_tokens_total": self._evaluated, "prompt_tokens_cached_total": self._reused}
                value = "".join(f"llamacpp:{name} {count}\n" for name, count in counters.items())
            case _:
                return None
        return 200, value

    def _props(self) -> dict[str, Any]:
        return {
            "model_alias": self.script.alias,
            "total_slots": self.script.slots,
            "endpoint_slots": True,
            "chat_template": bundled_template(DEFAULT_TEMPLATE),
            "build_info": "scripted",
            "media_marker": self._process,
            "default_generation_settings": {"n_ctx": self.script.context_tokens},
        }

    def _slot(self, slot: SimulatedSlot) -> dict[str, Any]:
        shown = {"id": slot.id, "n_ctx": self.script.context_tokens, "is_processing": slot.processing}
        if slot.task is None:
            return shown
        return shown | {"id_task": slot.task, "n_prompt_tokens": len(slot.tokens)}

    # --- a completion -----------------------------------------------------------------------------------------

    async def _complete(self, exchange: _Exchange, body: dict[str, Any]) -> None:
        step = self._next_step()
        async with self._arrived:
            self.requests.append(body)
            self._arrived.notify_all()
        if step.error is not None:
            error = step.error
            await exchange.respond(error.status, _error(error.status, error.type, error.message))
            return
        status, rendered = _rendered(body)
        if status != HTTPStatus.OK:
            await exchange.respond(status, rendered)
            return
        prompt = tokenize(rendered["prompt"])
        if len(prompt) >= self.script.context_tokens:
            await exchange.respond(400, self._overflow(len(prompt)))
            return
        slot = self._choose(body.get("id_slot"), prompt)
        async with self._locks[slot.id]:
            await self._run(exchange, body, step, slot, prompt)

    def _next_step(self) -> Step:
        done = len(self.requests)
        return self.script.steps[done] if done < len(self.script.steps) else self.script.default

    def _choose(self, wanted: int | None, prompt: list[int]) -> SimulatedSlot:
        if wanted is not None and 0 <= wanted < len(self.slots):
            return self.slots[wanted]
        return max(self.slots, key=lambda slot: slot.common(prompt))

    def _overflow(self, tokens: int) -> dict[str, Any]:
        context = self.script.context_tokens
        words = f"request ({tokens} tokens) exceeds the available context size ({context} tokens), try increasing it"
        answer = _error(400, "exceed_context_size_error", words)
        answer["error"] |= {"n_prompt_tokens": tokens, "n_ctx": context}
        return answer

    async def _run(
        self, exchange: _Exchange, body: dict[str, Any], step: Step, slot: SimulatedSlot, prompt: list[int]
    ) -> None:
        self._task += 1
        slot.task = self._task
        slot.processing = True
        slot.forget(step.forget_tokens)
        cached = slot.common(prompt)
        step, answer = play(step, body.get("max_tokens", self.script.context_tokens))
        try:
            await exchange.start_stream()
            await self._prefill(exchange, step, slot, prompt, report=bool(body.get("return_progress")))
            slot.keep(prompt, answer)
            self._evaluated += len(prompt) - cached
            self._reused += cached
            await self._decode(exchange, step)
            if not step.no_usage:
                await exchange.event(json.dumps(_usage(len(prompt), len(answer), cached)))
            await exchange.event("[DONE]")
            await exchange.end()
        except asyncio.CancelledError:  # the client went away
            if step.settle_gate:
                await self.gate(step.settle_gate).wait()
            raise
        finally:
            slot.processing = False

    async def _prefill(
        self, exchange: _Exchange, step: Step, slot: SimulatedSlot, prompt: list[int], *, report: bool
    ) -> None:
        cached = slot.common(prompt)
        for done in (*range(cached, len(prompt), self.script.batch_tokens), len(prompt)):
            await asyncio.sleep(step.delay_ms / 1000)
            slot.tokens = prompt[:done]
            if report:
                progress = {"total": len(prompt), "cache": cached, "processed": done, "time_ms": 0}
                await exchange.event(json.dumps({"choices": [{"delta": {}}], "prompt_progress": progress}))
            if step.prefill_gate and done == cached:
                await self._pause(exchange, step, step.prefill_gate)

    async def _decode(self, exchange: _Exchange, step: Step) -> None:
        for number, delta in enumerate(deltas(step)):
            if step.drop_after_chunks == number:
                exchange.drop()
                raise ConnectionAbortedError
            await asyncio.sleep(step.delay_ms / 1000)
            await exchange.event(json.dumps({"choices": [{"delta": delta}]}))
            if number == 0:
                await self._after_first(exchange, step)
        await exchange.event(json.dumps({"choices": [{"delta": {}, "finish_reason": step.reason()}]}))

    async def _after_first(self, exchange: _Exchange, step: Step) -> None:
        if step.gate:
            await self._pause(exchange, step, step.gate)
        if step.garbage is not None:
            await exchange.event(step.garbage)
        if step.error_in_stream is not None:
            error = step.error_in_stream
            await exchange.event(json.dumps(_error(error.status, error.type, error.message)))
            exchange.drop()
            raise ConnectionAbortedError

    async def _pause(self, exchange: _Exchange, step: Step, gate: str) -> None:
        for _ in range(step.keepalives):
            await exchange.keepalive()
        await self.gate(gate).wait()


async def _until_gone(exchange: _Exchange, answering: Coroutine[Any, Any, None]) -> None:
    """Answer, unless the client goes away first."""
    async with asyncio.TaskGroup() as group:
        answer = group.create_task(answering)
        gone = group.create_task(exchange.gone())
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        answer.cancel()
        gone.cancel()


def _rendered(body: dict[str, Any]) -> tuple[int, Any]:
    """Return the answer of `/apply-template`."""
    try:
        return 200, {"prompt": render(body)}
    except json.JSONDecodeError as error:
        return 500, _error(500, "server_error", f"Failed to parse tool call arguments as JSON: {error}")
    except (ValueError, KeyError) as error:
        return 400, _error(400, "invalid_request_error", str(error))


def _error(status: int, kind: str, message: str) -> dict[str, Any]:
    return {"error": {"code": status, "type": kind, "message": message}}


def _usage(prompt: int, answer: int, cached: int) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        },
        "timings": {"cache_n": cached, "prompt_n": prompt - cached, "prompt_ms": 1.0, "predicted_ms": 1.0},
    }
