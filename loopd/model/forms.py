"""The forms that a chat template takes, and whether its prompts only grow: asked of the server with small examples."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from loopd.errors import ModelRejected
from loopd.model.client import ModelClient
from loopd.model.rendering import Renderer, common_length, is_answer
from loopd.proto.canonical import canonical

ArgumentsForm = Literal["string", "object"]
_MARK = "Zebra"
_TOOLS = canonical(
    [
        {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
        for name in ("find_tool", "call_tool")
    ]
)


class Forms(BaseModel):
    """What was found.

    Attributes:
        arguments: how the arguments of a replayed call are sent.
        system: where the system prompt goes: a message, or before the first user text.
        user_after_tool: a user message may follow a tool result.
        tools: the template shows the tools to the model.
        reasoning_kept: reasoning of earlier turns stays in the prompt.
        grows: every later prompt of the examples began with the text of the earlier one and its answer.
        notes: what a person should know, one sentence each.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    arguments: ArgumentsForm = "string"
    system: Literal["message", "user"] = "message"
    user_after_tool: bool = True
    tools: bool = True
    reasoning_kept: bool = True
    grows: bool = True
    notes: tuple[str, ...] = ()


async def find_forms(client: ModelClient, template: str | None, options: Mapping[str, Any]) -> Forms:
    """Return what the server's template takes; the defaults where the server shows no template.

    Raises:
        ModelError: the server does not answer.
    """
    if template is None:
        return Forms(notes=("the server shows no chat template, so nothing is known about what it does to a history",))
    finder = _Finder(client, options)
    arguments = await finder.arguments()
    call = _call(arguments or "string")
    results = [_result("call_1", _MARK)]
    notes = [*await finder.notes_on_time(template), *_notes_on_markup(template)]
    if arguments is None:
        notes.append("the template refuses tool calls")
    reasons = await finder.shows_reasoning(call, results)
    if not reasons:
        notes.append("the template never shows reasoning to the model")
    tools = await finder.shows("find_tool", [_user("Hi")], tools=_TOOLS)
    if not tools:
        notes.append("the template does not show tools to the model")
    grows, changes = await finder.compare(call, results, reasons=reasons)
    return Forms(
        arguments=arguments or "string",
        system="message" if await finder.shows(_MARK, [_system(_MARK), _user("Hi")]) else "user",
        user_after_tool=await finder.shows("Thanks", [_user("Hi"), call, *results, _user("Thanks")]),
        tools=tools,
        reasoning_kept=await finder.shows(_MARK, [_user("Hi"), _answer("Hello", reasoning=_MARK), _user("Bye")]),
        grows=grows,
        notes=(*notes, *changes),
    )


def _notes_on_markup(template: str) -> list[str]:
    return [f"the template's own markup names {name}" for name in ("find_tool", "call_tool") if name in template]


