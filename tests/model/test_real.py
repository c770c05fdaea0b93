"""The client against llama.cpp's own server: the embedded one, with a tiny model, and the bundled template."""

import asyncio
from pathlib import Path

import pytest

from loopd.config import DEFAULT_SYSTEM_PROMPT
from loopd.errors import ContextOverflow, ModelRejected
from loopd.model.account import account
from loopd.model.client import Event, ModelClient, ProducedCall, Progress
from loopd.model.slots import SlotPool
from loopd.proto.canonical import canonical
from loopd.tools.meta import DEFINITIONS
from tests.model.conftest import MakeModel
from tests.model.requests import (
    TOOLS,
    assistant,
    encoded,
    ignore,
    left_by,
    request,
    results,
    system,
    text_of,
    usage_of,
    user,
)
from tests.model.test_account import Baseline
from tests.servers import start_model_server

LONG = "word " * 6000


async def test_each_turn_finds_the_whole_of_the_last_in_the_cache(real: ModelClient) -> None:
    messages = [system("Be brief."), user("Grüezi")]
    expected = 0
    for turn in range(4):
        events: list[Event] = []
        done = await real.complete(request(*messages), events.append)
        assert text_of(events) == done.text == "It works."
        if turn:
            assert done.reported.cached_tokens == expected
        expected = left_by(done)
        messages += [assistant(done.text), user(f"And {turn}?")]


async def test_the_slot_shows_what_the_account_says_is_in_it(real: ModelClient) -> None:
    done = await real.complete(request(user("How many?")), ignore)
    (view,) = await real.slots()
    assert (view.tokens, view.processing) == (left_by(done), False)
    prompt = await real.render(encoded(user("How many?")), b"[]", options={})
    assert len(await real.tokenize(prompt)) == done.reported.prompt_tokens


async def test_several_calls_with_their_results_come_back_as_the_same_tokens(calling: ModelClient) -> None:
    messages = [system("Be brief."), user("Find one and two.")]
    expected = None
    for _ in range(3):
        done = await calling.complete(request(*messages, tools=TOOLS), ignore)
        assert done.finish_reason == "tool_calls"
        assert [(call.name, call.arguments) for call in done.tool_calls] == [
            ("find_tool", '{"query": "one"}'),
            ("find_tool", '{"query": "two"}'),
        ]
        if expected is not None:
            assert done.reported.cached_tokens == expected
        expected = left_by(done)
        compact = [ProducedCall(call.id, call.name, call.arguments.replace(" ", "")) for call in done.tool_calls]
        messages += [assistant(done.text, *compact), *results(done.tool_calls), user("And?")]


