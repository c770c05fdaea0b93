"""The port as the registry sees it."""

import asyncio
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from loopd.config import Config, ToolsTable, parse_config
from loopd.home import Home
from loopd.tools.children import Children
from loopd.tools.files import port as module
from loopd.tools.files.port import Files, definitions
from loopd.tools.files.work import Work
from loopd.tools.port import Outcome
from loopd.tools.ports import plans
from loopd.tools.registry import PortPlan, Registry
from tests.tools.fake import planned
from tests.tools.files.tree import INSIDE, Tree, roots_of

PATIENCE_S = 60.0


def configured(directory: Path, **tools: Any) -> Config:
    return parse_config({"tools": tools}, source=str(directory))


def planned_for(directory: Path, config: Config) -> list[PortPlan]:
    children = Children(lambda: config.tools, directory)
    return list(plans(config, Home(directory / "home"), children))


def registry(*ports: Files) -> Registry:
    return Registry(planned(*ports), ToolsTable())


async def result(tools: Registry, name: str, timeout_s: float = PATIENCE_S, **arguments: Any) -> Outcome:
    call = tools.prepare("call_tool", json.dumps({"name": name, "arguments": arguments}))
    return await tools.run(call, timeout_s=timeout_s, max_bytes=16_384)


async def test_each_tool_runs_through_the_registry(tree: Tree) -> None:
    tools = registry(Files(tree.roots, 16_384))
    assert (await result(tools, "files.write", path="a.txt", content="one\n")).ok
    assert (await result(tools, "files.read", path="a.txt")).content.endswith("line 1 of 1:\none\n")
    assert "a.txt 4 bytes" in (await result(tools, "files.list")).content
    assert "a.txt:1: one" in (await result(tools, "files.search", text="ONE")).content
    tools.close()


async def test_a_fault_is_a_result_that_is_not_ok(tree: Tree) -> None:
    tools = registry(Files(tree.roots, 16_384))
    outcome = await result(tools, "files.read", path="/etc/passwd")
    assert outcome == Outcome(ok=False, content=f"/etc/passwd is outside the roots. The roots are {tree.docs}.")
    tools.close()


async def test_bytes_that_are_not_utf8_are_replaced_and_the_result_says_so(tree: Tree) -> None:
    (tree.docs / "old.txt").write_bytes(b"K\xe4se")
    tools = registry(Files(tree.roots, 16_384))
    outcome = await result(tools, "files.read", path="old.txt")
    assert (outcome.ok, outcome.lossy) == (True, True)
    tools.close()


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("read file contents", "read"),
        ("open a text document", "read"),
        ("show last lines of log file", "read"),
        ("list files in directory", "list"),
        ("show what is in a folder", "list"),
        ("search text in files", "search"),
        ("find file by name", "search"),
        ("grep for a word in documents", "search"),
        ("write text to file", "write"),
        ("save a new file", "write"),
        ("append line to file", "write"),
        ("create a text file", "write"),
    ],
)
async def test_each_tool_is_found_first_by_what_it_does(tree: Tree, asked: str, name: str) -> None:
    config = configured(tree.path, files={"write": [str(tree.docs)]})
    tools = Registry(planned_for(tree.path, config), config.tools)
    call = tools.prepare("find_tool", json.dumps({"query": asked}))
    answer = (await tools.run(call, timeout_s=PATIENCE_S, max_bytes=16_384)).content
    assert answer.splitlines()[1].startswith(f"- files.{name}: ")
    assert str(tree.docs) in answer
    tools.close()


def test_the_port_is_there_only_where_roots_are(tmp_path: Path) -> None:
    def names(**table: Any) -> list[str]:
        return [plan.name for plan in planned_for(tmp_path, configured(tmp_path, **table))]

    assert names() == ["builtin"]
    assert names(files={"read": ["/srv/docs"]}) == ["builtin", "files"]
    assert names(files={"read": ["/srv/docs"]}, builtin=["clock"]) == ["builtin"]


def test_writing_is_offered_only_where_a_root_may_be_written_and_is_an_effect(tmp_path: Path) -> None:
    home, docs, out = tmp_path / "home", Path("/srv/docs"), Path("/srv/out")
    reading = definitions(roots_of(home, read=[docs]))
    assert [(tool.name, tool.effect) for tool in reading] == [("read", "read"), ("list", "read"), ("search", "read")]
    both = definitions(roots_of(home, read=[docs], write=[out]))
    assert [(tool.name, tool.effect) for tool in both][3:] == [("write", "write")]
    assert both[3].schema["properties"]["path"]["description"] == "absolute, below /srv/out"
    assert reading[0].schema["properties"]["path"]["description"] == "absolute, below /srv/docs, or relative to it"


