"""The scripted server is a stand-in for llama.cpp: same protocol, same cache arithmetic."""

import asyncio
from pathlib import Path

import pytest

from loopd.errors import ModelSetupError
from loopd.model.client import ModelClient
from loopd.model.script import Script, Step, load_script
from loopd.model.scripted import ScriptedServer
from tests.model.requests import assistant, request, user


def script(*steps: dict[str, object], **more: object) -> Script:
    return Script.model_validate({"steps": steps, **more})


async def test_each_request_reuses_prompt_and_answer_of_the_last_but_one_token(socket_url: str) -> None:
    async with ScriptedServer(script({"text": "one two"}, {"text": "three"}), socket_url) as server:
        client = ModelClient(server.url)
        first = (await client.complete(request(user("hello")), lambda _: None)).reported
        second = (
            await client.complete(request(user("hello"), assistant("one two"), user("more")), lambda _: None)
        ).reported
        await client.close()
    assert first.prompt_tokens is not None
    assert first.completion_tokens is not None
    assert first.cached_tokens == 0
    assert second.cached_tokens == first.prompt_tokens + first.completion_tokens - 1


async def test_a_changed_history_reuses_only_what_is_common(socket_url: str) -> None:
    async with ScriptedServer(script(), socket_url) as server:
        client = ModelClient(server.url)
        await client.complete(request(user("alpha beta gamma")), lambda _: None)
        changed = (await client.complete(request(user("alpha beta delta")), lambda _: None)).reported
        await client.close()
    # <|im_start|> user \n alpha space beta space
    assert changed.cached_tokens == 7


async def test_one_slot_answers_one_request_at_a_time(socket_url: str) -> None:
    async with ScriptedServer(script({"text": "a", "gate": "hold"}), socket_url) as server:
        client = ModelClient(server.url)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(client.complete(request(user("one")), lambda _: None))
            await server.gate("hold").reached.wait()
            second = group.create_task(client.complete(request(user("two")), lambda _: None))
            await server.wait_requests(2)
            assert not second.done()
            server.gate("hold").open()
        await client.close()
    assert (first.result().text, second.result().text) == ("a", "ok")


async def test_a_restarted_server_has_forgotten_all(socket_url: str) -> None:
    async with ScriptedServer(script(), socket_url) as server:
        client = ModelClient(server.url)
        await client.complete(request(user("one")), lambda _: None)
        server.restart()
        again = (await client.complete(request(user("one")), lambda _: None)).reported
        await client.close()
    assert again.cached_tokens == 0


@pytest.mark.parametrize(("text", "why"), [("[", "Invalid JSON"), ('{"stepz": []}', "stepz"), ("", "Invalid JSON")])
def test_a_bad_script_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(ModelSetupError, match=why):
        load_script(path)


def test_a_missing_script_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelSetupError, match=r"cannot read the script .*absent\.json: No such file"):
        load_script(tmp_path / "absent.json")


def test_the_default_step_answers_ok() -> None:
    assert Script().default == Step(text="ok")
