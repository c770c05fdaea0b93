"""One real model server for the whole run, and a fresh home for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.appliance import Appliance, ServerNumbers
from tests.servers import model_file, start_model_server


@pytest.fixture(scope="session")
def model_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    socket = tmp_path_factory.mktemp("model") / "m.sock"
    with start_model_server(socket, gguf=model_file()):
        yield f"unix:{socket}"


@pytest.fixture
def server(model_url: str) -> Iterator[ServerNumbers]:
    numbers = ServerNumbers(model_url)
    yield numbers
    numbers.close()


@pytest.fixture
def device(model_url: str, tmp_path: Path) -> Appliance:
    return Appliance(tmp_path, model_url)
