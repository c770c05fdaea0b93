import asyncio
import json
import os
import select
import sys
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from loopd.config import ToolsTable
from loopd.tools.executables import Executables, read
from loopd.tools.port import Outcome, Tool
from loopd.tools.registry import PortPlan, Registry
from tests.tools.processes import PATIENCE_S, STUBBORN, await_gone, is_gone, kept

MAX_BYTES = 4096
ANY = {"type": "object"}


def put(directory: Path, file: str, script: str, mode: int = 0o755, **manifest: Any) -> Path:
    """Write a program and its manifest; return the program."""
    directory.mkdir(mode=0o755, exist_ok=True)
    path = directory / file
    path.write_text(script)
    path.chmod(mode)
    values = {"description": f"Do {file}.", "effect": "read", "schema": ANY, **manifest}
    (directory / f"{file}.toml").write_text(tomli_w.dumps(values))
    return path


def shell(script: str) -> str:
    return f"#!/bin/sh\n{script}\n"


@asynccontextmanager
async def port(directory: Path) -> AsyncIterator[Executables]:
    async with kept(directory.parent) as children:
        yield Executables(directory, children, MAX_BYTES)


async def result(executables: Executables, name: str, timeout_s: float = PATIENCE_S, **arguments: Any) -> Outcome:
    """Run it as a turn does."""
    registry = Registry([PortPlan("executables", 0, lambda: executables)], ToolsTable())
    try:
        call = registry.prepare("call_tool", json.dumps({"name": f"executables.{name}", "arguments": arguments}))
        return await registry.run(call, timeout_s=timeout_s, max_bytes=MAX_BYTES)
    finally:
        registry.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "tools"
    made.mkdir(mode=0o755)
    return made


async def test_a_program_gets_its_arguments_as_json_and_prints_its_result(directory: Path) -> None:
    put(directory, "echo", shell("cat; echo on the side >&2"))
    async with port(directory) as executables:
        outcome = await result(executables, "echo", city="Zürich", days=[1, 2])
    assert outcome.ok
    assert json.loads(outcome.content) == {"city": "Zürich", "days": [1, 2]}


def test_a_manifest_says_everything_about_its_tool(directory: Path) -> None:
    schema = {"properties": {"host": {"type": "string"}}, "required": ["host"]}
    put(
        directory,
        "wake.sh",
        shell("true"),
        name="wake_up",
        description="Wake a computer.",
        effect="write",
        schema=schema,
        timeout_s=5,
        example={"host": "nas"},
    )
    listing = read(directory)
    assert listing.faults == ()
    assert [tool for _, tool in listing.programs.values()] == [
        Tool("wake_up", "Wake a computer.", {"type": "object", **schema}, "write", {"host": "nas"}, 5.0)
    ]


def test_a_tool_has_its_programs_name_up_to_the_first_dot_and_no_arguments_by_default(directory: Path) -> None:
    put(directory, "backup.v2.sh", shell("true"))
    (directory / "backup.v2.sh.toml").write_text('description = "Back up."\neffect = "write"\n')
    [(path, tool)] = read(directory).programs.values()
    assert (path, tool.name) == (directory / "backup.v2.sh", "backup")
    assert tool.schema == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("script", "content"),
    [
        ("echo half; echo it broke >&2; exit 3", "act failed: exit status 3\nit broke\nhalf"),
        ("exit 1", "act failed: exit status 1"),
        ("kill -9 $$", "act failed: ended by signal 9 (SIGKILL)"),
        ("kill -40 $$", "act failed: ended by signal 40"),
        ("yes on | head -n 100000 >&2; echo the reason >&2; exit 2", "the reason"),
    ],
)
async def test_a_failure_says_how_it_ended_and_the_end_of_its_errors(
    directory: Path, script: str, content: str
) -> None:
    put(directory, "act", shell(script))
    async with port(directory) as executables:
        outcome = await result(executables, "act")
    assert not outcome.ok
    assert outcome.content.endswith(content)
    assert outcome.content.startswith("act failed: ")


# --- output (CASES 24) ----------------------------------------------------------------------------------------------


