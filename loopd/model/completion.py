"""One request to the model and its answer: pure, the client does the I/O.

The body is joined from bytes that are encoded already: what the log's replay produced is what is sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from loopd.errors import ModelProtocolError
from loopd.model.wire import Chunk, ToolCallDelta, error_of
from loopd.proto.canonical import canonical
from loopd.proto.usage import Reported

FinishReason = Literal["stop", "tool_calls", "length"]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """What is asked.

    Attributes:
        messages: canonical JSON of each message, as replay gives them.
        tools: canonical JSON array of the tool definitions; `[]` for none.
        slot: the server's slot to use; None where the server has none.
        max_tokens: most tokens of the answer.
        sampling: values of the configuration that are set, by their names in the API.
        template_options: what the chat template is rendered with, from the baseline.
    """

    messages: Sequence[bytes]
    tools: bytes
    slot: int | None
    max_tokens: int
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    template_options: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return the body of `/v1/chat/completions`.

        What only llama.cpp knows is sent only where there is a slot: other servers refuse unknown fields.
        """
        fields: dict[str, Any] = {
            **self.sampling,
            "max_tokens": self.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.slot is not None:
            fields |= {"cache_prompt": True, "id_slot": self.slot, "return_progress": True}
        return join_body(fields, self.messages, self.tools, self.template_options)


def join_body(
    fields: Mapping[str, Any], messages: Sequence[bytes], tools: bytes, template_options: Mapping[str, Any]
) -> bytes:
    """Return a JSON object of `fields`, the tools and the messages, whose bytes are taken as they are."""
    if template_options:
        fields = {**fields, "chat_template_kwargs": dict(template_options)}
    parts = [canonical(fields)[1:-1]] if fields else []
    if tools != b"[]":
        parts.append(b'"tools":' + tools)
    parts.append(b'"messages":[' + b",".join(messages) + b"]")
    return b"{" + b",".join(parts) + b"}"


@dataclass(frozen=True, slots=True)
class ProducedCall:
    """A tool call exactly as the model produced it; `arguments` need not be JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer. `finish_reason` length means that it was cut, a call in it perhaps too."""

    text: str
    reasoning: str
    tool_calls: tuple[ProducedCall, ...]
    finish_reason: FinishReason
    reported: Reported


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text of the answer, as it comes."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Reasoning text, as it comes."""

    text: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The prefill, in tokens; `processed` includes the cached ones."""

    cached: int
    processed: int
    total: int


@dataclass(frozen=True, slots=True)
class Loading:
    """The server is not ready yet and is waited for."""

    message: str


Event = TextDelta | ReasoningDelta | Progress | Loading


class Assembler:
    """Puts the chunks of one stream together.

    Attributes:
        processing: the server has begun with the request (the idle time-out counts from here).
        answering: a token of the answer has come.
        finished: the server said how the answer ended; nothing that is missing after this spoils it.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._on_event = on_event
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ProducedCall] = []
        self._call_by_index: dict[int, int] = {}
        self._finish_reason: str | None = None
        self._reported = Reported()
        self._processed = -1
        self.processing = False
        self.answering = False

    @property
    def finished(self) -> bool:
        """Whether the answer is final."""
        return self._finish_reason is not None

    def feed(self, chunk: Chunk) -> bool:
        """Take one chunk, report what is in it, and return whether it brought anything.

        Raises:
            ModelError: the chunk is an error object.
        """
        if chunk.error is not None:
            raise error_of(chunk.error, "the model server ended the answer with an error")
        moved = self._feed_progress(chunk)
        for choice in chunk.choices[:1]:
            delta = choice.delta
            if delta.content:
                self._text.append(delta.content)
                self._on_event(TextDelta(delta.content))
            if delta.reasoning_content:
                self._reasoning.append(delta.reasoning_content)
                self._on_event(ReasoningDelta(delta.reasoning_content))
            for call in delta.tool_calls or ():
                self._feed_call(call)
            if delta.content or delta.reasoning_content or delta.tool_calls:
                moved = self.answering = True
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
                moved = True
        self._feed_usage(chunk)
        self.processing = self.processing or moved
        return moved or chunk.usage is not None

    def completion(self, first_token_ms: float | None) -> Completion:
        """Return the answer.

        Raises:
            ModelProtocolError: the stream ended before the answer did.
        """
        if self._finish_reason is None:
            raise ModelProtocolError("the model server's answer ended in mid-stream")
        # A call that was cut before its name has nothing that could be run or sent back.
        calls = tuple(call for call in self._calls if call.name)
        reason: FinishReason = "stop"
        if self._finish_reason == "length":
            reason = "length"
        elif calls:
            reason = "tool_calls"
        return Completion(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            tool_calls=calls,
            finish_reason=reason,
            reported=replace(self._reported, first_token_ms=first_token_ms),
        )

    def _feed_progress(self, chunk: Chunk) -> bool:
        progress = chunk.prompt_progress
        if progress is None or progress.processed == self._processed:
            return False
        self._processed = progress.processed
        self._on_event(Progress(progress.cache, progress.processed, progress.total))
        return True

    def _feed_call(self, delta: ToolCallDelta) -> None:
        index = delta.index
        if index is None:  # a server without indexes sends an id with each new call
            index = len(self._calls) if delta.id or not self._calls else len(self._calls) - 1
        if index not in self._call_by_index:
            self._call_by_index[index] = len(self._calls)
            self._calls.append(ProducedCall(id=delta.id or f"call_{index}", name="", arguments=""))
        place = self._call_by_index[index]
        call = self._calls[place]
        self._calls[place] = replace(
            call,
            name=call.name + (delta.function.name or ""),
            arguments=call.arguments + (delta.function.arguments or ""),
        )

    def _feed_usage(self, chunk: Chunk) -> None:
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            self._reported = replace(
                self._reported,
                prompt_tokens=chunk.usage.prompt_tokens,
                completion_tokens=chunk.usage.completion_tokens,
                cached_tokens=details.cached_tokens if details else self._reported.cached_tokens,
            )
        if chunk.timings is not None:
            cached = self._reported.cached_tokens
            self._reported = replace(
                self._reported,
                cached_tokens=chunk.timings.cache_n if cached is None else cached,
                prefill_ms=chunk.timings.prompt_ms,
                decode_ms=chunk.timings.predicted_ms,
            )
