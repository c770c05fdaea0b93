import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from loopd.config import PolicyTable, Rules, ToolsTable
from loopd.errors import ToolError
from loopd.tools.meta import DEFINITIONS
from loopd.tools.port import Outcome, Tool
from loopd.tools.ranking import Index
from loopd.tools.registry import Registry
from tests.tools.fake import Behaviour, FakePort, planned, tool


def registry(behaviour: Behaviour | None = None) -> tuple[Registry, FakePort]:
    port = FakePort("port", tool("act", "Act now."))
    if behaviour:
        port.behaviour = behaviour
    return Registry(planned(port), ToolsTable()), port


async def result(tools: Registry, name: str = "act", arguments: object = None, **limits: Any) -> Outcome:
    call = tools.prepare(name, json.dumps(arguments or {}))
    return await tools.run(call, **{"timeout_s": 30.0, "max_bytes": 4096, **limits})


async def test_a_tool_runs_to_its_result() -> None:
    tools, _ = registry()
    assert await result(tools) == Outcome(ok=True, content="act {}")


async def test_find_tool_answers_from_what_the_ports_list_at_that_moment() -> None:
    tools, port = registry()
    assert "port.later" not in (await result(tools, "find_tool", {"query": "do it later"})).content
    port.listed += (tool("later", "Do it later."),)
    assert "port.later" in (await result(tools, "find_tool", {"query": "do it later"})).content
    assert tools.definitions is DEFINITIONS


async def test_a_tool_is_called_by_its_name_as_soon_as_it_is_listed_and_no_longer() -> None:
    tools, port = registry()
    port.listed = (tool("later", "Do it later."),)
    assert await result(tools, "later") == Outcome(ok=True, content="later {}")
    assert "There is no one tool named 'act'" in (await result(tools, "act")).content


async def test_the_last_index_answers_while_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tools, port = registry()
    assert "port.act" in (await result(tools, "find_tool", {"query": "act"})).content
    let = threading.Event()

    def held(listed: Any) -> Index:
        assert let.wait(60)
        return Index(listed)

    monkeypatch.setattr("loopd.tools.indexing.Index", held)
    monkeypatch.setattr("loopd.tools.registry._INDEX_WAIT_S", 0.01)
    port.listed += (tool("later", "Act later."),)
    found = (await result(tools, "find_tool", {"query": "act"})).content
    assert "port.act" in found
    assert "port.later" not in found
    let.set()
    monkeypatch.setattr("loopd.tools.registry._INDEX_WAIT_S", 60.0)
    assert "port.later" in (await result(tools, "find_tool", {"query": "act"})).content
    tools.close()


async def test_a_large_index_does_not_hold_up_the_event_loop() -> None:
    many = tuple(tool(f"act_{n}", "Act on it. " * 20) for n in range(2000))
    tools = Registry(planned(FakePort("port", *many)), ToolsTable())
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        found = group.create_task(result(tools, "find_tool", {"query": "act"}))
        turns = 0
        while not found.done():
            await asyncio.sleep(0)
            turns += 1
    assert turns > 10
    assert "Best of 2000 tools" in found.result().content
    tools.close()


async def test_the_index_is_made_as_soon_as_ports_are_kept() -> None:
    tools, port = registry()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        keeping = group.create_task(tools.keep())
        await port.kept.wait()
        await tools._indexer.ready(first_s=60, next_s=60)
        assert tools._indexer.rank("act", 1) == ["port.act"]
        keeping.cancel()
    tools.close()


async def test_a_call_that_cannot_be_prepared_is_its_result() -> None:
    tools, _ = registry()
    outcome = await result(tools, "no_such_tool")
    assert not outcome.ok
    assert "no_such_tool" in outcome.content


async def test_a_port_that_is_down_gives_a_clear_result_and_comes_back() -> None:
    tools, port = registry()
    port.state = "down"
    assert await result(tools) == Outcome(
        ok=False, content="port.act is unavailable: port is down now. Try again later."
    )
    port.state = "up"
    assert (await result(tools)).ok


