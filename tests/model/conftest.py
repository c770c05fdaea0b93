"""Sockets, scripted servers and the tiny real model."""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from loopd.model.client import ModelClient, Timeouts
from loopd.model.script import Script
from loopd.model.scripted import ScriptedServer
from tests.model.tiny_gguf import make_tiny_gguf
from tests.servers import model_file, start_model_server

PATIENT = Timeouts(connect_s=20, load_s=20, idle_s=20, cancel_s=20)

CALL = '<tool_call>\n{"name": "find_tool", "arguments": {"query": "%s"}}\n</tool_call>'
TWO_CALLS = (CALL % "one", "\n" + CALL % "two")

Start = Callable[..., Awaitable[tuple[ScriptedServer, ModelClient]]]
MakeModel = Callable[..., Path]


@pytest.fixture
def socket_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="loopd-") as directory:
        yield f"unix:{Path(directory) / 'model.sock'}"


@pytest.fixture
async def start(socket_url: str) -> AsyncIterator[Start]:
    """Start a scripted server of the given steps, and a client of it."""
    async with AsyncExitStack() as stack:

        async def started(
            *steps: dict[str, Any], timeouts: Timeouts = PATIENT, **script: Any
        ) -> tuple[ScriptedServer, ModelClient]:
            server = ScriptedServer(Script.model_validate({"steps": steps, **script}), socket_url)
            await stack.enter_async_context(server)
            client = ModelClient(socket_url, timeouts=timeouts)
            stack.push_async_callback(client.close)
            return server, client

        yield started


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Make a tiny model whose every answer is the given tokens."""

    def made(*answer: str, pieces: tuple[str, ...] = (), endless: bool = False) -> Path:
        path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
        make_tiny_gguf(model_file(), path, answer=answer, pieces=pieces, endless=endless)
        return path

    return made


@pytest.fixture(scope="session")
def tiny_model(make_model: MakeModel) -> Path:
    return make_model("It", "Ġworks", ".")


@pytest.fixture(scope="session")
def tiny_url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The real server with a model that always answers `It works.`."""
    with start_model_server(tmp_path_factory.mktemp("m") / "m.sock", gguf=tiny_model) as url:
        yield url


@pytest.fixture
async def real(tiny_url: str) -> AsyncIterator[ModelClient]:
    client = ModelClient(tiny_url, timeouts=PATIENT)
    yield client
    await client.close()


@pytest.fixture
async def calling(make_model: MakeModel, tmp_path: Path) -> AsyncIterator[ModelClient]:
    """The real server with a model that always writes two calls."""
    model = make_model(*TWO_CALLS, pieces=TWO_CALLS)
    with start_model_server(tmp_path / "m.sock", gguf=model) as url:
        client = ModelClient(url, timeouts=PATIENT)
        yield client
        await client.close()
