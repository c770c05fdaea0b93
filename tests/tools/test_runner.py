"""What processes of tools may not: outlive their call, the daemon or the runner, or exceed their limits (CASES 24)."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loopd.errors import ToolError
from loopd.tools import runner
from tests.tools.processes import (
    PATIENCE_S,
    STUBBORN,
    await_gone,
    family,
    is_gone,
    kept,
    line,
    output,
    parent_of,
    python,
    runner_of,
)

DAEMON = """
import asyncio, json, os, sys
from pathlib import Path
from tests.tools.processes import STUBBORN, family, kept, python

async def main():
    async with kept(Path(sys.argv[1])) as children, await children.start(python(STUBBORN)) as child:
        print(json.dumps(await family(child)), flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""
ORPHAN = """
import os, signal
told, tell = os.pipe()
if os.fork():
    os.read(told, 1)
    os._exit(0)
os.setsid()
print(os.getpid(), flush=True)
os.write(tell, b".")
signal.pause()
"""


async def test_close_ends_what_ignores_it_has_a_session_of_its_own_or_another_environment(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        child = await children.start(python(STUBBORN))
        pids = await family(child)
        await child.close()
        assert [pid for pid in pids if not is_gone(pid)] == []


async def test_a_child_that_heeds_sigterm_has_the_time_for_its_last_words(tmp_path: Path) -> None:
    code = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
print("bye", flush=True)
"""
    async with kept(tmp_path) as children:
        child = await children.start(python(code))
        await line(child)
        closing = asyncio.create_task(child.close())
        assert await line(child) == "bye"
        await closing


async def test_what_a_child_leaves_behind_is_gone_when_its_end_is_told(tmp_path: Path) -> None:
    async with kept(tmp_path) as children, await children.start(python(ORPHAN)) as child:
        orphan = int(await line(child))
        assert await child.wait() == 0
        assert is_gone(orphan)


def test_all_is_gone_when_the_daemon_was_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", DAEMON, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        pids = json.loads(daemon.stdout.readline())
        warden = parent_of(pids[0])
        pids += [warden, parent_of(warden)]
        daemon.send_signal(signal.SIGKILL)
        daemon.wait(PATIENCE_S)
    await_gone(*pids)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_all_is_gone_when_the_runner_is(tmp_path: Path, how: signal.Signals) -> None:
    async with kept(tmp_path) as children, await children.start(python(STUBBORN)) as child:
        pids = await family(child)
        os.kill(parent_of(parent_of(child.pid)), how)
        with pytest.raises(ToolError, match="the runner was stopped"):
            async with asyncio.timeout(PATIENCE_S):
                await child.wait()
        assert [pid for pid in pids if not is_gone(pid)] == []


async def test_all_is_gone_when_a_tool_kills_its_warden(tmp_path: Path) -> None:
    async with kept(tmp_path) as children, await children.start(python(STUBBORN)) as child:
        pids = await family(child)
        os.kill(parent_of(child.pid), signal.SIGKILL)
        with pytest.raises(ToolError, match="the runner is gone"):
            async with asyncio.timeout(PATIENCE_S):
                await child.wait()
        await asyncio.to_thread(await_gone, *pids)


async def test_all_is_gone_also_when_a_tool_stops_its_warden(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        child = await children.start(python(STUBBORN))
        pids = await family(child)
        os.kill(parent_of(child.pid), signal.SIGSTOP)
        await child.close()
        assert [pid for pid in pids if not is_gone(pid)] == []


async def test_a_start_that_is_cancelled_at_any_point_leaves_no_process(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        for steps in range(30):
            starting = asyncio.create_task(children.start(python(STUBBORN)))
            for _ in range(steps):
                await asyncio.sleep(0)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            if not starting.cancelled():
                await starting.result().close()
        await asyncio.to_thread(await_gone, *runner.descendants(await runner_of(children)))


async def descriptors(process: int | str) -> int:
    """How many a process has open, once the event loop has closed what it is about to."""
    for _ in range(5):
        await asyncio.sleep(0)
    return len(list(Path(f"/proc/{process}/fd").iterdir()))  # noqa: ASYNC240 - no disk


async def test_nothing_is_left_of_200_calls(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        served = await runner_of(children)
        before, theirs = await descriptors("self"), await descriptors(served)
        for _ in range(200):
            async with await children.start(["true"]) as child:
                assert await child.wait() == 0
        assert await descriptors("self") == before
        last = runner.descendants(served)
        assert len(last) <= 1, "only the warden of the last call may not have been taken away yet"
        await asyncio.to_thread(await_gone, *last)
        assert await descriptors(served) == theirs


async def test_calls_at_the_same_time_keep_apart(tmp_path: Path) -> None:
    async def call(number: int) -> tuple[int, bytes, bytes]:
        async with await children.start(["sh", "-c", f"cat; exit {number}"]) as child:
            return await output(child, f"input {number}".encode())

    async with kept(tmp_path) as children:
        results = await asyncio.gather(*(call(number) for number in range(30)))
    assert results == [(number, f"input {number}".encode(), b"") for number in range(30)]


async def test_arguments_and_variables_may_hold_odd_bytes(tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff\xfe \xc3\x28 new\nline 'quoted' \xf0\x9f\x8c\x8d")
    code = "import os, sys; os.write(1, os.fsencode(sys.argv[1]) + b'|' + os.environb[b'ODD'])"
    async with kept(tmp_path) as children, await children.start(python(code, odd), env={"ODD": odd}) as child:
        assert (await output(child))[1] == os.fsencode(f"{odd}|{odd}")


async def test_arguments_that_are_too_many_are_refused_in_words(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        with pytest.raises(ToolError, match="true cannot be started: Argument list too long"):
            await children.start(["true", "x" * 1_000_000])
        with pytest.raises(ToolError, match="bytes of arguments are too many"):
            await children.start(["true", *["x" * 1_000_000] * 5])


async def test_a_child_that_is_not_read_waits_and_nothing_grows(tmp_path: Path) -> None:
    code = """
import os, select, sys
os.set_blocking(1, False)
poll, total = select.poll(), 0
poll.register(1, select.POLLOUT)
while poll.poll(500):
    total += os.write(1, b'x' * 4096)
print(total, file=sys.stderr, flush=True)
"""
    async with kept(tmp_path) as children, await children.start(python(code)) as child:
        async with asyncio.timeout(PATIENCE_S):
            written = int(await child.stderr.readline())
        assert 65_536 <= written < 1_000_000


LIMITED = """
import json, resource
names = ("DATA", "NOFILE", "FSIZE", "CORE")
print(json.dumps({name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in names}), flush=True)
def fails(attempt):
    try:
        attempt()
    except (OSError, MemoryError) as error:
        return type(error).__name__ + (f" {error.errno}" if isinstance(error, OSError) else "")
print(fails(lambda: bytearray(200 << 20)))
print(fails(lambda: [open("/dev/null") for _ in range(40)]))
def fill():
    with open("large", "wb", 0) as file:
        while file.write(b"x" * 50_000):
            pass
print(fails(fill))
"""


async def test_limits_hold(tmp_path: Path) -> None:
    table = {"max_child_bytes": 128 << 20, "max_child_files": 32, "max_child_file_bytes": 1_000_000}
    async with kept(tmp_path, **table) as children, await children.start(python(LIMITED)) as child:
        status, stdout, stderr = await output(child)
    assert (status, stderr) == (0, b"")
    limits, *failures = stdout.decode().splitlines()
    wanted = {"DATA": 128 << 20, "NOFILE": 32, "FSIZE": 1_000_000, "CORE": 0}
    assert json.loads(limits) == {name: [value, value] for name, value in wanted.items()}
    assert failures == ["MemoryError", "OSError 24", "OSError 27"]


async def test_no_process_can_gain_rights_and_the_system_ends_it_first_when_memory_is_short(tmp_path: Path) -> None:
    code = "print(open('/proc/self/status').read(), open('/proc/self/oom_score_adj').read())"
    async with kept(tmp_path) as children, await children.start(python(code)) as child:
        status, stdout, _ = await output(child)
    assert status == 0
    assert b"NoNewPrivs:\t1\n" in stdout
    assert stdout.split()[-1] == b"1000"


@pytest.mark.parametrize(
    "message", [b"", b"{}\n", b"[]\n", b"not json\n", b'{"argv": ["true"]}\n', b'{"argv": 1, "limits": {}}\n']
)
def test_a_message_that_is_no_request_is_answered_and_the_runner_goes_on(message: bytes, served: str) -> None:
    for _ in range(2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(PATIENCE_S)
            link.connect(served)
            with Path(os.devnull).open("r+b") as null:
                if message:
                    socket.send_fds(link, [message], [null.fileno()] * 3)
            link.shutdown(socket.SHUT_WR)
            answers = [json.loads(text) for text in link.makefile("rb")]
        assert [list(answer) for answer in answers] == [["sandboxed"], ["error"]]


def test_a_request_without_descriptors_is_refused(served: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(PATIENCE_S)
        link.connect(served)
        link.sendall(b'{"argv": ["true"], "env": {}, "directory": "", "limits": {}}\n')
        answers = [json.loads(text) for text in link.makefile("rb")]
    assert answers[1] == {"error": "no request came: it is no object with 3 descriptors"}


@pytest.fixture
def served(tmp_path: Path) -> Any:
    """The address of a runner that is a child of this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        command = [sys.executable, "-I", "-S", runner.__file__, str(os.getpid())]
        with subprocess.Popen(command, stdin=listener.fileno(), cwd=tmp_path) as process:
            yield str(tmp_path / "s")
            process.terminate()
            assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("status", "sandboxed"),
    [
        ("Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t9\n", True),
        ("Name:\tx\nNoNewPrivs:\t0\nSeccomp:\t2\n", False),
        ("Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t0\n", False),
        ("", False),
    ],
)
def test_sandboxed_is_what_lost_rights(status: str, sandboxed: bool) -> None:
    assert runner.is_sandboxed(status) is sandboxed


async def test_a_runner_that_cannot_start_is_a_reason_in_words(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pausing = asyncio.Event()
    caplog.handler.addFilter(lambda record: pausing.set() or True if record.args[-1] else True)  # type: ignore[func-returns-value, index]
    (tmp_path / "work").write_text("in the way")
    async with kept(tmp_path) as children:
        starting = asyncio.create_task(children.start(["true"]))
        async with asyncio.timeout(PATIENCE_S):
            await pausing.wait()
        assert "File exists" in (await children.describe())["reason"]
        with pytest.raises(ToolError, match="the runner of tool processes is down: it cannot be started"):
            await children.start(["true"])
        (tmp_path / "work").unlink()
        async with await starting as child:
            assert await child.wait() == 0
        assert (await children.describe())["state"] == "up"
