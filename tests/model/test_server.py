"""The embedded server as a process: where it listens, who may connect, how it ends."""

import asyncio
import socket
import stat
from pathlib import Path

import httpx
import pytest

from loopd.clock import monotonic_s
from loopd.config import ModelTable
from loopd.errors import ModelProtocolError, ModelSetupError, UsageError
from loopd.model.client import Event, ModelClient, Progress
from loopd.model.server import Address, bound, serve, template_text
from tests.model.requests import ignore, request, user
from tests.servers import model_file, start_model_server, start_scripted_server


async def test_only_its_owner_may_connect_and_the_socket_is_gone_at_the_end(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.sock"
    with start_model_server(path, gguf=tiny_model) as url:
        assert url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
    assert not path.exists()


async def test_its_flags_are_pinned(tiny_model: Path, tmp_path: Path) -> None:
    with start_model_server(tmp_path / "m.sock", gguf=tiny_model, slots=2, context_tokens=1024) as url:
        client = ModelClient(url)
        facts = await client.facts()
        await client.close()
    assert (facts.alias, facts.slots, facts.context_tokens) == ("tiny", 2, 1024)
    assert facts.template == template_text("chatml-tools")


async def test_a_slot_is_never_larger_than_the_models_own_context(tiny_model: Path, tmp_path: Path) -> None:
    with start_model_server(tmp_path / "m.sock", gguf=tiny_model, context_tokens=100_000) as url:
        client = ModelClient(url)
        assert (await client.facts()).context_tokens == 8192
        await client.close()


async def test_a_script_is_served_over_tcp_too() -> None:
    with start_scripted_server(None, {"default": {"text": "played"}}) as url:
        assert url.startswith("http://127.0.0.1:")
        client = ModelClient(url)
        answer = await client.complete(request(user("hi")), ignore)
        await client.close()
    assert answer.text == "played"


async def test_gates_of_a_scripted_process_are_opened_over_http(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path / "m.sock", {"steps": [{"text": "abc", "gate": "here"}]}) as url:
        client = ModelClient(url)
        transport = httpx.AsyncHTTPTransport(uds=url.removeprefix("unix:"))
        async with httpx.AsyncClient(transport=transport, base_url="http://m", timeout=20) as http:
            answer = asyncio.create_task(client.complete(request(user("hi")), ignore))
            await http.get("/gates/here")
            assert not answer.done()
            await http.post("/gates/here")
            assert (await answer).text == "abc"
        await client.close()


def test_a_socket_left_by_a_crash_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with bound(Address(path)):
        assert not path.exists()


def test_a_live_server_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "m.sock"
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(path))
        live.listen()
        with pytest.raises(ModelSetupError, match="answers on"), bound(Address(path)):
            pass
        assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.sock"
    path.write_text("precious") if kind == "file" else path.mkdir()
    with pytest.raises(ModelSetupError, match="is not a socket"), bound(Address(path)):
        pass
    assert path.exists()


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ModelSetupError, match=r"cannot listen on .*: (Not a directory|File exists)"),
        bound(Address(tmp_path / "file" / "m.sock")),
    ):
        pass


@pytest.mark.parametrize(
    "url", ["unix:/tmp/model", f"unix:/{'x' * 110}.sock", "https://127.0.0.1:1", "http://127.0.0.1", "ftp://x:1"]
)
def test_an_address_that_cannot_be_served_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        Address.of(url)


@pytest.mark.parametrize("url", ["unix:/tmp/model.sock", "http://127.0.0.1:8080"])
def test_an_address_is_what_a_client_takes(url: str) -> None:
    assert Address.of(url).url == url


def test_a_missing_model_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ModelSetupError, match="there is no model file") as caught:
        serve(ModelTable(), tmp_path / "absent.gguf", Address(tmp_path / "m.sock"), tmp_path)
    assert "loopd model fetch" in caught.value.hint


def test_a_missing_template_says_what_is_allowed() -> None:
    with pytest.raises(ModelSetupError, match="cannot read the chat template absent") as caught:
        template_text("absent")
    assert "chatml-tools" in caught.value.hint


def test_a_file_that_is_no_model_is_refused_without_a_traceback(tmp_path: Path) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_text("not a model")
    words = r"(?s)ended with 1.*error: llama\.cpp's server does not start with"
    with pytest.raises(AssertionError, match=words) as caught, start_model_server(tmp_path / "m.sock", gguf=gguf):
        pass
    assert "Traceback" not in str(caught.value)


async def test_it_ends_when_told_in_the_middle_of_a_prefill(tmp_path: Path) -> None:
    began = asyncio.Event()

    def on_event(event: Event) -> None:
        if isinstance(event, Progress):
            began.set()

    with start_model_server(tmp_path / "m.sock", gguf=model_file(), batch_tokens=64) as url:
        client = ModelClient(url)
        task = asyncio.create_task(client.complete(request(user("word " * 6000)), on_event))
        await began.wait()
        told_at = monotonic_s()
    assert monotonic_s() - told_at < 5, "a prefill of 6,000 tokens takes many times that"
    with pytest.raises(ModelProtocolError):
        await task
    await client.close()