async def test_random_bytes_become_clean_text(directory: Path) -> None:
    put(directory, "act", shell("head -c 4096 /dev/urandom"))
    async with port(directory) as executables:
        outcome = await result(executables, "act")
    assert outcome.ok
    assert outcome.lossy
    assert "\0" not in outcome.content
    assert len(outcome.content.encode("utf-8")) <= MAX_BYTES


async def test_a_million_lines_keep_their_head_and_tail_with_the_count_of_what_is_not_there(directory: Path) -> None:
    put(directory, "act", shell("seq 1000000"))
    async with port(directory) as executables:
        outcome = await result(executables, "act")
    assert outcome.ok
    assert outcome.content.startswith("1\n2\n3\n")
    assert outcome.content.endswith("\n999999\n1000000\n")
    assert len(outcome.content.encode()) <= MAX_BYTES
    whole = sum(len(f"{number}\n") for number in range(1, 1_000_001))
    head, _, rest = outcome.content.partition("\n[... ")
    count, _, tail = rest.partition(" bytes left out ...]\n")
    assert int(count) == outcome.cut == whole - len(head) - len(tail)


async def test_no_output_is_said(directory: Path) -> None:
    put(directory, "act", shell("true"))
    async with port(directory) as executables:
        assert await result(executables, "act") == Outcome(ok=True, content="(no output)")


async def test_much_output_takes_no_memory(directory: Path) -> None:
    put(directory, "act", shell("yes | head -c 200000000; yes | head -c 50000000 >&2; exit 1"))
    async with port(directory) as executables:
        await result(executables, "act")
        tracemalloc.start()
        try:
            outcome = await result(executables, "act")
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert outcome.cut > 199_000_000
    assert peak_bytes < 4_000_000


async def test_input_that_is_never_read_holds_nothing_up(directory: Path) -> None:
    put(directory, "act", shell("echo done"))
    async with port(directory) as executables:
        assert (await result(executables, "act", text="x" * 1_000_000)).content == "done\n"


# --- the end (CASES 24) ---------------------------------------------------------------------------------------------


@pytest.fixture
def stubborn(directory: Path) -> Iterator[Callable[[], list[int]]]:
    """A tool that never ends, ignores SIGTERM and leaves a grandchild; returns what tells its processes, once."""
    fifo = directory.parent / "fifo"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    body = directory.parent / "body.py"
    body.write_text(STUBBORN)
    put(directory, "act", shell(f"exec >{fifo}; exec {sys.executable} -I -S {body}"))

    def pids() -> list[int]:
        poll, said = select.poll(), b""
        poll.register(reading, select.POLLIN)
        while said.count(b"\n") < 3:
            assert poll.poll(PATIENCE_S * 1000), "the tool does not run"
            said += os.read(reading, 100)
        return [int(pid) for pid in said.split()]

    yield pids
    os.close(reading)


async def test_at_its_deadline_a_tool_is_gone_with_all_that_it_started(
    directory: Path, stubborn: Callable[[], list[int]]
) -> None:
    async with port(directory) as executables:
        outcome = await result(executables, "act", timeout_s=5)
        assert outcome == Outcome(ok=False, content="executables.act was stopped: not done after 5 s.")
        assert [pid for pid in stubborn() if not is_gone(pid)] == []


async def test_after_a_cancel_a_tool_is_gone_with_all_that_it_started(
    directory: Path, stubborn: Callable[[], list[int]]
) -> None:
    async with port(directory) as executables:
        running = asyncio.create_task(result(executables, "act"))
        pids = await asyncio.to_thread(stubborn)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert [pid for pid in pids if not is_gone(pid)] == []


async def test_the_deadline_of_a_manifest_counts(directory: Path) -> None:
    put(directory, "act", shell("exec sleep 1000"), timeout_s=0.2)
    async with port(directory) as executables:
        outcome = await result(executables, "act")
    assert outcome.content == "executables.act was stopped: not done after 0.2 s."


async def test_a_tool_that_ends_leaves_nothing_behind(directory: Path) -> None:
    put(directory, "act", shell("setsid sleep 1000 >/dev/null 2>&1 & echo $!; sleep 1000 & echo $!"))
    async with port(directory) as executables:
        outcome = await result(executables, "act")
    assert outcome.ok
    await_gone(*(int(pid) for pid in outcome.content.split()))