@dataclass(frozen=True, slots=True)
class _Finder:
    client: ModelClient
    options: Mapping[str, Any]

    async def shows(self, what: str, messages: Sequence[dict[str, Any]], *, tools: bytes = b"[]") -> bool:
        """Tell whether the template takes the messages and `what` reaches the prompt."""
        try:
            return what in await self.client.render(_encoded(messages), tools, options=self.options)
        except ModelRejected:
            return False

    async def notes_on_time(self, template: str) -> list[str]:
        """Return what becomes of the date in a template that asks for the time."""
        if "strftime_now" not in template:
            return []
        for value in self.options.values():
            if isinstance(value, str) and await self.shows(value, [_user("Hi")]):
                return [f"the template asks for the time, and is given a fixed date: {value}"]
        return ["the template asks for the time: the prompt changes with the date, and the cache is lost then"]

    async def shows_reasoning(self, call: dict[str, Any], results: list[dict[str, Any]]) -> bool:
        """Tell whether reasoning reaches the prompt at all: a template that drops the earlier shows the latest."""
        latest = [_user("Hi"), {**call, "reasoning_content": _MARK * 2}, *results]
        earlier = [_user("Hi"), _answer("Hello", reasoning=_MARK * 2), _user("Bye")]
        return await self.shows(_MARK * 2, latest) or await self.shows(_MARK * 2, earlier)

    async def arguments(self) -> ArgumentsForm | None:
        """Return the form in which arguments come out as the JSON they are; None if no form does."""
        forms: tuple[ArgumentsForm, ...] = ("string", "object")
        for form in forms:
            if await self.shows(f'"{_MARK}"', [_user("Hi"), _call(form), _result("call_1", "yes")]):
                return form
        return None

    async def compare(
        self, call: dict[str, Any], results: list[dict[str, Any]], *, reasons: bool
    ) -> tuple[bool, list[str]]:
        """Return whether later prompts only add text, and a sentence for each example in which tokens change.

        Where the template never shows reasoning, its model is not asked for any, and there is nothing to take back.
        """
        second = {**call["tool_calls"][0], "id": "call_2"}
        both = {**call, "tool_calls": [*call["tool_calls"], second]}
        examples = {
            "plain": [_user("Hi"), _answer("Hello."), _user("Bye")],
            "reasoning": [_user("Hi"), _answer("Hello.", reasoning="So."), _user("Bye"), _answer("Bye."), _user("?")],
            "one call": [_user("Hi"), call, *results, _answer("Yes."), _user("Bye")],
            "several calls": [_user("Hi"), both, *results, _result("call_2", "no"), _answer("Yes."), _user("Bye")],
            "user after a result": [_user("Hi"), call, *results, _user("Bye"), _answer("Bye."), _user("?")],
            "user after user": [_user("Hi"), _user("There"), _answer("Hello."), _user("Bye")],
            "unicode": [_user("Grüezi 世界 👩‍👩‍👧"), _answer("naïve 𝔘𝔫𝔦 \u202b"), _user("Bye")],
            "white space": [_user("  Hi\n"), _answer("\n  Hello. \n"), _user(" \n"), _answer("Bye."), _user("?")],
        }
        if not reasons:
            del examples["reasoning"]
        renderer = Renderer(self.client, _TOOLS, self.options)
        grows, notes = True, []
        for name, messages in examples.items():
            try:
                rewritten, note = await self._compare(renderer, _encoded(messages))
            except ModelRejected as error:
                rewritten, note = False, f"refused: {error.message}"
            grows = grows and not rewritten
            notes += [f"{name}: {note}"] if note else []
        return grows, notes

    async def _compare(self, renderer: Renderer, messages: list[bytes]) -> tuple[bool, str]:
        ends = [end for end, message in enumerate(messages) if is_answer(message)]
        for end, following in pairwise([*ends, len(messages)]):
            before = await renderer.request(messages[:end])
            after = await self.client.tokenize(await renderer.request(messages[:following]))
            tokens = await self.client.tokenize(before)
            same = common_length(tokens, after)
            if where := await renderer.first_rewritten(messages[:end], messages[:following]):
                return True, f"{where} is rewritten by a later request, from token {same} of {len(tokens)} on"
            answer = json.loads(messages[end])
            if same == len(tokens) and not {"tool_calls", "reasoning_content"} & answer.keys():
                tokens = await self.client.tokenize(before + answer["content"])
                same = common_length(tokens, after)
            if same < len(tokens):
                lost = len(tokens) - same
                return False, f"message {end + 1}, an answer, tokenises otherwise when it comes back ({lost} tokens)"
        return False, ""


def _encoded(messages: Sequence[dict[str, Any]]) -> list[bytes]:
    return [canonical(message) for message in messages]


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _answer(text: str, *, reasoning: str = "") -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"reasoning_content": reasoning} if reasoning else {})}


def _call(form: ArgumentsForm) -> dict[str, Any]:
    arguments: Any = {"query": _MARK}
    function = {"name": "find_tool", "arguments": canonical(arguments).decode() if form == "string" else arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}
