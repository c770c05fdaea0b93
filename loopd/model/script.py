"""The script of a scripted model server, and the model that it plays: pure.

A script is JSON: `{"steps": [STEP, ...], "default": STEP, "slots": 1, ...}`. Each completion takes the next step;
when they are used up, the default is played. Tokens are words, single spaces and single signs, so that text
tokenises the same wherever it stands; the prompt cache of a slot behaves as llama.cpp's does: after a request it
holds `P + C - 1` tokens, and the next one in it reuses what both have in common from the start (SPEC 4.3).
"""

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loopd.errors import ModelSetupError
from loopd.proto.canonical import object_text


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScriptedError(_Strict):
    """An error object, with the HTTP status where it is the whole answer."""

    status: int = Field(default=500, ge=400, le=599)
    type: str = "server_error"
    message: str = "scripted error"


class ScriptedCall(_Strict):
    """A tool call; `arguments` is sent as it stands, JSON or not."""

    name: str
    arguments: str


class Step(_Strict):
    """One answer, and what goes wrong with it.

    Attributes:
        chunk_chars: characters in each chunk of text.
        prefill_gate: a gate (`ScriptedServer.gate`) at which the request waits in mid-prefill.
        gate: a gate at which it waits after the first chunk of the answer.
        settle_gate: a gate at which the slot stays busy after the client went away.
        keepalives: comments that are sent at a gate, before waiting there.
        error: refuse the request.
        error_in_stream: after the first chunk, send an error object and end.
        garbage: after the first chunk, send this as an event.
        drop_after_chunks: cut the connection after that many chunks of the answer.
        no_usage: leave usage and timings out.
        forget_tokens: the slot loses that many tokens from its end before the request.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ScriptedCall, ...] = ()
    finish_reason: Literal["stop", "tool_calls", "length"] | None = None
    chunk_chars: int = Field(default=16, ge=1)
    delay_ms: float = Field(default=0, ge=0, description="before each batch and chunk")
    prefill_gate: str | None = None
    gate: str | None = None
    settle_gate: str | None = None
    keepalives: int = Field(default=0, ge=0)
    error: ScriptedError | None = None
    error_in_stream: ScriptedError | None = None
    garbage: str | None = None
    drop_after_chunks: int | None = Field(default=None, ge=0)
    no_usage: bool = False
    forget_tokens: int = Field(default=0, ge=0)

    def reason(self) -> str:
        """Return how the answer ends."""
        return self.finish_reason or ("tool_calls" if self.tool_calls else "stop")


class Script(_Strict):
    """The whole script.

    Attributes:
        llama_cpp: False leaves out all that only llama.cpp's server has.
        loading_requests: that many requests of any kind are answered 503 first.
        states: the directory that slots are saved to; '' where the server cannot.
        rolls_back: False is a model that cannot drop tokens from the end of a slot: then it starts over.
        restores: False is a model that cannot use what was restored.
    """

    steps: tuple[Step, ...] = ()
    default: Step = Step(text="ok")
    slots: int = Field(default=1, ge=1)
    context_tokens: int = Field(default=8192, ge=16)
    batch_tokens: int = Field(default=256, ge=1)
    llama_cpp: bool = True
    loading_requests: int = Field(default=0, ge=0)
    states: str = ""
    rolls_back: bool = True
    restores: bool = True
    alias: str = "scripted"


def load_script(path: Path) -> Script:
    """Read a script.

    Raises:
        ModelSetupError: the file cannot be read or is no script.
    """
    try:
        return Script.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ModelSetupError(f"cannot read the script {path}: {error.strerror}") from error
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise ModelSetupError(f"{path}: {place or 'the script'}: {fault['msg']}") from error


# --- template and tokens --------------------------------------------------------------------------------------

_PIECE = re.compile(r"<\|\w+\|>|\w+|[\s\S]")
END = "<|im_end|>"


def tokenize(text: str) -> list[int]:
    """Return the token ids of `text`: the same piece has the same id, everywhere and always."""
    return [zlib.crc32(piece.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF for piece in _PIECE.findall(text)]


def render(body: Mapping[str, Any]) -> str:
    """Return the prompt of a request in ChatML, in the manner of the bundled template.

    As in llama.cpp's server, an answer at the end is left open, to be continued.

    Raises:
        ValueError: a message that llama.cpp would refuse.
    """
    messages = body["messages"]
    prompt = "".join(f"{json.dumps(tool)}\n" for tool in body.get("tools") or ())
    prompt += "".join(f"<|im_start|>{message['role']}\n{_content(message)}{END}\n" for message in messages)
    if messages and messages[-1]["role"] == "assistant":
        if messages[-1].get("tool_calls"):
            raise ValueError("Cannot continue an assistant message that contains tool calls.")
        return prompt.removesuffix(f"{END}\n")
    return prompt + ("<|im_start|>assistant\n" if body.get("add_generation_prompt", True) else "")


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if message["role"] == "assistant":
        return answer_text(content or "", message.get("reasoning_content") or "", _sent_calls(message))
    if not isinstance(content, str):
        raise ValueError("All non-assistant messages must contain 'content'")  # noqa: TRY004 - as the server says it
    return f"<tool_response>\n{content}\n</tool_response>" if message["role"] == "tool" else content


def answer_text(text: str, reasoning: str, calls: Iterable[ScriptedCall]) -> str:
    """Return an answer as the model would have written it; white space in arguments makes no difference."""
    thought = f"<think>{reasoning}</think>" if reasoning else ""
    tail = "".join(
        f"<tool_call>{call.name} {object_text(call.arguments) or call.arguments}</tool_call>" for call in calls
    )
    return thought + text + tail


def play(step: Step, max_tokens: int) -> tuple[Step, list[int]]:
    """Return the step as far as `max_tokens` go, and the tokens of its answer, the end of the turn included."""
    tokens = tokenize(answer_text(step.text, step.reasoning, step.tool_calls))
    if len(tokens) > max_tokens and not step.tool_calls and not step.reasoning:
        cut = "".join(_PIECE.findall(step.text)[:max_tokens])
        return step.model_copy(update={"text": cut, "finish_reason": "length"}), tokens[:max_tokens]
    return step, tokens if step.reason() == "length" else tokens + tokenize(END)


def deltas(step: Step) -> Iterator[dict[str, Any]]:
    """Yield the pieces in which a step's answer is streamed."""
    for name, text in (("reasoning_content", step.reasoning), ("content", step.text)):
        for start in range(0, len(text), step.chunk_chars):
            yield {name: text[start : start + step.chunk_chars]}
    for index, call in enumerate(step.tool_calls):
        head = {"name": call.name, "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": f"call_{index}", "type": "function", "function": head}]}
        for start in range(0, len(call.arguments), step.chunk_chars):
            piece = {"arguments": call.arguments[start : start + step.chunk_chars]}
            yield {"tool_calls": [{"index": index, "function": piece}]}


