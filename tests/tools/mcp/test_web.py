"""The port over streamable HTTP: a server that is somebody else's, comes and goes, and wants a secret."""

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loopd.errors import ToolError
from loopd.tools.mcp import connection
from loopd.tools.mcp import port as port_module
from tests.tools.mcp.held import PATIENCE_S, held

ROOT = Path(__file__).parents[3]


class Web:
    """The fake server as a process, always on the same port."""

    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/mcp"
        self._config = directory / "fake.json"

    @contextmanager
    def served(self) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, "-ESm", "tests.tools.mcp.fake_web_server", str(self._config), str(self.port)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert self.url in process.stdout.readline()
                yield process
            finally:
                process.kill()


async def test_a_server_over_http_is_listed_and_called_and_told_when_we_go(tmp_path: Path) -> None:
    web = Web(tmp_path)
    async with held(tmp_path, url=web.url) as it:
        with web.served() as process:
            await it.up()
            assert await it.call("echo", "hello") == "echo hello"
            assert await it.call("fail") == "not ok: it cannot be done"
            it.stop()
            assert process.stdout is not None
            assert await asyncio.to_thread(process.stdout.readline) == "session ended\n"


async def test_a_server_that_has_not_answered_yet_is_being_connected_to(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with held(tmp_path, url=f"http://127.0.0.1:{mute.getsockname()[1]}/mcp") as it:
            connected, _ = await asyncio.to_thread(mute.accept)
            with connected:
                assert (it.port.state, it.port.reason) == ("down", "connecting")


async def test_a_server_that_is_not_there_yet_is_a_reason_and_is_found_later(tmp_path: Path) -> None:
    web = Web(tmp_path)
    async with held(tmp_path, url=web.url.replace("http://", "http://user:pass@") + "?key=1") as it:
        await it.logged("mcp_down")
        assert it.port.reason.endswith(f"; {web.url}")
        assert "ConnectError" in it.port.reason
        with web.served():
            await it.up()


async def test_a_server_that_has_restarted_is_connected_to_again(tmp_path: Path) -> None:
    web = Web(tmp_path)
    async with held(tmp_path, url=web.url) as it:
        with web.served():
            await it.up()
        with web.served():
            with pytest.raises(ToolError, match=r"did not run it; call again|ended in mid-call"):
                await it.call("echo")
            await it.logged("mcp_down")
            await it.up()
            assert await it.call("echo", "again") == "echo again"


async def test_a_server_that_dies_in_mid_call_is_down(tmp_path: Path) -> None:
    web = Web(tmp_path)
    async with held(tmp_path, {"heard": str(tmp_path / "heard")}, url=web.url) as it:
        with web.served() as process:
            await it.up()
            call = asyncio.create_task(it.call("never"))
            async with asyncio.timeout(PATIENCE_S):
                while '"never"' not in await asyncio.to_thread((tmp_path / "heard").read_text):
                    pass
            process.kill()
            with pytest.raises(ToolError, match="whether the call took effect is unknown"):
                await call
        await it.logged("mcp_down")
        assert it.port.state == "down"
        assert "echo" in it.names()


async def test_a_cancelled_call_ends_at_once_and_the_server_is_told(tmp_path: Path) -> None:
    web = Web(tmp_path)
    async with held(tmp_path, {"heard": str(tmp_path / "heard")}, url=web.url) as it:
        with web.served():
            await it.up()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await it.port.run("never", {})
            assert await it.call("echo", "next") == "echo next"
        sent = [json.loads(line) for line in (tmp_path / "heard").read_text(encoding="utf-8").splitlines()]
        assert "notifications/cancelled" in [message["method"] for message in sent]


async def test_calls_that_are_cancelled_end_at_once_whatever_the_server_does(tmp_path: Path) -> None:
    web = Web(tmp_path)
    async with held(tmp_path, {"silent": ["notifications/cancelled"]}, url=web.url) as it:
        with web.served():
            await it.up()
            calls = [asyncio.create_task(it.port.run("never", {})) for _ in range(5)]
            assert await it.call("echo", "meanwhile") == "echo meanwhile"
            for call in calls:
                call.cancel()
            done, _ = await asyncio.wait(calls, timeout=2.0)
            assert len(done) == len(calls)


async def test_a_server_that_answers_nothing_more_is_connected_to_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_PING_S", 0.3)
    web = Web(tmp_path)
    async with held(tmp_path, url=web.url) as it:
        with web.served():
            await it.up()
            it.configure(silent=["ping"])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await it.port.run("never", {})
            await it.logged("mcp_down server=fake reason='did not answer a ping after never took longer than ")
            await it.up()
            assert await it.call("echo", "again") == "echo again"


async def test_a_secret_header_is_sent_and_never_shown(tmp_path: Path) -> None:
    web, secret = Web(tmp_path), tmp_path / "header"
    files = {"Authorization": str(secret)}
    async with held(tmp_path, {"token": "Bearer tops3cret"}, url=web.url, header_files=files) as it:
        await it.logged("mcp_down")
        assert it.port.reason.startswith("the secret Authorization cannot be read from")
        secret.write_text("Bearer wr0ngone\n", encoding="utf-8")
        with web.served():
            await it.logged("initialize: ")
            assert it.port.state == "down"
            secret.write_text("Bearer tops3cret\n", encoding="utf-8")
            await it.up()
        assert "wr0ngone" not in it.log()
        assert "tops3cret" not in it.log()


async def test_an_error_of_the_web_server_is_a_reason(tmp_path: Path) -> None:
    web = Web(tmp_path)
    async with held(tmp_path, {"status": 500}, url=web.url) as it:
        with web.served():
            await it.logged("mcp_down")
            assert it.port.reason == (
                f"initialize: Server returned an error response; HTTP 500 Internal Server Error; {web.url}"
            )


async def test_an_answer_that_is_too_long_fails_its_call_and_a_long_one_does_not(tmp_path: Path) -> None:
    web = Web(tmp_path)
    async with held(tmp_path, url=web.url) as it:
        with web.served():
            await it.up()
            assert "bytes left out" in await it.call("huge", "2000000")
            assert "longer than 8388608 bytes" in await it.call("huge", "30000000")
            assert await it.call("echo", "still there") == "echo still there"


async def test_a_list_that_changes_without_a_word_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_module, "_POLL_S", 0.1)
    web = Web(tmp_path)
    async with held(tmp_path, url=web.url) as it:
        with web.served():
            await it.up()
            it.configure(tools=[{"name": "new", "inputSchema": {"type": "object"}}])
            await it.until(lambda: it.names() == ["new"])
