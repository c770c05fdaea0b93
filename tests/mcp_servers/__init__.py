"""Published MCP servers, each installed apart below `build/mcp-servers`, at the versions pinned here by hash.

`make gate` installs them. `time` and `git` are Python's, in a virtual environment each; `node` holds Node.js itself,
out of a wheel, and what `package-lock.json` names. `make lock` pins them anew.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HERE = Path(__file__).parent
_ROOT = Path(os.environ.get("LOOPD_TEST_MCP_SERVERS", _HERE.parents[1] / "build" / "mcp-servers"))


def time_server() -> list[str]:
    """The command of a server that tells and converts times."""
    return [_installed("time/bin/mcp-server-time"), "--local-timezone", "UTC"]


def git_server(repository: Path) -> list[str]:
    """The command of a server that works on a git repository."""
    return [_installed("git/bin/mcp-server-git"), "--repository", str(repository)]


def filesystem_server(directory: Path) -> list[str]:
    """The command of the file-system server, for one directory."""
    return [_node(), _package("server-filesystem"), str(directory)]


@contextmanager
def everything_server(port: int = 0) -> Iterator[str]:
    """Run the server that shows every feature, over streamable HTTP on a port of this machine, and yield its URL."""
    command = [_node(), "--require", str(_HERE / "loopback.cjs"), _package("server-everything"), "streamableHttp"]
    environment = {"PATH": os.environ["PATH"], "PORT": str(port)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            said = next((line for line in process.stdout if line.startswith(b"listening on ")), b"")
            assert said, f"{command} ended with {process.wait()}"
            yield said.decode().removeprefix("listening on ").strip()
        finally:
            process.kill()


def _node() -> str:
    return _installed("node/bin/node")


def _package(name: str) -> str:
    return _installed(f"node/node_modules/@modelcontextprotocol/{name}/dist/index.js")


def _installed(path: str) -> str:
    assert (_ROOT / path).exists(), f"{_ROOT / path} is not there: make test-servers, or set LOOPD_TEST_MCP_SERVERS"
    return str(_ROOT / path)