# --- changes and faults ---------------------------------------------------------------------------------------------


async def test_new_changed_and_removed_files_are_noticed(directory: Path) -> None:
    put(directory, "one", shell("echo 1"))
    async with port(directory) as executables:
        put(directory, "two", shell("echo 2"), description="The second.")
        executables.look()
        assert [tool.name for tool in executables.tools()] == ["one", "two"]
        put(directory, "two", shell("echo 3"), description="Another.")
        executables.look()
        assert executables.tools()[1].description == "Another."
        (directory / "one").unlink()
        (directory / "one.toml").unlink()
        assert (await result(executables, "one")).content == "executables.one is not there any more"
        assert [tool.name for tool in executables.tools()] == ["two"]
        assert (await result(executables, "two")).content == "3\n"


async def test_keep_notices_changes_by_itself(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopd.tools.executables._LOOK_EVERY_S", 0.001)
    looked = asyncio.Event()
    async with port(directory) as executables, asyncio.TaskGroup() as group:
        loop = asyncio.get_running_loop()
        look = executables.look

        def watched() -> None:
            look()
            if executables.tools():
                loop.call_soon_threadsafe(looked.set)

        monkeypatch.setattr(executables, "look", watched)
        keeping = group.create_task(executables.keep())
        put(directory, "one", shell("echo 1"))
        async with asyncio.timeout(PATIENCE_S):
            await looked.wait()
        keeping.cancel()


async def test_one_bad_manifest_loses_no_other(directory: Path) -> None:
    put(directory, "good", shell("echo fine"))
    put(directory, "bad", shell("true"), effect="destroy")
    async with port(directory) as executables:
        assert executables.state == "up"
        assert executables.reason == f"{directory}/bad.toml: effect: found 'destroy', allowed: 'read' or 'write'"
        assert (await result(executables, "good")).content == "fine\n"
        assert (await result(executables, "bad")).content.startswith("There is no one tool named 'executables.bad'.")


FINE = 'description = "Do it."\neffect = "read"\n'
KEYS = "description, effect, example, name, schema, timeout_s"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('effect = "read"', "description: found nothing, allowed: what it does, in a sentence"),
        ('description = "Do it."', "effect: found nothing, allowed: 'read' or 'write'"),
        (f'{FINE}colour = "red"', f"colour: unknown key, allowed: {KEYS}"),
        (
            'descripton = "Do it."\neffect = "read"',
            f"descripton: unknown key, allowed: {KEYS}; description is missing",
        ),
        (f'{FINE}timeout_s = "5"', "timeout_s: found '5', allowed: a number"),
        (f"{FINE}timeout_s = 0", "timeout_s: found 0, allowed: more than 0"),
        (f'{FINE}name = "a b"', "name: found 'a b', allowed: a name of at most 64 letters, digits, _ and -"),
        (f'{FINE}schema = "none"', "schema: found 'none', allowed: a table"),
        (f'{FINE}[schema]\ntype = "array"', "schema.type: found 'array', allowed: 'object'"),
        (
            f'{FINE}[schema.properties.x]\ntype = "strng"',
            "schema.properties.x.type: found 'strng', allowed: JSON Schema",
        ),
        (f"{FINE}[schema.properties.x]\ndefault = 1979-05-27", "schema: found a value that JSON has not (Object of "),
        (f"{FINE}[schema.properties.x]\ndefault = nan", "schema: found a value that JSON has not (Out of range float "),
        (
            f'{FINE}example = {{}}\n[schema]\nrequired = ["a"]\n[schema.properties.a]\ntype = "string"',
            "",
        ),
        (
            f'{FINE}example = {{b = 1}}\n[schema]\nrequired = ["a"]',
            "example: found {'b': 1}, allowed: what fits the schema ('a' is a required property)",
        ),
        ("not toml", "not TOML: Expected '=' after a key in a key/value pair (at line 1, column 5)"),
        (f"{FINE}# " + "x" * 70_000, "found 70,041 bytes, allowed: 65,536"),
    ],
)
def test_a_mistyped_manifest_is_one_line_with_file_key_found_and_allowed(
    directory: Path, text: str, fault: str
) -> None:
    put(directory, "act", shell("true"))
    (directory / "act.toml").write_text(text)
    found = read(directory).faults
    assert len(found) == bool(fault)
    if fault:
        assert found[0].startswith(f"{directory}/act.toml: {fault}")
        assert "\n" not in found[0]