def test_a_root_changed_on_disk_makes_the_plan_another_one(tree: Tree) -> None:
    config = configured(tree.path, files={"read": [str(tree.path / "link")]})
    settings = [planned_for(tree.path, config)[1].settings]
    (tree.path / "link").symlink_to(tree.docs)
    settings += [planned_for(tree.path, config)[1].settings for _ in range(2)]
    assert settings[0] != settings[1] == settings[2]


async def test_a_call_that_is_cancelled_has_ended_when_that_is_known(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(tree.put("docs/huge.txt", "x\n"), 1 << 40)
    reading, running = threading.Event(), threading.Event()
    real = os.read

    def slow(file: int, count: int) -> bytes:
        reading.set()
        return real(file, count).replace(b"\0", b"x")

    def watched(*arguments: Any) -> str:
        running.set()
        try:
            return search(*arguments)
        finally:
            running.clear()

    search = module._TOOLS["search"]
    monkeypatch.setattr(os, "read", slow)
    monkeypatch.setitem(module._TOOLS, "search", watched)
    port = Files(tree.roots, 16_384)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        call = group.create_task(port.run("search", {"text": "needle"}))
        await asyncio.to_thread(reading.wait, PATIENCE_S)
        call.cancel()
    assert call.cancelled()
    assert not running.is_set()


async def test_a_call_at_its_deadline_is_a_result(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(work: Work, arguments: dict[str, Any]) -> str:
        while True:
            work.stop.check()

    monkeypatch.setitem(module._TOOLS, "read", endless)
    tools = registry(Files(tree.roots, 16_384))
    outcome = await result(tools, "files.read", timeout_s=0.05, path="note.txt")
    assert outcome == Outcome(ok=False, content="files.read was stopped: not done after 0.05 s.")
    tools.close()


async def test_a_disk_that_does_not_answer_keeps_no_call_waiting(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()

    def stuck(work: Work, arguments: dict[str, Any]) -> str:
        free.wait(PATIENCE_S)
        raise ValueError("nobody looks at this")

    monkeypatch.setattr(module, "_END_S", 0.01)
    monkeypatch.setitem(module._TOOLS, "read", stuck)
    tools = registry(Files(tree.roots, 16_384))
    try:
        for _ in range(6):  # more than there are threads
            assert "was stopped" in (await result(tools, "files.read", timeout_s=0.01, path="note.txt")).content
        await asyncio.to_thread(lambda: None)  # the event loop's own threads are free
    finally:
        free.set()
    tools.close()


async def test_writes_at_the_same_time_lose_nothing(tree: Tree) -> None:
    tools = registry(Files(tree.roots, 16_384))
    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(result(tools, "files.write", path="log.txt", content=f"{number}\n", append=True))
    written = (tree.docs / "log.txt").read_text().splitlines()
    assert sorted(map(int, written)) == list(range(20))
    tools.close()


async def test_a_port_that_is_no_longer_kept_lets_its_threads_go(tree: Tree) -> None:
    port = Files(tree.roots, 16_384)
    assert INSIDE in (await port.run("read", {"path": "note.txt"})).content
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        keeping = group.create_task(port.keep())
        await asyncio.sleep(0)
        keeping.cancel()
    with pytest.raises(RuntimeError, match="after shutdown"):
        await port.run("read", {"path": "note.txt"})


@pytest.mark.parametrize("max_bytes", [856, 1000, 4096, 16_384])
async def test_an_answer_is_short_enough_to_lose_nothing_of_its_middle(tree: Tree, max_bytes: int) -> None:
    tree.put("docs/log.txt", "".join(f"line {number}\n" for number in range(5000)))
    tools = registry(Files(tree.roots, max_bytes))
    call = tools.prepare(
        "call_tool", json.dumps({"name": "files.read", "arguments": {"path": "log.txt", "limit": 5000}})
    )
    outcome = await tools.run(call, timeout_s=PATIENCE_S, max_bytes=max_bytes)
    assert outcome.ok
    assert outcome.cut == 0
    tools.close()