@pytest.mark.parametrize("name", ["house.lamp", "House.lamp", "house__lamp", "house:lamp", "house"])
async def test_a_tool_of_a_port_that_is_down_and_has_no_list_is_unavailable_and_says_why(name: str) -> None:
    house = FakePort("house")
    house.state, house.reason = "down", "exit status 7; stderr: " + "no roof " * 500
    tools = Registry(planned(FakePort("port", tool("act")), house), ToolsTable())
    for call in ((name, {}), ("call_tool", {"name": name, "arguments": {"on": True}})):
        outcome = await result(tools, *call)
        assert not outcome.ok
        assert outcome.content.startswith(f"{name} is unavailable: house is down now (exit status 7; stderr: no roof")
        assert outcome.content.endswith("... Try again later.")
        assert len(outcome.content) < 500
    house.state = "up"
    assert "There is no one tool named" in (await result(tools, name)).content


async def test_only_what_names_a_port_that_is_down_and_has_no_list_is_unavailable() -> None:
    house, kept = FakePort("house"), FakePort("kept", tool("lamp"))
    house.state = kept.state = "down"
    tools = Registry(planned(FakePort("port", tool("act")), house, kept), ToolsTable())
    for name in ("house-2.lamp", "household", "lamps", "port.house", "kept.light"):
        assert f"There is no one tool named {name!r}" in (await result(tools, name)).content
    assert (await result(tools, "act")).ok


async def test_find_tool_ends_with_the_ports_that_are_down_and_have_no_list() -> None:
    house, kept = FakePort("house"), FakePort("kept", tool("lamp"))
    house.state = kept.state = "down"
    tools = Registry(planned(FakePort("port", tool("act")), house, kept), ToolsTable())
    for query in ("act", "house.lamp", "switch on"):
        found = await result(tools, "find_tool", {"query": query})
        assert found.content.splitlines()[-1] == "Down now, their tools not known: house."
    house.state = "up"
    assert "Down now" not in (await result(tools, "find_tool", {"query": "act"})).content


async def test_an_exception_of_a_tool_is_a_result() -> None:
    async def broken(name: str, arguments: dict[str, Any]) -> Outcome:
        raise ValueError("no such thing")

    tools, _ = registry(broken)
    assert await result(tools) == Outcome(ok=False, content="port.act failed: ValueError: no such thing")


async def test_a_tools_own_error_says_it_in_its_words() -> None:
    async def refusing(name: str, arguments: dict[str, Any]) -> Outcome:
        raise ToolError("the door is locked")

    tools, _ = registry(refusing)
    assert await result(tools) == Outcome(ok=False, content="the door is locked")


async def test_of_a_tool_that_writes_and_was_stopped_it_is_not_known_whether_it_took_effect() -> None:
    async def endless(name: str, arguments: dict[str, Any]) -> Outcome:
        await asyncio.Event().wait()
        raise AssertionError

    port = FakePort("port", replace(tool("act"), effect="write"), behaviour=endless)
    tools = Registry(planned(port), ToolsTable())
    outcome = await tools.run(tools.prepare("port.act", "{}"), timeout_s=0.01, max_bytes=16_384)
    assert not outcome.ok
    assert "Whether it took effect is unknown" in outcome.content


async def test_a_tool_that_never_ends_is_cancelled_at_its_deadline() -> None:
    cancelled = asyncio.Event()

    async def endless(name: str, arguments: dict[str, Any]) -> Outcome:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    tools, _ = registry(endless)
    assert await result(tools, timeout_s=0.01) == Outcome(
        ok=False, content="port.act was stopped: not done after 0.01 s."
    )
    assert cancelled.is_set()


async def test_a_timeout_inside_a_tool_is_not_taken_for_the_deadline() -> None:
    async def impatient(name: str, arguments: dict[str, Any]) -> Outcome:
        raise TimeoutError("the server did not answer")

    tools, _ = registry(impatient)
    assert (await result(tools)).content == "port.act failed: TimeoutError: the server did not answer"


async def test_cancelling_a_call_cancels_the_tool_and_is_not_a_result() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(name: str, arguments: dict[str, Any]) -> Outcome:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError

    tools, _ = registry(endless)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        call = group.create_task(result(tools))
        await started.wait()
        call.cancel()
    assert call.cancelled()
    assert cancelled.is_set()


