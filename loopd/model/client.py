"""The client of the model server: llama.cpp's over TCP or a Unix socket, any OpenAI-compatible one (SPEC 4.1).

A request is sent on a connection of its own, which is closed when the request ends: closing it is how a request is
cancelled, and a restarted server is never met by an old connection. Only what the server has not accepted (refused,
503 while it loads) is tried again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import httpx
from httpx_sse import EventSource, ServerSentEvent, SSEError
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from loopd.clock import monotonic_s
from loopd.config import ModelTable
from loopd.errors import ConfigError, ModelError, ModelProtocolError, ModelStalled, ModelUnavailable
from loopd.model import wire
from loopd.model.completion import (
    Assembler,
    Completion,
    CompletionRequest,
    Event,
    Loading,
    ProducedCall,
    Progress,
    ReasoningDelta,
    TextDelta,
    join_body,
)
from loopd.proto.canonical import canonical

__all__ = [
    "Completion",
    "CompletionRequest",
    "Event",
    "Loading",
    "ModelClient",
    "ProducedCall",
    "Progress",
    "ReasoningDelta",
    "ServerFacts",
    "SlotTransfer",
    "SlotView",
    "TextDelta",
    "Timeouts",
]

_POLL_S = 0.05
_ANSWER_TIMEOUT_S = 120.0
"""For the small requests. llama.cpp answers `/slots` and `/tokenize` between two batches of a prefill."""
_STATE_TIMEOUT_S = 600.0
"""For a slot to be written to a slow disk, or read from it."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds, as `[model]` has them."""

    connect_s: float = 5.0
    load_s: float = 600.0
    idle_s: float = 120.0
    cancel_s: float = 10.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server says about itself; None or '' where it says nothing.

    Attributes:
        model_size: bytes of the model's weights, not of its file.
        context_tokens: tokens a slot has.
        slots: how many slots there are; None where the server has no such endpoint.
        template: the chat template's text.
        process: another text after each start of the server; '' where it shows none.
    """

    alias: str
    model_path: str
    model_size: int | None
    context_tokens: int | None
    slots: int | None
    template: str | None
    build: str
    process: str = ""


@dataclass(frozen=True, slots=True)
class SlotView:
    """A slot as the server shows it. `task` is None if it was never used since the server started."""

    id: int
    task: int | None
    tokens: int
    processing: bool


@dataclass(frozen=True, slots=True)
class SlotTransfer:
    """A slot that was saved or restored: its tokens, the file's bytes, and how long the server took."""

    tokens: int
    size_bytes: int
    ms: float


class _NotReady(ModelUnavailable):
    """The server was not able to take the request, and may be soon."""

    def __init__(self, message: str, *, patience_s: float) -> None:
        super().__init__(message, hint="loopd model serve runs one; [model] url names another")
        self.patience_s = patience_s


