"""What tests of real processes need: children that are kept, a Python program as a tool, waiting for an end."""

import asyncio
import os
import select
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loopd.config import ToolsTable
from loopd.tools.children import Child, Children

PATIENCE_S = 60.0
STUBBORN = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
def run(environment):
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", wait], environment)
if os.fork() == 0:
    run(os.environ)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        run({})
    os._exit(0)
run(os.environ)
"""
"""A program that ignores SIGTERM, with a child and a grandchild that has its own session and no environment."""


@asynccontextmanager
async def kept(directory: Path, **tools: Any) -> AsyncIterator[Children]:
    """Children whose runner, if it is no service, is kept for the time of a block."""
    table = ToolsTable(**tools)
    children = Children(lambda: table, directory / "work")
    async with asyncio.TaskGroup() as group:
        keeping = group.create_task(children.keep())
        try:
            yield children
        finally:
            keeping.cancel()


def python(code: str, *arguments: str) -> list[str]:
    """A command that runs Python code."""
    return [sys.executable, "-I", "-S", "-c", code, *arguments]


async def output(child: Child, text: bytes = b"") -> tuple[int, bytes, bytes]:
    """Give the child its input and return status, output and errors."""
    child.stdin.write(text)
    child.stdin.close()
    async with asyncio.timeout(PATIENCE_S):
        stdout, stderr = await asyncio.gather(child.stdout.read(), child.stderr.read())
        return await child.wait(), stdout, stderr


async def line(child: Child) -> str:
    """The next line that the child prints."""
    async with asyncio.timeout(PATIENCE_S):
        return (await child.stdout.readline()).decode().strip()


def await_gone(*pids: int) -> None:
    """Return when none of the processes is left; a zombie counts as gone."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            assert poll.poll(PATIENCE_S * 1000), f"process {pid} is still there"
        finally:
            os.close(descriptor)


def is_gone(pid: int) -> bool:
    """Whether the process has ended by now."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(descriptor)


def parent_of(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command_of(pid: int) -> list[str]:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def family(child: Child) -> list[int]:
    """The processes of `STUBBORN`: the child, its child and its grandchild, once all of them run."""
    pids = {int(await line(child)) for _ in range(3)}
    assert child.pid in pids
    return [child.pid, *(pids - {child.pid})]


async def runner_of(children: Children) -> int:
    """The process that starts the children."""
    async with await children.start(["cat"]) as child:
        return parent_of(parent_of(child.pid))