@pytest.mark.parametrize(
    "answer",
    [
        ("Let me see.", '<tool_call>\n{"name": "find_tool", "arguments": {"query": "one"}}\n</tool_call>'),
        ("Let me see.\n\n", '<tool_call>\n{"name": "find_tool", "arguments": {"query": "one"}}\n</tool_call>'),
        ("<think>", "\nhmm\n", "</think>", "\n\n", "It works."),
    ],
    ids=["text-and-call", "text-blank-line-and-call", "reasoning"],
)
async def test_text_before_a_call_and_reasoning_come_back_as_the_same_tokens(
    answer: tuple[str, ...], make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with start_model_server(tmp_path_factory.mktemp("m") / "m.sock", gguf=make_model(*answer, pieces=answer)) as url:
        client = ModelClient(url)
        first = await client.complete(request(user("Hi"), tools=TOOLS), ignore)
        back = assistant(first.text, *first.tool_calls, reasoning=first.reasoning)
        more = [*results(first.tool_calls), user("Go on.")]
        second = await client.complete(request(user("Hi"), back, *more, tools=TOOLS), ignore)
        await client.close()
    assert second.reported.cached_tokens == left_by(first)


async def test_the_first_request_stays_small(real: ModelClient) -> None:
    messages = encoded(system(DEFAULT_SYSTEM_PROMPT), user("Hi"))
    prompt = await real.render(messages, canonical(list(DEFINITIONS)), options={})
    assert len(await real.tokenize(prompt)) <= 310


async def test_a_user_may_speak_after_a_result_and_results_may_follow_each_other(real: ModelClient) -> None:
    calls = (ProducedCall("a", "find_tool", "{}"), ProducedCall("b", "find_tool", "{}"))
    history = [user("Hi"), assistant("", *calls), *results(calls), user("Thanks")]
    prompt = await real.render(encoded(*history), TOOLS, options={})
    assert prompt.endswith(
        "<|im_start|>user\n<tool_response>\ndone\n</tool_response>\n<tool_response>\ndone\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_arguments_keep_the_order_of_the_model(real: ModelClient) -> None:
    call = ProducedCall("a", "find_tool", '{"z":1,"a":"é"}')
    prompt = await real.render(encoded(user("Hi"), assistant("", call), *results([call])), TOOLS, options={})
    assert '{"name": "find_tool", "arguments": {"z": 1, "a": "é"}}' in prompt


async def test_a_prompt_that_does_not_fit_says_what_is_needed_and_there(real: ModelClient) -> None:
    with pytest.raises(ContextOverflow) as caught:
        await real.complete(request(user(LONG * 2)), ignore)
    assert (caught.value.prompt_tokens > 8192, caught.value.context_tokens) == (True, 8192)


async def test_a_history_that_the_server_refuses_is_rejected_in_its_words(real: ModelClient) -> None:
    call = ProducedCall("a", "find_tool", '{"a":')
    with pytest.raises(ModelRejected, match="parse"):
        await real.complete(request(user("Hi"), assistant("", call), *results([call])), ignore)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_after_a_cancel_the_slot_is_idle_and_nothing_is_lost(
    phase: str, make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = make_model("It", "Ġis", "Ġfine", endless=phase == "decode")
    with start_model_server(tmp_path_factory.mktemp("m") / "m.sock", gguf=model, batch_tokens=16) as url:
        client = ModelClient(url)
        first = await client.complete(request(user("Hi"), max_tokens=8), ignore)
        begun = asyncio.Event()

        def on_event(event: Event) -> None:
            moving = event.processed > event.cached if isinstance(event, Progress) else True
            if moving and isinstance(event, Progress) == (phase == "prefill"):
                begun.set()

        longer = (user("Hi"), assistant(first.text), user(LONG if phase == "prefill" else "Go on."))
        task = asyncio.create_task(client.complete(request(*longer, max_tokens=100_000), on_event))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not (await client.slots())[0].processing
        again = await client.complete(request(user("Hi"), assistant(first.text), user("Bye"), max_tokens=1), ignore)
        await client.close()
    assert again.reported.cached_tokens is not None
    assert again.reported.cached_tokens >= left_by(first)


async def test_another_client_between_two_turns_is_found_out(real: ModelClient) -> None:
    pool = SlotPool(1, real)
    asked = request(system("Be brief."), user("Grüezi"))
    async with pool.hold("a"):
        first = await real.complete(asked, ignore)
    await real.complete(request(user("I am somebody else. " * 10)), ignore)
    again = request(system("Be brief."), user("Grüezi"), assistant(first.text), user("Still there?"))
    async with pool.hold("a") as slot:
        condition = await pool.look(slot, "a", left_by(first))
        reported = (await real.complete(again, ignore)).reported
    expected, loss, cause = await account(real, Baseline(), usage_of(asked, first), again.messages, reported, condition)
    assert expected == left_by(first)
    assert loss
    assert cause is not None
    assert cause.name == "slot_taken"
    assert "another client" in cause.evidence


async def test_a_restarted_server_is_found_out(tiny_model: Path, tmp_path: Path) -> None:
    client = ModelClient(f"unix:{tmp_path}/m.sock")
    pool = SlotPool(1, client)
    with start_model_server(tmp_path / "m.sock", gguf=tiny_model):
        async with pool.hold("a"):
            done = await client.complete(request(user("Grüezi")), ignore)
    with start_model_server(tmp_path / "m.sock", gguf=tiny_model):
        condition = await pool.look(0, "a", left_by(done))
    await client.close()
    assert condition.kind == "cold"