async def test_a_result_is_clean_and_of_bounded_size() -> None:
    async def verbose(name: str, arguments: dict[str, Any]) -> Outcome:
        return Outcome(ok=True, content="\ud800\0" + "x" * 10_000 + "end")

    tools, _ = registry(verbose)
    outcome = await result(tools, max_bytes=256)
    assert outcome.lossy
    assert outcome.cut > 9000
    assert len(outcome.content.encode("utf-8")) <= 256
    assert outcome.content.endswith("xend")


async def test_what_a_port_already_left_out_is_counted_too() -> None:
    async def cut(name: str, arguments: dict[str, Any]) -> Outcome:
        return Outcome(ok=True, content="x", cut=7, lossy=True)

    tools, _ = registry(cut)
    assert await result(tools) == Outcome(ok=True, content="x", cut=7, lossy=True)


def test_the_description_lists_ports_with_their_state_and_tools() -> None:
    tools, port = registry()
    port.state = "down"
    assert tools.describe() == [
        {
            "port": "port",
            "state": "down",
            "reason": "",
            "tools": [
                {
                    "name": "act",
                    "description": "Act now.",
                    "effect": "read",
                    "decision": "allow",
                    "rule": '[tools.policy] read = "allow"',
                    "calls": 0,
                    "failed": 0,
                    "last_failure": None,
                    "failed_at": None,
                }
            ],
        }
    ]


async def test_asked_for_words_the_description_holds_what_find_tool_finds_ranked() -> None:
    port = FakePort("port", tool("act", "Act now."), tool("paint", "Paint a wall."), tool("wall", "A wall of paint."))
    tools = Registry(planned(port, FakePort("other", tool("sing", "Sing."))), ToolsTable())
    found = await tools.describe_found("paint walls")
    assert {listed["name"]: listed["rank"] for listed in found[0]["tools"]} == {"paint": 1, "wall": 2}
    assert found[1]["tools"] == []
    assert all("rank" not in listed for listed in tools.describe()[0]["tools"])


def test_the_description_holds_what_the_policy_decides_in_general_and_for_a_session() -> None:
    policy = PolicyTable(deny=("port.act",), sessions={"work-*": Rules(ask=("port.see",))})
    port = FakePort("port", tool("act"), tool("see"))
    tools = Registry(planned(port), ToolsTable(policy=policy))

    def decided(session_id: str) -> list[str]:
        return [listed["decision"] for listed in tools.describe(session_id)[0]["tools"]]

    assert decided("") == ["deny", "allow"]
    assert decided("work-1") == ["deny", "ask"]


async def test_calls_are_counted_and_the_last_failure_is_told() -> None:
    async def moody(name: str, arguments: dict[str, Any]) -> Outcome:
        if arguments:
            raise ToolError("not\ntoday")
        return Outcome(ok=True, content="done")

    port = FakePort("port", Tool("act", "Act now.", {"type": "object"}), behaviour=moody)
    tools = Registry(planned(port), ToolsTable())
    await result(tools)
    await result(tools, arguments={"mood": "bad"})
    await result(tools, "no_such_tool")
    port.state = "down"
    await result(tools)
    (act,) = tools.describe()[0]["tools"]
    assert (act["calls"], act["failed"]) == (3, 2)
    assert act["last_failure"] == "port.act is unavailable: port is down now. Try again later."
    assert act["failed_at"]


async def test_a_call_that_is_cancelled_has_not_failed() -> None:
    started = asyncio.Event()

    async def endless(name: str, arguments: dict[str, Any]) -> Outcome:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    tools, _ = registry(endless)
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        call = group.create_task(result(tools))
        await started.wait()
        call.cancel()
    (act,) = tools.describe()[0]["tools"]
    assert (act["calls"], act["failed"]) == (1, 0)


async def test_ports_are_kept_until_the_end_and_a_new_configuration_replaces_only_what_it_changes() -> None:
    first, dropped, added = FakePort("first"), FakePort("second"), FakePort("third")
    tools = Registry(planned(first, dropped), ToolsTable())
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        keeping = group.create_task(tools.keep())
        await first.kept.wait()
        await dropped.kept.wait()
        tools.reconfigure(planned(first, added), ToolsTable())
        await added.kept.wait()
        assert first.kept.is_set()
        assert not dropped.kept.is_set()
        keeping.cancel()
    assert not first.kept.is_set()
    assert not added.kept.is_set()
