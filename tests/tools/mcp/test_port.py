"""The port over a server that does everything wrong, all of it real processes."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from loopd.errors import ToolError
from loopd.tools.mcp import connection
from tests.tools.mcp.held import PATIENCE_S, Held, held

GOOD = {"name": "good", "description": "It is good.", "inputSchema": {"type": "object"}}


def heard(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "heard").read_bytes().splitlines()]


async def test_a_servers_tools_are_listed_and_called(tmp_path: Path) -> None:
    async with held(tmp_path) as it:
        assert (it.port.state, it.port.reason) == ("down", "not started yet")
        await it.up()
        assert it.port.reason == ""
        assert "echo" in it.names()
        assert await it.call("echo", "hello") == "echo hello"
        assert await it.call("fail") == "not ok: it cannot be done"
        assert await it.call("image") == "[image: image/png, 5 bytes]"
    assert it.port.state == "down"


async def test_what_is_printed_beside_the_protocol_is_skipped(tmp_path: Path) -> None:
    async with held(tmp_path, {"banner": ["Welcome!", "", '{"a": 1}', "[]", "\udcff\udcfe"]}) as it:
        await it.up()
        assert await it.call("noise") == "after the noise"
        assert "no JSON" not in it.log()
        assert it.log().count("mcp_no_message") == 1


@pytest.mark.parametrize("name", ["broken", "wrong"])
async def test_an_answer_that_is_none_fails_its_call_at_once_and_no_other(tmp_path: Path, name: str) -> None:
    async with held(tmp_path) as it:
        await it.up()
        assert (await it.call(name)).startswith("not ok: the answer is")
        assert await it.call("echo", "still there") == "echo still there"


async def test_a_server_that_dies_in_mid_call_says_why_and_comes_back(tmp_path: Path) -> None:
    async with held(tmp_path) as it:
        await it.up()
        waiting = asyncio.create_task(it.port.run("never", {}))
        with pytest.raises(ToolError) as caught:
            await it.call("die")
        assert str(caught.value) == (
            "fake ended in mid-call (the connection ended; exit status 3; stderr: the roof is on fire); "
            "whether the call took effect is unknown"
        )
        with pytest.raises(ToolError, match="whether the call took effect is unknown"):
            await waiting
        await it.up()
        assert await it.call("echo", "again") == "echo again"


async def test_a_server_that_is_down_at_start_is_up_once_it_can_be(tmp_path: Path) -> None:
    needed = tmp_path / "needed"
    async with held(tmp_path, {"needs": str(needed)}) as it:
        await it.logged("mcp_down")
        assert it.port.state == "down"
        assert it.port.reason.endswith(f"exit status 7; stderr: not without {needed}")
        assert it.names() == []
        with pytest.raises(ToolError, match=r"fake is down now .*exit status 7"):
            await it.call("echo")
        needed.touch()
        await it.up()
        assert await it.call("echo", "at last") == "echo at last"


async def test_a_server_that_crashes_in_a_loop_is_started_ever_more_seldom(tmp_path: Path) -> None:
    async with held(tmp_path, {"needs": str(tmp_path / "needed")}) as it:
        await it.until(lambda: it.log().count("mcp_next_try") >= 4)
        pauses_s = [float(found) for found in re.findall(r"seconds=([\d.]+)", it.log())]
    assert pauses_s[3] >= 0.4 > pauses_s[0]
    assert it.log().count("mcp_down") == 1


async def test_a_program_that_is_not_there_is_a_reason(tmp_path: Path) -> None:
    async with held(tmp_path, command=("/no/such/program",)) as it:
        await it.logged("mcp_down")
        assert "/no/such/program" in it.port.reason


async def test_the_list_of_a_former_daemon_is_there_before_the_server(tmp_path: Path) -> None:
    async with held(tmp_path) as it:
        await it.up()
    async with held(tmp_path, {"needs": str(tmp_path / "needed")}) as later:
        assert later.port.tools() == it.port.tools()
        await later.logged("mcp_down")
        assert later.port.tools() == it.port.tools()


async def test_a_list_of_another_server_of_that_name_is_not_used(tmp_path: Path) -> None:
    async with held(tmp_path) as it:
        await it.up()
    async with held(tmp_path, command=("/another",)) as other:
        assert other.port.tools() == ()


@pytest.mark.parametrize("kept", [b"", b"{", b"[]", b'{"server":1,"tools":[]}', b"\xff\x00", b"null"])
async def test_a_corrupt_list_on_disk_is_not_there_and_is_replaced(tmp_path: Path, kept: bytes) -> None:
    path = tmp_path / "tool-lists" / "fake.json"
    path.parent.mkdir()
    path.write_bytes(kept)
    async with held(tmp_path, {"tools": [GOOD]}) as it:
        assert it.port.tools() == ()
        await it.up()
    assert [tool["name"] for tool in json.loads(path.read_bytes())["tools"]] == ["good"]
    assert [file.name for file in path.parent.iterdir()] == ["fake.json"]


async def test_a_list_that_changes_is_listed_again(tmp_path: Path) -> None:
    async with held(tmp_path) as it:
        await it.up()
        assert await it.call("grow") == "grown"
        await it.until(lambda: "grown" in it.names())
        assert await it.call("grown", "up") == "grown up"


async def test_of_two_tools_with_one_name_the_first_counts_and_the_log_says_so(tmp_path: Path) -> None:
    async with held(tmp_path, {"tools": [GOOD, {**GOOD, "description": "The other."}]}) as it:
        await it.up()
        assert [tool.description for tool in it.port.tools()] == ["It is good."]
        assert "mcp_tool_dropped server=fake tool='good'" in it.log()


async def test_one_bad_tool_never_loses_a_list(tmp_path: Path) -> None:
    bad = [
        {"name": "bad"},
        {"name": "bad", "inputSchema": None},
        {"name": "bad", "inputSchema": "object"},
        {"name": "bad", "inputSchema": []},
        {"name": "bad", "inputSchema": {"type": "object", "properties": []}},
        {"name": "bad", "inputSchema": {"type": "object"}, "annotations": "none"},
        {"name": "bad", "inputSchema": {"type": "object"}, "description": 3},
        {"name": "bad\nname", "inputSchema": {"type": "object"}},
        {"name": "", "inputSchema": {"type": "object"}},
        {"name": "bad" * 100, "inputSchema": {"type": "object"}},
        {"name": "bad", "inputSchema": {"type": "object"}, "description": "x" * 300_000},
        {"inputSchema": {"type": "object"}},
        "bad",
        None,
    ]
    async with held(tmp_path, {"tools": [GOOD, *bad, {**GOOD, "name": "better"}]}) as it:
        await it.up()
        assert it.names() == ["good", "better"]
        assert it.log().count("mcp_tool_dropped server=fake") == len(bad)


async def test_text_that_is_no_unicode_loses_no_list(tmp_path: Path) -> None:
    async with held(tmp_path, {"tools": [{**GOOD, "description": "lone \ud800"}, {**GOOD, "name": "better"}]}) as it:
        await it.up()
        assert [tool.description for tool in it.port.tools()] == ["lone \ufffd\ufffd\ufffd", "It is good."]


async def test_a_thousand_tools_on_many_pages_are_listed(tmp_path: Path) -> None:
    tools = [{**GOOD, "name": f"tool{n}"} for n in range(1000)]
    async with held(tmp_path, {"tools": tools, "pages": 30}) as it:
        await it.up()
        assert it.names() == [tool["name"] for tool in tools]


@pytest.mark.parametrize("endless", ["same", "more"])
async def test_a_list_without_end_is_cut(tmp_path: Path, endless: str) -> None:
    async with held(tmp_path, {"endless": endless}) as it:
        await it.up()
        assert "echo" in it.names()
        assert "mcp_list_cut" in it.log()


async def test_an_empty_list_is_taken_and_one_that_fails_changes_nothing(tmp_path: Path) -> None:
    refused = '{"jsonrpc": "2.0", "id": $ID, "error": {"code": -32603, "message": "out of tools"}}'
    async with held(tmp_path, {"tools": [GOOD]}) as it:
        await it.up()
    async with held(tmp_path, {"answer": {"tools/list": refused}}) as it:
        await it.logged("mcp_down")
        assert it.port.reason == "tools/list: out of tools"
        assert it.names() == ["good"]
        it.configure(tools=[])
        await it.up()
        assert it.names() == []
    async with held(tmp_path, {"needs": "/nowhere"}) as it:
        assert it.names() == []


@pytest.mark.parametrize("result", ['{"tools": 3}', "{}", '{"tools": [], "nextCursor": 3}'])
async def test_a_list_that_fails_later_leaves_the_server_up(tmp_path: Path, result: str) -> None:
    async with held(tmp_path) as it:
        await it.up()
        before = it.port.tools()
        it.configure(answer={"tools/list": f'{{"jsonrpc": "2.0", "id": $ID, "result": {result}}}'})
        await it.call("grow")
        await it.logged("mcp_not_listed")
        assert it.port.tools() == before
        assert await it.call("echo", "hello") == "echo hello"


@pytest.mark.parametrize("method", ["initialize", "tools/list"])
async def test_a_server_that_hangs_has_a_deadline_for_each_step(tmp_path: Path, method: str) -> None:
    async with held(tmp_path, {"silent": [method]}, connect_timeout_s=1.0) as it:
        await it.logged("mcp_down")
        assert it.port.reason == f"no answer to {method} within 1 s"
        it.configure()
        await it.up()


async def test_a_server_that_is_not_up_yet_says_what_it_is_waited_for(tmp_path: Path) -> None:
    async with held(tmp_path, {"banner": ["Welcome!"], "silent": ["initialize"]}) as it:
        assert it.port.reason == "not started yet"
        await it.logged("mcp_no_message")
        assert (it.port.state, it.port.reason) == ("down", "starting: no answer to initialize yet")


async def test_a_server_whose_list_does_not_come_says_so(tmp_path: Path) -> None:
    async with held(tmp_path, {"silent": ["tools/list"], "heard": str(tmp_path / "heard")}) as it:
        async with asyncio.timeout(PATIENCE_S):
            while it.port.reason != "connected: no answer to tools/list yet":
                await asyncio.to_thread((tmp_path / "heard").exists)
        assert it.port.state == "down"


async def test_a_server_that_writes_no_json_has_that_reason(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("tops3cret", encoding="utf-8")
    banner = ["\udcff \x1b[1mListening\tto tops3cret " + "x" * 10_000, "and more"]
    async with held(
        tmp_path,
        {"banner": banner, "silent": ["initialize"]},
        connect_timeout_s=1.0,
        env_files={"TOKEN": str(tmp_path / "token")},
    ) as it:
        await it.logged("mcp_down")
        said, _, shown = it.port.reason.partition("; it writes what is no JSON: ")
        assert said == "no answer to initialize within 1 s"
        assert shown.startswith("\ufffd  [1mListening to [secret] xxx")
        assert len(shown) == 100
        it.configure(banner=["Welcome!"])
        await it.up()
        with pytest.raises(
            ToolError, match=r"ended in mid-call \(the connection ended; exit status 3; stderr: the roof"
        ):
            await it.call("die")


@pytest.mark.parametrize(
    "answer",
    [
        '{"jsonrpc": "2.0", "id": $ID, "result": {}}',
        '{"jsonrpc": "2.0", "id": $ID, "result": []}',
        '{"jsonrpc": "2.0", "id": $ID, "error": {"code": -32000, "message": "no entry"}}',
        '{"jsonrpc": "2.0", "id": $ID, "result": {"protocolVersion": "1999-01-01"}}',
    ],
)
async def test_a_handshake_that_goes_wrong_is_a_reason(tmp_path: Path, answer: str) -> None:
    async with held(tmp_path, {"answer": {"initialize": answer}}) as it:
        await it.logged("mcp_down")
        assert it.port.reason.startswith(("initialize: ", "server/discover: "))


async def test_a_call_that_is_cancelled_ends_at_once_and_the_server_is_told(tmp_path: Path) -> None:
    async with held(tmp_path, {"heard": str(tmp_path / "heard")}) as it:
        await it.up()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await it.port.run("never", {})
        assert await it.call("echo", "next") == "echo next"
        asked, told = (
            next(m for m in heard(tmp_path) if m["method"] == method and ask(m))
            for method, ask in (
                ("tools/call", lambda m: m["params"]["name"] == "never"),
                ("notifications/cancelled", lambda _m: True),
            )
        )
        assert told["params"]["requestId"] == asked["id"]


async def given_up(it: Held, name: str) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await it.port.run(name, {})


@pytest.mark.parametrize("settings", [{}, {"only": "discover"}])
async def test_a_server_that_hangs_in_a_call_is_ended_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(connection, "_PING_S", 0.3)
    async with held(tmp_path, settings) as it:
        await it.up()
        await given_up(it, "hang")
        assert it.port.state == "up"
        with pytest.raises(ToolError, match=r"ended in mid-call \(did not answer a ping after hang"):
            await it.call("echo", "meanwhile")
        await it.logged("mcp_down")
        assert re.search(
            r"mcp_down server=fake reason='did not answer a ping after hang took longer than [\d.]+ s", it.log()
        )
        await it.up()
        assert await it.call("echo", "again") == "echo again"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"only": "discover"},
        {"answer": {"ping": '{"jsonrpc": "2.0", "id": $ID, "error": {"code": -32601, "message": "no such method"}}'}},
        {"answer": {"ping": '{"jsonrpc": "2.0", "id": $ID, "result": 1}'}},
    ],
)
async def test_a_server_that_answers_a_ping_stays_up_whatever_a_call_did(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    async with held(tmp_path, {"heard": str(tmp_path / "heard"), **settings}) as it:
        await it.up()
        asked = "server/discover" if settings.get("only") else "ping"
        before = [message["method"] for message in heard(tmp_path)].count(asked)
        for _ in range(2):
            await given_up(it, "never")
            before += 1
            while [message["method"] for message in heard(tmp_path)].count(asked) < before:
                assert await it.call("echo", "next") == "echo next"
        assert it.port.state == "up"
        assert "mcp_down" not in it.log()


async def test_arguments_that_no_message_can_hold_cost_only_their_call(tmp_path: Path) -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"deeper": deep}
    async with held(tmp_path) as it:
        await it.up()
        for arguments in ({"text": "lone \ud800"}, deep):
            with pytest.raises(ToolError, match="these arguments cannot be sent"):
                await it.port.run("echo", arguments)
        assert await it.call("echo", "still there") == "echo still there"


async def test_calls_that_are_cancelled_end_at_once_where_the_server_reads_nothing(tmp_path: Path) -> None:
    async with held(tmp_path, {"deaf": True}) as it:
        await it.up()
        calls = [asyncio.create_task(it.port.run("echo", {"text": "x" * 100_000})) for _ in range(10)]
        done, waiting = await asyncio.wait(calls, timeout=0.2)
        assert not done
        for call in waiting:
            call.cancel()
        done, _ = await asyncio.wait(calls, timeout=2.0)
        assert len(done) == len(calls)


async def test_a_message_that_is_too_long_fails_its_call_and_a_long_one_does_not(tmp_path: Path) -> None:
    async with held(tmp_path) as it:
        await it.up()
        assert "bytes left out" in await it.call("huge", "2000000")
        assert (await it.call("huge", "30000000")).startswith("not ok: the answer is broken, or longer")
        assert await it.call("echo", "still there") == "echo still there"


async def test_a_server_that_writes_a_line_without_end_is_ended_and_comes_back(tmp_path: Path) -> None:
    flooded = "it wrote more than 67108864 bytes without the end of a line; a message may have 8388608"
    async with held(tmp_path) as it:
        await it.up()
        with pytest.raises(ToolError, match=f"ended in mid-call .*{flooded}"):
            await it.call("flood")
        await it.logged(f"mcp_down server=fake reason='the connection ended; {flooded}'")
        await it.up()
        assert await it.call("echo", "again") == "echo again"


async def test_a_server_that_writes_without_end_from_the_start_has_that_reason(tmp_path: Path) -> None:
    async with held(tmp_path, {"flood": True}) as it:
        await it.logged("mcp_down")
        assert "it wrote more than 67108864 bytes without the end of a line" in it.port.reason
        it.configure()
        await it.up()


async def test_a_server_ends_with_all_that_it_started(tmp_path: Path) -> None:
    async with held(tmp_path, {"stubborn": True}) as it:
        await it.up()
        grandchild = int(await it.call("child"))
        os.kill(grandchild, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(grandchild, 0)


async def test_a_server_has_its_variables_and_none_of_the_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_DAEMON", "yes")
    (tmp_path / "token").write_text("tops3cret\n", encoding="utf-8")
    async with held(tmp_path, env={"PLAIN": "1"}, env_files={"TOKEN": str(tmp_path / "token")}) as it:
        await it.up()
        env = json.loads(await it.call("env"))
    assert (env["PLAIN"], env["TOKEN"]) == ("1", "tops3cret")
    assert "OF_THE_DAEMON" not in env


async def test_a_missing_secret_is_a_reason_until_it_is_there(tmp_path: Path) -> None:
    async with held(tmp_path, env_files={"TOKEN": str(tmp_path / "token")}) as it:
        await it.logged("mcp_down")
        assert it.port.reason == f"the secret TOKEN cannot be read from {tmp_path}/token: No such file or directory"
        (tmp_path / "token").write_text("tops3cret", encoding="utf-8")
        await it.up()


async def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("tops3cret", encoding="utf-8")
    async with held(tmp_path, {"needs": "/nowhere/tops3cret"}, env_files={"TOKEN": str(tmp_path / "token")}) as it:
        await it.logged("mcp_down")
        assert it.port.reason.endswith("stderr: not without /nowhere/[secret]")
        assert "tops3cret" not in it.log()


async def test_a_server_of_the_newer_era_is_spoken_to_in_its_way(tmp_path: Path) -> None:
    async with held(tmp_path, {"only": "discover"}) as it:
        await it.up()
        assert await it.call("echo", "hello") == "echo hello"


async def test_effects_are_the_servers_word_unless_the_configuration_has_one(tmp_path: Path) -> None:
    tools = [
        {**GOOD, "name": "plain"},
        {**GOOD, "name": "reads", "annotations": {"readOnlyHint": True}},
        {**GOOD, "name": "get_it"},
        {**GOOD, "name": "get_and_delete", "annotations": {"readOnlyHint": True}},
    ]
    async with held(
        tmp_path, {"tools": tools}, effects={"get_and_*": "write", "get_*": "read"}, call_timeout_s=7
    ) as it:
        await it.up()
        assert [(tool.name, tool.effect, tool.timeout_s) for tool in it.port.tools()] == [
            ("plain", "write", 7.0),
            ("reads", "read", 7.0),
            ("get_it", "read", 7.0),
            ("get_and_delete", "write", 7.0),
        ]


async def test_a_disk_that_takes_no_list_costs_only_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "tool-lists").write_text("in the way", encoding="utf-8")
    async with held(tmp_path) as it:
        await it.up()
        assert "mcp_list_not_kept" in it.log()
