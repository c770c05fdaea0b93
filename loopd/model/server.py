"""The embedded default: llama.cpp's own server, as the wheel `xllamacpp` has it, with pinned flags (SPEC 4.2).

It keeps nothing that is not a cache, so it ends at once when it is told to.
"""

import asyncio
import contextlib
import os
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from systemd_watchdog.systemd_watchdog import WatchDog

from loopd.config import ModelTable
from loopd.errors import ModelSetupError, UsageError
from loopd.model.script import Script
from loopd.model.scripted import ScriptedServer
from loopd.model.templates import DEFAULT_TEMPLATE, bundled_template

_MAX_SOCKET_PATH_BYTES = 107
_SERVE = "loopd model serve"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a model server listens: a Unix socket, or a host and port."""

    socket: Path | None
    host: str = ""
    port: int = 0

    @classmethod
    def of(cls, url: str) -> "Address":
        """Take `unix:/path/to/model.sock` or `http://HOST:PORT`.

        Raises:
            UsageError: it is neither, or a path that cannot be a socket of llama.cpp's server.
        """
        if url.startswith("unix:"):
            path = Path(url.removeprefix("unix:"))
            if path.suffix != ".sock" or len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
                raise UsageError(
                    f"{path}: a socket's path ends in .sock and has at most {_MAX_SOCKET_PATH_BYTES} bytes"
                )
            return cls(path)
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.port is None:
            raise UsageError(f"{url}: {_SERVE} listens on unix:/path/to/model.sock or http://HOST:PORT")
        return cls(None, parts.hostname, parts.port)

    @property
    def url(self) -> str:
        """The address as a client takes it."""
        return f"unix:{self.socket}" if self.socket else f"http://{self.host}:{self.port}"


@contextmanager
def bound(address: Address) -> Iterator[None]:
    """Make the socket's directory, take away a socket that a crash left behind, and ours at the end.

    Raises:
        ModelSetupError: something else is there, or somebody answers on it.
    """
    path = address.socket
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise ModelSetupError(f"{path} is there and is not a socket", hint="move it away")
            if _answers(path):
                raise ModelSetupError(f"a server answers on {path} already", hint="stop it, or give --socket PATH")
            path.unlink()
    except OSError as error:
        raise ModelSetupError(f"cannot listen on {path}: {error.strerror}") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def template_text(name: str) -> str:
    """Return the text of a template: a bundled name, `model` ('' leaves the model its own), or a file's path.

    Raises:
        ModelSetupError: there is no such template.
    """
    if name == "model":
        return ""
    if (text := bundled_template(name)) is not None:
        return text
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        allowed = f"[model] template is {DEFAULT_TEMPLATE!r}, 'model', or the path of a Jinja file"
        raise ModelSetupError(f"cannot read the chat template {name}: {error}", hint=allowed) from error


def serve(table: ModelTable, gguf: Path, address: Address, states: Path) -> NoReturn:
    """Serve a model until SIGTERM or SIGINT, then end the process with status 0.

    Args:
        table: `[model]`.
        gguf: the model's file.
        address: where to listen; who may connect to a socket is its owner alone.
        states: where saved slots go, readable by their owner alone.

    Raises:
        ModelSetupError: the wheel, the file, the template or the address cannot be used.
    """
    os.umask(0o077)
    with bound(address):
        states.mkdir(parents=True, exist_ok=True)
        parameters = _parameters(table, gguf, address, states)
        # While it loads, which cannot be interrupted from Python, a signal ends the process as it stands.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        running = _start(parameters, gguf)
        asyncio.run(_until_told(address.url if address.socket else running.listening_address))
    # A prefill in progress would hold an orderly end up for seconds, and there is nothing to save.
    os._exit(0)


def _parameters(table: ModelTable, gguf: Path, address: Address, states: Path) -> Any:  # noqa: ANN401 - untyped wheel
    try:
        from xllamacpp import CommonParams  # noqa: PLC0415 - an extra, and large
    except ImportError as error:
        hint = "pip install 'loopd[model]'; on a minimal Debian also apt install libgomp1"
        raise ModelSetupError(f"llama.cpp's server cannot be loaded: {error}", hint=hint) from error
    if not gguf.is_file():
        hint = "loopd model fetch brings a small one; [model] gguf names another"
        raise ModelSetupError(f"there is no model file {gguf}", hint=hint)
    parameters = CommonParams()
    parameters.model.path = str(gguf)
    parameters.model_alias = {gguf.stem}
    parameters.hostnames = [str(address.socket) if address.socket else address.host]
    parameters.port = address.port
    parameters.n_parallel = table.slots
    parameters.n_ctx = table.context_tokens * table.slots  # the server cuts a slot's share to the model's own
    parameters.n_batch = parameters.n_ubatch = table.batch_tokens
    parameters.cpuparams.n_threads = table.threads or max(1, len(os.sched_getaffinity(0)) - 1)
    parameters.use_jinja = True
    parameters.chat_template = template_text(table.template)
    parameters.endpoint_slots = parameters.endpoint_metrics = True
    parameters.slot_save_path = f"{states}/"
    parameters.cache_ram_mib = 0
    parameters.fit_params = False
    parameters.ui = False
    parameters.cors_origins = ""  # no web page that a person has open may use a server on TCP
    return parameters


def _start(parameters: Any, gguf: Path) -> Any:  # noqa: ANN401 - untyped wheel
    from xllamacpp import Server  # noqa: PLC0415 - as above

    try:
        return Server(parameters)
    except RuntimeError as error:
        hint = "the lines above say why; is it a whole GGUF file, and the template one that llama.cpp takes?"
        raise ModelSetupError(f"llama.cpp's server does not start with {gguf}", hint=hint) from error


async def _until_told(url: str) -> None:
    """Say that the server is ready, and return at SIGTERM or SIGINT."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    print(f"listening on {url}", flush=True)
    WatchDog().ready()
    await told.wait()


def serve_script(script: Script, address: Address) -> None:
    """Serve a script until SIGTERM or SIGINT.

    Raises:
        ModelSetupError: the address cannot be used.
    """

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            try:
                server = await stack.enter_async_context(ScriptedServer(script, address.url))
            except OSError as error:
                raise ModelSetupError(f"cannot listen on {address.url}: {error.strerror}") from error
            await _until_told(server.url)

    os.umask(0o077)
    with bound(address):
        asyncio.run(run())