def test_bytes_that_are_no_text_are_told_by_their_place(directory: Path) -> None:
    put(directory, "act", shell("true"))
    (directory / "act.toml").write_bytes(b"# \xff\n")
    assert read(directory).faults == (f"{directory}/act.toml: not UTF-8 text at byte 2",)


def test_files_that_others_could_change_or_that_cannot_run_are_left_out(directory: Path) -> None:
    for name in ("all", "group", "plain", "manifest", "gone", "linked"):
        put(directory, name, shell("true"))
    (directory / "all").chmod(0o777)
    (directory / "group").chmod(0o775)
    (directory / "plain").chmod(0o644)
    (directory / "manifest.toml").chmod(0o666)
    (directory / "gone").unlink()
    (directory / "linked").unlink()
    (directory / "linked").symlink_to("/bin/true")
    (directory / ".hidden.toml").write_text("not toml")
    (directory / "folder.toml").mkdir()
    (directory / "lost.toml").symlink_to("nowhere")
    listing = read(directory)
    assert list(listing.programs) == ["linked"]
    alone = "allowed: writable by its owner alone (chmod go-w)"
    assert [text.replace(f"{directory}/", "") for text in listing.faults] == [
        f"all: mode: found 0777, {alone}",
        "folder.toml: found no file, allowed: a file",
        "gone.toml: found no program gone beside it, allowed: a file of that name",
        f"group: mode: found 0775, {alone}",
        "lost.toml: found no file, allowed: a file",
        f"manifest.toml: mode: found 0666, {alone}",
        "plain: mode: found 0644, allowed: an executable one (chmod +x)",
    ]


def test_a_file_of_another_user_is_left_out(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(directory, "act", shell("true"))
    if os.geteuid() == 0:
        os.chown(directory / "act", 12345, -1)
        assert read(directory).faults == (f"{directory}/act: owner: found user 12345, allowed: root or user 0",)
    else:
        own = os.geteuid()
        for path in (directory, directory / "act.toml"):
            assert path.stat().st_uid == own
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        with pytest.raises(Exception, match=f"owner: found user {own}, allowed: root or user {own + 1}"):
            read(directory)


def test_of_two_tools_with_one_name_the_first_counts(directory: Path) -> None:
    put(directory, "a", shell("echo a"), name="same")
    put(directory, "b", shell("echo b"), name="same")
    listing = read(directory)
    assert listing.programs["same"][0] == directory / "a"
    assert listing.faults == (f"{directory}/b.toml: name: found 'same', allowed: a name that no other manifest has",)


async def test_without_its_directory_the_port_is_down_and_comes_back(tmp_path: Path) -> None:
    directory = tmp_path / "tools"
    async with port(directory) as executables:
        assert (executables.state, executables.reason) == (
            "down",
            f"{directory}: cannot be read: No such file or directory",
        )
        put(directory, "act", shell("echo here"))
        executables.look()
        assert (executables.state, executables.reason) == ("up", "")
        assert (await result(executables, "act")).content == "here\n"
        directory.chmod(0o777)
        assert "writable by its owner alone" in (await result(executables, "act")).content
        assert executables.state == "down"
        assert [tool.name for tool in executables.tools()] == ["act"]
        directory.chmod(0o755)
        executables.look()
        assert (await result(executables, "act")).content == "here\n"


async def test_a_program_that_cannot_be_started_is_a_result(directory: Path) -> None:
    put(directory, "act", "#!/no/such/shell\n")
    async with port(directory) as executables:
        outcome = await result(executables, "act")
    assert not outcome.ok
    assert outcome.content.endswith("cannot be started: the interpreter that its first line names is not there")
