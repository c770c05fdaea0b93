"""Processes of tools, as the daemon sees them: started by the runner, never by the daemon itself (SPEC 6).

The runner is a child of the daemon, or a service of its own that is reached by a Unix socket (`[tools] runner`). Either
way a process gets three pipes, the variables it is given beside a minimal set, its limits, and nothing else of the
daemon; and it ends, with all that it started, when its `Child` is closed or the daemon is gone, however it went.
"""

import asyncio
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO, Self

from loopd.clock import monotonic_s
from loopd.config import ToolsTable
from loopd.errors import ToolError
from loopd.tools import runner

log = logging.getLogger("loopd.tools.children")

_ANSWER_S, _LOOK_S = 20.0, 2.0
_CLOSE_S = runner.GRACE_S + 5.0
_BACKLOG = 1024
_OWN = "child of loopd"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 30.0
_NOTHING: Mapping[str, str] = MappingProxyType({})

_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Child:
    """A process of a tool and everything below it. An async context manager that ends them.

    Attributes:
        pid: of the process itself.
        stdin: its input. What it does not read makes `drain` wait.
        stdout: its output. What is not read makes it wait; at most 128 KiB lie here, as many in the system.
        stderr: likewise.
    """

    def __init__(
        self,
        pid: int,
        connection: _Connection,
        stdin: asyncio.StreamWriter,
        outputs: Sequence[tuple[asyncio.StreamReader, asyncio.ReadTransport]],
    ) -> None:
        self.pid, self.stdin = pid, stdin
        (self.stdout, _), (self.stderr, _) = outputs
        self._answers, self._connection = connection
        self._transports = [transport for _, transport in outputs]
        self._one_at_a_time = asyncio.Lock()
        self._end: dict[str, Any] | None = None

    async def wait(self) -> int:
        """Return its exit status, or minus the number of the signal that ended it, when nothing of it is left.

        Raises:
            ToolError: it was stopped: by `close`, or because the runner ended.
        """
        async with self._one_at_a_time:
            if self._end is None:
                self._end = _decoded(await self._answers.readline())
        if "exit" not in self._end:
            raise ToolError(f"process {self.pid} did not run to its end: {_error(self._end)}")
        status: int = self._end["exit"]
        return status

    async def close(self) -> None:
        """End it and all that it started; return when they are gone, after 6 s at the latest.

        They get SIGTERM and, where that does not help within a second, SIGKILL.
        """
        try:
            with suppress(OSError):
                self._connection.write_eof()
            async with asyncio.timeout(_CLOSE_S):
                await self.wait()
        except ToolError:
            pass  # that is what ending it means
        except TimeoutError:
            log.warning("not_ended pid=%d seconds=%g", self.pid, _CLOSE_S)
        finally:
            for transport in (self._connection.transport, self.stdin.transport):
                if not transport.is_closing():
                    transport.abort()
            for output in self._transports:
                output.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Children:
    """Starts the processes of tools.

    Args:
        table: returns `[tools]` as it is now: where the runner is, and the limits of a process.
        run_directory: working directory, `HOME` and `TMPDIR` of what a runner that is a child of the daemon starts.
    """

    def __init__(self, table: Callable[[], ToolsTable], run_directory: Path) -> None:
        self._table, self._run_directory = table, run_directory
        self._wanted, self._listening = asyncio.Event(), asyncio.Event()
        self._own_address = b""
        self._fault = ""

    async def start(self, command: Sequence[str], *, env: Mapping[str, str] = _NOTHING, directory: str = "") -> Child:
        """Start a process.

        Args:
            command: program and arguments; a program without a slash is looked for in `PATH`. Bytes that are not
                UTF-8 stand as `os.fsdecode` gives them.
            env: its variables, beside `PATH`, `HOME`, `TMPDIR` and `LANG`, which it may change.
            directory: where it starts; "" for the work directory.

        Raises:
            ToolError: it could not be started, and why.
        """
        table = self._table()
        limits = {
            "data": table.max_child_bytes,
            "files": table.max_child_files,
            "file_bytes": table.max_child_file_bytes,
        }
        request = {"argv": list(command), "env": dict(env), "directory": directory, "limits": limits}
        message = json.dumps(request).encode() + b"\n"
        if len(message) > runner.MAX_MESSAGE_BYTES:
            raise ToolError(f"{command[0]} cannot be started: {len(message):,} bytes of arguments are too many")
        with ExitStack() as stack:
            link, connection, _ = await self._open(table)
            stack.callback(connection[1].transport.abort)
            with ExitStack() as theirs:
                pipes = [_pipe(stack, theirs, child_reads=number == 0) for number in range(runner.DESCRIPTORS)]
                _send(link, connection[1], message, [their for _, their in pipes])
                answer = await _answer(connection)
            if "pid" not in answer:
                raise ToolError(_error(answer))
            child = await _child(answer["pid"], connection, [our for our, _ in pipes])
            stack.pop_all()
        return child

    async def keep(self) -> None:
        """Run the runner as a child of the daemon from when it is first needed, and again after it has died.

        Until cancelled, which ends it; every `Child` must be closed by whoever has it. Where the runner is a service
        there is nothing to keep.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            # A name that the kernel makes up, without a file; the runner serves this user alone. Who connects while
            # the runner is not there yet, or not again, waits: the queue is the listener's.
            listener.bind("")
            listener.listen(_BACKLOG)
            self._own_address = listener.getsockname()
            self._listening.set()
            try:
                await self._wanted.wait()
                await self._run_for_ever(listener)
            finally:
                self._listening.clear()

    async def describe(self) -> dict[str, Any]:
        """Return for `bxctl status` where tool processes run, and whether they are kept from the rest of the device.

        Returns:
            `where`, `sandboxed` with a `note` on what it means, `state` (up or down) and `reason`, why it is down.
        """
        table = self._table()
        greeting: dict[str, Any] = {}
        if not table.runner:
            fault = self._fault
        else:
            try:
                async with asyncio.timeout(_LOOK_S):
                    _, (_, writer), greeting = await self._open(table)
                writer.transport.abort()
                fault = ""
            except ToolError as error:
                fault = error.message
            except TimeoutError:
                fault = f"the runner of tool processes did not answer within {_LOOK_S:g} s"
        sandboxed = bool(table.runner) and greeting.get("sandboxed") is True
        user = "the runner's user" if table.runner else "loopd's own user"
        note = "" if sandboxed else f"tool processes are not sandboxed: they may do whatever {user} may"
        return {
            "where": table.runner or _OWN,
            "state": "down" if fault else "up",
            "reason": fault,
            "sandboxed": sandboxed,
            "note": note,
        }

    # --- the way to the runner --------------------------------------------------------------------------------------

    async def _open(self, table: ToolsTable) -> tuple[socket.socket, _Connection, dict[str, Any]]:
        """Connect to the runner and return the connection, as a socket and as streams, and the runner's greeting.

        Raises:
            ToolError: it is not there, or it refuses.
        """
        where = table.runner or _OWN
        with ExitStack() as stack:
            link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
            try:
                async with asyncio.timeout(_ANSWER_S):
                    address = table.runner.removeprefix("unix:") or await self._own()
                    await asyncio.get_running_loop().sock_connect(link, address)
                    connection = await asyncio.open_unix_connection(sock=link)
            except TimeoutError as error:
                raise ToolError(f"the runner of tool processes ({where}) takes no connection") from error
            except OSError as error:
                why = error.strerror or str(error)
                raise ToolError(f"the runner of tool processes ({where}) cannot be reached: {why}") from error
            stack.callback(connection[1].transport.abort)
            greeting = await _answer(connection)
            if "error" in greeting:
                raise ToolError(_error(greeting))
            stack.pop_all()
        return link, connection, greeting

    async def _own(self) -> bytes:
        """Return the address of the runner that is a child of the daemon; from now on there must be one.

        Raises:
            ToolError: it dies as soon as it is started, and is not started again at once.
        """
        self._wanted.set()
        await self._listening.wait()
        if self._fault:
            raise ToolError(self._fault)
        return self._own_address

    async def _run_for_ever(self, listener: socket.socket) -> None:
        """Run the runner again and again: at once where it has lived, else after longer and longer pauses."""
        pause_s = 0.0
        while True:
            began_s = monotonic_s()
            try:
                why = f"it ended with status {await self._run_once(listener)}"
            except OSError as error:
                why = f"it cannot be started: {error}"
            if monotonic_s() - began_s > _LONGEST_PAUSE_S:
                pause_s = 0.0
            log.warning("runner_down reason=%r again_s=%g", why, pause_s)
            if pause_s:
                self._fault = f"the runner of tool processes is down: {why}"
                await asyncio.sleep(pause_s)
                self._fault = ""
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S) or _FIRST_PAUSE_S

    async def _run_once(self, listener: socket.socket) -> int:
        """Run the runner to its end and return its exit status.

        Raises:
            OSError: it cannot be started.
        """
        self._run_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", runner.__file__, str(os.getpid())),
            stdin=listener.fileno(),
            stdout=asyncio.subprocess.DEVNULL,
            cwd=self._run_directory,
            env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


def _pipe(stack: ExitStack, theirs: ExitStack, *, child_reads: bool) -> tuple[BinaryIO, int]:
    """Return our end of a new pipe, closed by `stack`, and the child's, closed by `theirs`."""
    reading, writing = os.pipe()
    their, our = (reading, writing) if child_reads else (writing, reading)
    theirs.callback(os.close, their)
    return stack.enter_context(os.fdopen(our, "wb" if child_reads else "rb", buffering=0)), their


