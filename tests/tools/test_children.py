import asyncio
import json
import os
from pathlib import Path

import pytest

from loopd.errors import ToolError
from loopd.tools import runner as runner_module
from tests.tools.processes import PATIENCE_S, await_gone, command_of, is_gone, kept, line, output, parent_of, python

SHOW_SELF = "import json, os; print(json.dumps([dict(os.environ), sorted(os.listdir('/proc/self/fd')), os.getcwd()]))"
NEVER_ENDS = "import signal; print('ready', flush=True); signal.pause()"


async def test_a_child_gets_its_input_and_gives_output_errors_and_status(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        code = "import sys; print(sys.stdin.read().upper()); print('oh', file=sys.stderr); sys.exit(3)"
        async with await children.start(python(code)) as child:
            assert await output(child, b"abc") == (3, b"ABC\n", b"oh\n")


async def test_a_child_has_its_three_descriptors_and_no_variable_but_the_minimal_and_the_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "of the daemon")
    async with kept(tmp_path) as children:
        with (tmp_path / "open").open("w") as other:
            os.set_inheritable(other.fileno(), True)
            async with await children.start(python(SHOW_SELF), env={"GIVEN": "yes"}) as child:
                _, stdout, _ = await output(child)
    environment, descriptors, directory = json.loads(stdout)
    work = str(tmp_path / "work")
    assert environment == {
        "PATH": os.environ["PATH"],
        "HOME": work,
        "TMPDIR": work,
        "LANG": "C.UTF-8",
        "GIVEN": "yes",
    }
    assert descriptors == ["0", "1", "2", "3"], "3 is the directory that is being listed"
    assert directory == work


async def test_a_child_that_a_signal_ends_has_its_negative_number_as_status(tmp_path: Path) -> None:
    async with kept(tmp_path) as children, await children.start(["sh", "-c", "kill -9 $$"]) as child:
        assert await child.wait() == -9


async def test_close_ends_the_child_and_returns_when_it_is_gone(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        child = await children.start(python(NEVER_ENDS))
        assert await line(child) == "ready"
        await child.close()
        assert is_gone(child.pid)
        with pytest.raises(ToolError, match="was stopped"):
            await child.wait()


async def test_closing_twice_and_after_the_end_is_nothing_more(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        child = await children.start(["true"])
        assert await child.wait() == 0
        await child.close()
        await child.close()
        assert await child.wait() == 0


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/no/such/program"], "/no/such/program cannot be started: there is no such program"),
        (["no-such-program"], "no-such-program cannot be started: there is no such program"),
        (["{}"], "cannot be started: it is a directory"),
        (["{}/plain"], "cannot be started: it is not executable"),
        (["{}/lost"], "cannot be started: the interpreter that its first line names is not there"),
        (["{}/words"], "cannot be started: it is no binary program, and its first line names no interpreter"),
        (
            ["no such\nprogram \udcff\ud800"],
            "no such program \\udcff\\ud800 cannot be started: 'utf-8' codec can't encode",
        ),
        (["true", "a\0b"], "true cannot be started: embedded null byte"),
    ],
)
async def test_what_cannot_be_started_is_an_error_in_words(tmp_path: Path, command: list[str], why: str) -> None:
    for name, text, mode in (("plain", "#!/bin/sh\n", 0o644), ("lost", "#!/no/sh\n", 0o755), ("words", "hm", 0o755)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(mode)
    async with kept(tmp_path) as children:
        with pytest.raises(ToolError) as caught:
            await children.start([part.format(tmp_path) for part in command])
        assert why in caught.value.message
        assert "\n" not in caught.value.message


async def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        with pytest.raises(ToolError, match="true cannot be started in /no/such/place: No such file or directory"):
            await children.start(["true"], directory="/no/such/place")


async def test_a_dead_runner_is_started_again_and_its_children_are_gone(tmp_path: Path) -> None:
    async with kept(tmp_path) as children:
        child = await children.start(python(f"import os; print(os.getppid(), flush=True); {NEVER_ENDS}"))
        warden = int(await line(child))
        runner = parent_of(warden)
        assert command_of(runner)[-3:] == [runner_module.__file__, str(os.getpid()), ""]
        os.kill(runner, 9)
        with pytest.raises(ToolError, match="did not run to its end"):
            async with asyncio.timeout(PATIENCE_S):
                await child.wait()
        assert is_gone(child.pid)
        await child.close()
        await_gone(warden)
        async with await children.start(["true"]) as again:
            assert await again.wait() == 0