def _sent_calls(message: Mapping[str, Any]) -> Iterator[ScriptedCall]:
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            json.loads(arguments)  # llama.cpp parses them, and fails for ever if it cannot
        else:
            arguments = json.dumps(arguments)
        yield ScriptedCall(name=call["function"]["name"], arguments=arguments)


# --- the cache ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SimulatedSlot:
    """The prompt cache of one slot."""

    id: int
    tokens: list[int] = field(default_factory=list)
    task: int | None = None
    processing: bool = False
    rolls_back: bool = True
    usable: bool = True

    def common(self, prompt: list[int]) -> int:
        """Return how many tokens of the prompt need no evaluation; one always does."""
        same = takewhile(lambda pair: pair[0] == pair[1], zip(self.tokens, prompt, strict=False))
        common = min(sum(1 for _ in same), len(prompt) - 1)
        return common if self.usable and (self.rolls_back or common == len(self.tokens)) else 0

    def save(self, path: Path) -> dict[str, Any]:
        """Write the tokens to a file; return the server's answer."""
        path.write_text(json.dumps(self.tokens), encoding="utf-8")
        return {"id_slot": self.id, "n_saved": len(self.tokens), "n_written": path.stat().st_size}

    def restore(self, path: Path, *, usable: bool) -> dict[str, Any]:
        """Take the tokens from a file; return the server's answer.

        Raises:
            OSError: there is none.
            ValueError: it is not one.
        """
        text = path.read_text("utf-8")
        self.tokens, self.usable = json.loads(text), usable
        return {"id_slot": self.id, "n_restored": len(self.tokens), "n_read": len(text)}

    def forget(self, count: int) -> None:
        """Lose that many tokens from the end."""
        self.tokens = self.tokens[: max(0, len(self.tokens) - count)]

    def keep(self, prompt: list[int], answer: list[int]) -> None:
        """Hold what was evaluated: the last token of an answer never is."""
        self.tokens = (prompt + answer)[:-1] if answer else prompt
        self.usable = True