def _send(link: socket.socket, writer: asyncio.StreamWriter, message: bytes, descriptors: Sequence[int]) -> None:
    """Send the message, the descriptors with its first part, which the streams cannot do.

    Raises:
        ToolError: the runner is gone.
    """
    try:
        sent = socket.send_fds(link, [message], descriptors)
    except OSError as error:
        raise ToolError(f"the runner of tool processes is gone: {error.strerror or error}") from error
    writer.write(message[sent:])


async def _child(pid: int, connection: _Connection, pipes: Sequence[BinaryIO]) -> Child:
    """Put streams onto our ends of the pipes, which are closed with the child from now on."""
    loop = asyncio.get_running_loop()
    stdin, *outputs = pipes
    protocol = asyncio.StreamReaderProtocol(reader := asyncio.StreamReader())
    transport, _ = await loop.connect_write_pipe(lambda: protocol, stdin)
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    return Child(pid, connection, writer, [await _reading(output) for output in outputs])


async def _reading(pipe: BinaryIO) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    return reader, transport


async def _answer(connection: _Connection) -> dict[str, Any]:
    """Return the runner's next message.

    Raises:
        ToolError: none came in time.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            return _decoded(await connection[0].readline())
    except TimeoutError as error:
        raise ToolError(f"the runner of tool processes did not answer within {_ANSWER_S:g} s") from error
    except OSError as error:
        raise ToolError(f"the runner of tool processes is gone: {error.strerror or error}") from error


def _decoded(line: bytes) -> dict[str, Any]:
    """Return the message on a line; the end of the connection is one too."""
    message: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {"error": "the runner is gone"}
    return message


def _error(message: Mapping[str, Any]) -> str:
    """Return why the runner refuses, as one line that can be written anywhere: it may name what a caller made up."""
    text = str(message.get("error", "the runner does not speak as this release does"))
    return " ".join(text.encode("utf-8", "backslashreplace").decode("utf-8").split())
