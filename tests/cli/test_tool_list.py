"""`bxctl tools`: ports with their state and reason, tools with what was called and failed, what the model finds."""

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.channel.fakes import FakeEngine
from tests.cli.daemon import Bxctl


def tool(name: str, description: str = "Does it.", **facts: Any) -> dict[str, Any]:
    counts = {"calls": 0, "failed": 0, "last_failure": None, "failed_at": None}
    policy = {"effect": "read", "decision": "allow", "rule": '[tools.policy] read = "allow"'}
    return {"name": name, "description": description, **policy, **counts, **facts}


def port(name: str, *tools: dict[str, Any], state: str = "up", reason: str = "") -> dict[str, Any]:
    return {"port": name, "state": state, "reason": reason, "tools": list(tools)}


FAILED = {"calls": 1200, "failed": 2, "last_failure": "no such file", "failed_at": "2026-12-01T14:05:06.000001Z"}
PORTS = [
    port("builtin", tool("clock", "Tell the time.", calls=3)),
    port(
        "files",
        tool("read", "Read \x1b[31ma file." + " More." * 100, **FAILED),
        tool("write", effect="write", decision="ask"),
    ),
    port("git", tool("log"), state="down", reason="connection refused"),
]
MANY = port("many", *(tool(f"tool_{number}") for number in range(1000)))


@pytest.fixture
def listed(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the daemon lists; a test may change it. Asked for words it ranks all tools backwards."""
    ports = [dict(one) for one in PORTS]

    async def tools(query: str, session_id: str) -> list[dict[str, Any]]:
        if session_id:
            return [port("of", tool(session_id, decision="deny"))]
        if not query:
            return ports
        found = ports if "file" in query else []
        return [one | {"tools": [each | {"rank": 10 - n} for n, each in enumerate(one["tools"])]} for one in found]

    monkeypatch.setattr(engine, "tools", tools)
    return ports


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


@pytest.mark.usefixtures("listed")
def test_ports_come_first_with_state_sums_and_reason_or_last_failure_then_the_tools(served: Bxctl) -> None:
    out = served("tools").out
    assert rows(out)[:5] == [
        ["PORT", "STATE", "TOOLS", "CALLS", "FAILED", "NOTE"],
        ["builtin", "up", "1", "3", "0"],
        ["files", "up", "2", "1,200", "2", "read", "2026-12-01", "14:05:", "no", "such", "file"],
        ["git", "down", "1", "0", "0", "connection", "refused"],
        [],
    ]
    names = [row[:5] for row in rows(out)[6:]]
    assert names == [
        ["builtin.clock", "read", "allow", "3", "0"],
        ["files.read", "read", "allow", "1,200", "2"],
        ["files.write", "write", "ask", "0", "0"],
        ["git.log", "read", "allow", "0", "0"],
    ]
    assert out.splitlines()[-1].rstrip().endswith("(unavailable now) Does it.")
    assert "\x1b" not in out


def test_of_a_thousand_tools_only_the_ports_are_shown_until_more_is_asked_for(
    served: Bxctl, listed: list[dict[str, Any]]
) -> None:
    listed.append(MANY)
    out = served("tools").out
    assert "1,004 tools: add --all or --port NAME to list them, or words to see what is found." in out
    assert "tool_7" not in out
    assert len(served("tools", "--all").out.splitlines()) == 1 + 4 + 2 + 1004
    of_one = served("tools", "--port", "many").out
    assert "many.tool_999" in of_one
    assert "builtin" not in of_one


@pytest.mark.usefixtures("listed")
def test_words_show_what_the_model_finds_the_best_first(served: Bxctl) -> None:
    done = served("tools", "read", "a", "file")
    assert [row[0] for row in rows(done.out)] == ["TOOL", "files.write", "builtin.clock", "files.read", "git.log"]
    nothing = served("tools", "paint")
    assert (nothing.status, nothing.out) == (0, "")
    assert "verb, object and service" in nothing.err


@pytest.mark.usefixtures("listed")
def test_json_holds_everything(served: Bxctl) -> None:
    assert served("tools", "--json").json == {"ports": PORTS}
    assert [one["port"] for one in served("tools", "--port", "git", "--json").json["ports"]] == ["git"]
    assert served("tools", "file", "--json").json["ports"][0]["tools"][0]["rank"] == 10


@pytest.mark.usefixtures("listed")
def test_the_policy_may_be_asked_about_the_calls_of_one_session(served: Bxctl) -> None:
    assert rows(served("tools", "--session", "work-1").out)[-1][:3] == ["of.work-1", "read", "deny"]
    assert served("tools", "--session", "No Session").status == 2


@pytest.mark.usefixtures("listed")
def test_an_unknown_port_is_a_usage_error(served: Bxctl) -> None:
    done = served("tools", "--port", "gti")
    assert done.status == 2
    assert "there is no port named 'gti'" in done.err


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.usefixtures("listed", "served")
def test_on_a_terminal_no_line_is_longer_than_it(columns: int, root: Path) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(leader, 65_536):
                shown.extend(data)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    command = [sys.executable, "-m", "loopd.cli.bxctl", "tools"]
    subprocess.run(command, env=environment, stdout=follower, timeout=60, check=True)
    os.close(follower)
    reader.join(60)
    os.close(leader)
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("files.read") for line in lines)