class ModelClient:
    """A connection to one model server. Made without I/O; `close` it at the end."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Take `unix:/path` or an http(s) URL, with or without `/v1` at its end; `transport` replaces the network."""
        self.url = url
        self.timeouts = timeouts or Timeouts()
        self._facts: tuple[bytes, ServerFacts] | None = None
        socket = url.removeprefix("unix:") if url.startswith("unix:") else None
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            transport=transport or httpx.AsyncHTTPTransport(uds=socket, limits=limits, trust_env=False),
            base_url="http://model" if socket else url.rstrip("/").removesuffix("/v1"),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_ANSWER_TIMEOUT_S, connect=self.timeouts.connect_s),
            trust_env=False,
        )

    @classmethod
    def from_config(cls, table: ModelTable, url: str) -> "ModelClient":
        """Return a client for `url` with the key and the time-outs of `[model]`.

        Raises:
            ConfigError: the key's file cannot be read.
        """
        api_key = None
        if table.api_key_file:
            try:
                api_key = Path(table.api_key_file).read_text("utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"[model] api_key_file: cannot read {table.api_key_file}: {error}") from error
        timeouts = Timeouts(
            connect_s=table.connect_timeout_s,
            load_s=table.load_timeout_s,
            idle_s=table.idle_timeout_s,
            cancel_s=table.cancel_timeout_s,
        )
        return cls(url, api_key=api_key, timeouts=timeouts)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    # --- a completion -----------------------------------------------------------------------------------------

    async def complete(self, request: CompletionRequest, on_event: Callable[[Event], None]) -> Completion:
        """Ask for an answer and return it when it is final.

        When this ends in any other way, a cancel included, the slot is idle again or `cancel_s` have gone by.
        How long the server may keep the request waiting before it begins is not bounded here: the turn's wall
        time is.

        Args:
            request: what is asked; one at a time to a slot (`SlotPool`).
            on_event: is called with each event as it comes; must not block.

        Raises:
            ModelUnavailable: refused for `connect_s`, or still loading after `load_s`.
            ModelRejected: the server's words; ContextOverflow: too long, with numbers.
            ModelStalled: no token and no progress for `idle_s` since the server began.
            ModelProtocolError: the answer is of no protocol, or ended in mid-stream.
        """
        body = request.body()
        try:
            async for attempt in self._retrying(on_event):
                with attempt:
                    return await self._complete_once(body, on_event)
        except _NotReady:
            raise
        except (ModelError, asyncio.CancelledError):
            if request.slot is not None:
                await self._settle(request.slot)
            raise
        raise AssertionError("tenacity returns or raises")

    async def _complete_once(self, body: bytes, on_event: Callable[[Event], None]) -> Completion:
        assembler = Assembler(on_event)
        begun_at = monotonic_s()
        first_token_ms: float | None = None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as idle, self._stream(body) as events:
                async for sse in events:
                    if sse.data == "[DONE]":
                        break
                    if assembler.feed(wire.parse(wire.Chunk, sse.data, "a chunk of the model server's answer")):
                        idle.reschedule(loop.time() + self.timeouts.idle_s)
                    if assembler.answering and first_token_ms is None:
                        first_token_ms = (monotonic_s() - begun_at) * 1000
        except TimeoutError as error:
            if not assembler.finished:
                raise ModelStalled(
                    f"the model server gave no token and no progress for {self.timeouts.idle_s:g} s",
                    hint="is the device overloaded? [model] idle_timeout_s is the limit",
                ) from error
        except (httpx.TransportError, SSEError) as error:
            if not assembler.finished:
                raise ModelProtocolError(f"the model server's answer ended in mid-stream: {_words(error)}") from error
        return assembler.completion(first_token_ms)

    @contextlib.asynccontextmanager
    async def _stream(self, body: bytes) -> AsyncIterator[AsyncIterator[ServerSentEvent]]:
        request = self._http.build_request(
            "POST",
            "/v1/chat/completions",
            content=body,
            headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
            timeout=httpx.Timeout(None, connect=self.timeouts.connect_s),
        )
        response = await self._send(request)
        if not response.is_success:
            await self._refuse(response)
        try:
            async with contextlib.aclosing(EventSource(response).aiter_sse()) as events:
                yield events
        finally:
            await response.aclose()

    async def _send(self, request: httpx.Request) -> httpx.Response:
        """Send, and return the response with its body unread, whatever its status."""
        try:
            return await self._http.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _NotReady(
                f"no model server answers on {self.url}: {_words(error)}", patience_s=self.timeouts.connect_s
            ) from error
        except httpx.TimeoutException as error:
            raise ModelUnavailable(f"the model server on {self.url} does not answer") from error
        except httpx.TransportError as error:
            raise ModelProtocolError(f"the model server on {self.url} gave no answer: {_words(error)}") from error

    async def _read(self, response: httpx.Response) -> bytes:
        try:
            return await response.aread()
        except httpx.TransportError as error:
            raise ModelProtocolError(f"the model server's answer broke off: {_words(error)}") from error
        finally:
            await response.aclose()

    async def _refuse(self, response: httpx.Response) -> NoReturn:
        """Raise what an answer that is no success stands for."""
        refused = wire.error_from(response.status_code, await self._read(response))
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise _NotReady(refused.message, patience_s=self.timeouts.load_s)
        raise refused

    def _retrying(self, on_event: Callable[[Event], None]) -> AsyncRetrying:
        def out_of_patience(state: RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome else None
            assert isinstance(error, _NotReady)
            return (state.seconds_since_start or 0) >= error.patience_s

        def say(state: RetryCallState) -> None:
            on_event(Loading(str(state.outcome.exception() if state.outcome else "")))

        return AsyncRetrying(
            retry=retry_if_exception_type(_NotReady),
            stop=out_of_patience,
            wait=wait_exponential(multiplier=_POLL_S, max=2),
            before_sleep=say,
            reraise=True,
        )

    async def _settle(self, slot: int) -> None:
        """Wait until the slot of a request that was given up is idle; a server that does not tell is not asked."""
        with contextlib.suppress(ModelError, TimeoutError):
            await self.wait_idle(slot)

    # --- everything else --------------------------------------------------------------------------------------

    async def wait_ready(self, on_event: Callable[[Event], None]) -> None:
        """Return once the server has loaded its model.

        Raises:
            ModelUnavailable: refused for `connect_s`, or still loading after `load_s`.
        """
        async for attempt in self._retrying(on_event):
            with attempt:
                # Servers without `/health` answer 404, and are up.
                await self._ask("GET", "/health", absent_ok=True)

    async def wait_idle(self, slot: int) -> None:
        """Return once the slot processes nothing; at once where the server shows no slots.

        Raises:
            TimeoutError: it still does after `cancel_s`.
            ModelError: the server does not answer.
        """
        async with asyncio.timeout(self.timeouts.cancel_s):
            # Another process's state has no event to wait for.
            while any(view.processing for view in await self.slots() if view.id == slot):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)

    async def facts(self) -> ServerFacts:
        """Return what the server says about itself.

        Raises:
            ModelError: it does not answer, or not with what its endpoints should give.
        """
        body = await self._ask("GET", "/props", absent_ok=True)
        if self._facts is None or body != self._facts[0] or not body:
            self._facts = body, await self._read_facts(body)
        return self._facts[1]

    async def _read_facts(self, body: bytes) -> ServerFacts:
        """Return the facts of a server whose `/props` are `body`; unchanged, they are those of the same process."""
        props = wire.parse(wire.Props, body, "/props") if body else wire.Props(endpoint_slots=False)
        models = wire.parse(wire.Models, await self._ask("GET", "/v1/models"), "/v1/models")
        model = models.data[0]
        meta = model.meta or wire.ModelMeta()
        return ServerFacts(
            alias=props.model_alias or model.id,
            model_path=props.model_path,
            model_size=meta.size,
            context_tokens=props.default_generation_settings.n_ctx or meta.n_ctx,
            slots=props.total_slots if props.endpoint_slots else None,
            template=props.chat_template,
            build=props.build_info,
            process=props.media_marker,
        )

    async def slots(self) -> list[SlotView]:
        """Return the server's slots in order; empty where it has no such endpoint."""
        body = await self._ask("GET", "/slots", absent_ok=True)
        if not body:
            return []
        entries = wire.parse(wire.Slots, body, "/slots").root
        return [SlotView(slot.id, slot.id_task, slot.n_prompt_tokens, slot.is_processing) for slot in entries]

    async def save_slot(self, slot: int, name: str) -> SlotTransfer:
        """Have the server write what is in a slot to the file `name` in its own directory.

        The server does it between two batches; it must not be asked while the slot processes a request.

        Raises:
            ModelRejected: it cannot, in its words.
            ModelError: it does not answer.
        """
        saved = wire.parse(wire.Saved, await self._transfer(slot, "save", name), "the answer to a save")
        return SlotTransfer(saved.n_saved, saved.n_written, saved.timings.save_ms)

    async def restore_slot(self, slot: int, name: str) -> SlotTransfer:
        """Have the server put a saved file into a slot; what was in it is gone, also where that fails.

        Raises:
            ModelRejected: there is no such file, or not one of this model and context.
            ModelError: the server does not answer.
        """
        restored = wire.parse(wire.Restored, await self._transfer(slot, "restore", name), "the answer to a restore")
        return SlotTransfer(restored.n_restored, restored.n_read, restored.timings.restore_ms)

    async def _transfer(self, slot: int, action: str, name: str) -> bytes:
        content = canonical({"filename": name})
        return await self._ask("POST", f"/slots/{slot}?action={action}", content=content, timeout_s=_STATE_TIMEOUT_S)

    async def render(
        self,
        messages: Sequence[bytes],
        tools: bytes,
        *,
        options: Mapping[str, Any],
        fields: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt that the server's template makes of `messages` (as `CompletionRequest` has them).

        Args:
            messages: of the request.
            tools: of the request.
            options: of the template.
            fields: more of the request's fields that matter here, such as `add_generation_prompt`.

        Raises:
            ModelRejected: the template refuses them, in its words, or the server cannot render.
        """
        body = await self._ask("POST", "/apply-template", content=join_body(fields, messages, tools, options))
        return wire.parse(wire.Rendered, body, "/apply-template").prompt

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt, special tokens parsed as the server does for a request.

        Raises:
            ModelRejected: the server cannot tokenize.
        """
        content = canonical({"content": text, "add_special": True, "parse_special": True})
        return wire.parse(wire.Tokens, await self._ask("POST", "/tokenize", content=content), "/tokenize").tokens

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        content: bytes | None = None,
        absent_ok: bool = False,
        timeout_s: float = _ANSWER_TIMEOUT_S,
    ) -> bytes:
        """Return the body of a small request's answer; empty where the endpoint is absent and that is all right."""
        headers = {"Content-Type": "application/json"} if content else {}
        timeout = httpx.Timeout(timeout_s, connect=self.timeouts.connect_s)
        request = self._http.build_request(method, path, content=content, headers=headers, timeout=timeout)
        response = await self._send(request)
        if absent_ok and response.status_code in _ABSENT:
            await response.aclose()
            return b""
        if not response.is_success:
            await self._refuse(response)
        return await self._read(response)


_ABSENT = frozenset({httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED, httpx.codes.NOT_IMPLEMENTED})


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
