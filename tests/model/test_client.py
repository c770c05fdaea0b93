"""The client against the scripted server: what a request gives, and every way in which it can fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from loopd.clock import monotonic_s
from loopd.config import ModelTable
from loopd.errors import (
    ConfigError,
    ContextOverflow,
    ModelError,
    ModelProtocolError,
    ModelRejected,
    ModelStalled,
    ModelUnavailable,
)
from loopd.model.client import Event, Loading, ModelClient, ProducedCall, Progress, ReasoningDelta, Timeouts
from tests.model.conftest import PATIENT, Start
from tests.model.requests import encoded, ignore, request, text_of, user

QUICK = Timeouts(connect_s=0.2, load_s=0.3, idle_s=0.3, cancel_s=0.3)


async def test_text_reasoning_and_calls_are_put_together(start: Start) -> None:
    calls = [{"name": "a", "arguments": '{"x": 1}'}, {"name": "b", "arguments": "not json"}]
    _, client = await start({"text": "Grüezi 世界", "reasoning": "so so", "tool_calls": calls, "chunk_chars": 3})
    events: list[Event] = []
    answer = await client.complete(request(user("hi")), events.append)
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("Grüezi 世界", "so so", "tool_calls")
    assert answer.tool_calls == (ProducedCall("call_0", "a", '{"x": 1}'), ProducedCall("call_1", "b", "not json"))
    assert text_of(events) == "Grüezi 世界"
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == "so so"
    assert answer.reported.first_token_ms is not None


async def test_the_messages_are_sent_as_the_bytes_they_are(start: Start) -> None:
    server, client = await start()
    asked = request(user("\u2028 \x7f é"), slot=0, sampling={"temperature": 0.5}, template_options={"date_string": "x"})
    assert b",".join(asked.messages) in asked.body()
    await client.complete(asked, ignore)
    body = server.requests[0]
    assert body["messages"] == [user("\u2028 \x7f é")]
    assert (body["temperature"], body["id_slot"], body["chat_template_kwargs"]) == (0.5, 0, {"date_string": "x"})


async def test_what_only_llama_cpp_knows_is_sent_only_where_there_is_a_slot(start: Start) -> None:
    server, client = await start()
    await client.complete(request(user("hi"), slot=None), ignore)
    assert not {"id_slot", "cache_prompt", "return_progress", "tools"} & server.requests[0].keys()


async def test_an_answer_that_is_too_long_is_cut_and_says_so(start: Start) -> None:
    _, client = await start({"text": "one two three four"})
    answer = await client.complete(request(user("hi"), max_tokens=3), ignore)
    assert (answer.text, answer.finish_reason) == ("one two", "length")


async def test_a_line_separator_in_a_text_does_not_end_a_line_of_the_stream(start: Start) -> None:
    _, client = await start({"text": "a\u2028b\u0085c\x0bd\r\ne"})
    assert (await client.complete(request(user("hi")), ignore)).text == "a\u2028b\u0085c\x0bd\r\ne"


async def test_a_final_chunk_without_usage_leaves_the_numbers_unknown(start: Start) -> None:
    _, client = await start({"text": "ok", "no_usage": True})
    answer = await client.complete(request(user("hi")), ignore)
    assert answer.text == "ok"
    assert (answer.reported.prompt_tokens, answer.reported.cached_tokens) == (None, None)


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ({"text": "a" * 64, "drop_after_chunks": 2}, ModelProtocolError, "mid-stream"),
        ({"text": "a" * 64, "drop_after_chunks": 0}, ModelProtocolError, "mid-stream"),
        ({"text": "ab", "garbage": '{"choices": 7}'}, ModelProtocolError, "not of the protocol"),
        ({"text": "ab", "garbage": "\x00nonsense"}, ModelProtocolError, "not of the protocol"),
        ({"text": "ab", "error_in_stream": {"message": "the GPU is gone"}}, ModelRejected, "the GPU is gone"),
        ({"error": {"status": 500, "message": "out of memory"}}, ModelRejected, r"HTTP 500.*out of memory"),
        ({"error": {"status": 401, "message": "bad key"}}, ModelRejected, r"HTTP 401.*bad key"),
    ],
)
async def test_each_fault_has_its_error_and_the_servers_words(
    start: Start, step: dict[str, object], error: type[ModelError], words: str
) -> None:
    server, client = await start(step)
    with pytest.raises(error, match=words):
        await client.complete(request(user("hi")), ignore)
    assert len(server.requests) == 1, "what was accepted is never sent again"
    assert (await client.complete(request(user("hi")), ignore)).text == "ok"


async def test_a_prompt_that_does_not_fit_says_what_is_needed_and_there(start: Start) -> None:
    _, client = await start(context_tokens=32)
    with pytest.raises(ContextOverflow) as caught:
        await client.complete(request(user("word " * 50)), ignore)
    assert (caught.value.prompt_tokens > 100, caught.value.context_tokens) == (True, 32)


async def test_a_server_that_loads_is_waited_for_and_said(start: Start) -> None:
    server, client = await start(loading_requests=3)
    events: list[Event] = []
    assert (await client.complete(request(user("hi")), events.append)).text == "ok"
    assert [event for event in events if isinstance(event, Loading)] == [
        Loading("the model server refused the request (HTTP 503): Loading model")
    ] * 3
    assert len(server.requests) == 1


async def test_a_server_that_loads_for_ever_is_unavailable(start: Start) -> None:
    _, client = await start(loading_requests=1_000_000, timeouts=QUICK)
    with pytest.raises(ModelUnavailable, match="Loading model"):
        await client.complete(request(user("hi")), ignore)
    with pytest.raises(ModelUnavailable, match="Loading model"):
        await client.wait_ready(ignore)


@pytest.mark.parametrize("url", ["unix:/nonexistent/m.sock", "http://127.0.0.1:9"])
async def test_a_refused_connection_is_unavailable_and_names_the_url(url: str) -> None:
    client = ModelClient(url, timeouts=QUICK)
    with pytest.raises(ModelUnavailable, match=url) as caught:
        await client.complete(request(user("hi")), ignore)
    await client.close()
    assert "loopd model serve" in caught.value.hint


async def test_keepalives_are_no_progress(start: Start) -> None:
    server, client = await start(
        {"text": "abc", "gate": "never", "chunk_chars": 1, "keepalives": 50},
        timeouts=Timeouts(connect_s=20, idle_s=0.3, cancel_s=20),
    )
    with pytest.raises(ModelStalled, match=r"no token and no progress for 0\.3 s"):
        await client.complete(request(user("hi")), ignore)
    assert not server.slots[0].processing


async def test_the_idle_time_does_not_count_while_the_server_lets_the_request_wait(start: Start) -> None:
    server, client = await start(
        {"text": "first", "gate": "hold"}, {"text": "second"}, timeouts=Timeouts(connect_s=20, idle_s=60)
    )
    hurried = ModelClient(client.url, timeouts=QUICK)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(client.complete(request(user("a")), ignore))
        await server.gate("hold").reached.wait()
        second = group.create_task(hurried.complete(request(user("b")), ignore))
        await server.wait_requests(2)
        done, _ = await asyncio.wait({second}, timeout=QUICK.idle_s * 2)
        assert not done
        server.gate("hold").open()
    await hurried.close()
    assert (first.result().text, second.result().text) == ("first", "second")


async def test_a_prefill_that_progresses_is_shown_and_is_not_killed_however_long_it_takes(start: Start) -> None:
    step = {"text": "done", "delay_ms": 250}
    _, client = await start(step, batch_tokens=500, timeouts=Timeouts(connect_s=20, idle_s=1.5))
    events: list[Event] = []
    began = monotonic_s()
    await client.complete(request(user("word " * 2000)), events.append)
    assert monotonic_s() - began > 1.5
    progress = [event for event in events if isinstance(event, Progress)]
    assert len(progress) == 10
    assert progress[-1].processed == progress[-1].total


@pytest.mark.parametrize("gate", ["prefill_gate", "gate"])
async def test_a_cancel_returns_when_the_slot_is_idle(start: Start, gate: str) -> None:
    server, client = await start({"text": "abc", gate: "here", "settle_gate": "busy"})
    task = asyncio.create_task(client.complete(request(user("hi")), ignore))
    await server.gate("here").reached.wait()
    task.cancel()
    await server.gate("busy").reached.wait()
    assert server.slots[0].processing
    assert not task.done()
    server.gate("busy").open()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not server.slots[0].processing


async def test_a_cancel_does_not_wait_for_ever(start: Start) -> None:
    server, client = await start({"text": "abc", "gate": "here", "settle_gate": "stuck"}, timeouts=QUICK)
    task = asyncio.create_task(client.complete(request(user("hi")), ignore))
    await server.gate("here").reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.slots[0].processing


async def test_a_server_without_slots_props_and_tokenizer_works_with_what_it_has(start: Start) -> None:
    _, client = await start({"text": "hello"}, llama_cpp=False, alias="gpt")
    await client.wait_ready(ignore)
    facts = await client.facts()
    assert (facts.alias, facts.slots, facts.template, facts.context_tokens) == ("gpt", None, None, None)
    assert await client.slots() == []
    await client.wait_idle(0)
    assert (await client.complete(request(user("hi"), slot=None), ignore)).text == "hello"
    with pytest.raises(ModelRejected):
        await client.render(encoded(user("hi")), b"[]", options={})


async def test_facts_slots_rendering_and_tokens_are_what_the_server_says(start: Start) -> None:
    server, client = await start(slots=2, context_tokens=500)
    facts = await client.facts()
    assert (facts.alias, facts.slots, facts.context_tokens, facts.build) == ("scripted", 2, 500, "scripted")
    assert [(view.id, view.task) for view in await client.slots()] == [(0, None), (1, None)]
    done = await client.complete(request(user("hi"), slot=1), ignore)
    prompt = await client.render(encoded(user("hi")), b"[]", options={})
    assert len(await client.tokenize(prompt)) == done.reported.prompt_tokens
    assert [(view.task, view.tokens) for view in await client.slots()] == [(None, 0), (1, len(server.slots[1].tokens))]


@asynccontextmanager
async def raw_server(answer: bytes) -> AsyncIterator[str]:
    """A server that answers every connection with the same bytes."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"\x00\x01garbage\r\n\r\n", ModelProtocolError),
        (b"", ModelProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html>", ModelProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: [DONE]\n\n", ModelProtocolError),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: \xff\xfe\n\n", ModelProtocolError),
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 5\r\n\r\n<html", ModelRejected),
        (b"HTTP/1.1 400 Bad\r\nContent-Length: 500\r\n\r\n{", ModelProtocolError),
        (b'HTTP/1.1 400 Bad\r\nContent-Length: 15\r\n\r\n{"error": "no"}', ModelRejected),
    ],
)
async def test_a_server_that_speaks_something_else_is_an_error_of_ours(answer: bytes, error: type[ModelError]) -> None:
    async with raw_server(answer) as url:
        client = ModelClient(url, timeouts=PATIENT)
        with pytest.raises(error):
            await client.complete(request(user("hi"), slot=None), ignore)
        await client.close()


async def test_the_key_comes_from_its_file(tmp_path: Path) -> None:
    table = ModelTable(api_key_file=str(tmp_path / "key"))
    with pytest.raises(ConfigError, match=r"api_key_file: cannot read .*key"):
        ModelClient.from_config(table, "http://127.0.0.1:9/v1")
    (tmp_path / "key").write_text("secret\n")
    client = ModelClient.from_config(table, "http://127.0.0.1:9/v1")
    await client.close()


async def test_the_key_is_sent_and_a_url_may_end_in_v1() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"tokens": [1]})

    client = ModelClient("https://model/v1", api_key="secret", transport=httpx.MockTransport(answer))
    assert await client.tokenize("a") == [1]
    await client.close()
    assert (str(asked[0].url), asked[0].headers["authorization"]) == ("https://model/tokenize", "Bearer secret")
