"""The commands of bxctl: what they print and how they end (SPEC 9)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loopd import __version__
from loopd.home import Home
from loopd.session.store import Session
from tests.channel.fakes import FakeEngine
from tests.cli.daemon import Bxctl

BXCTL = [sys.executable, "-m", "loopd.cli.bxctl"]
COMMANDS = [
    "approve",
    "cancel",
    "chat",
    "compact",
    "completion",
    "delete",
    "doctor",
    "export",
    "fork",
    "sessions",
    "show",
    "status",
    "tools",
    "usage",
    "why",
]


def assert_error(done: object, status: int, *parts: str) -> None:
    assert hasattr(done, "status")
    assert hasattr(done, "err")
    lines = done.err.splitlines()
    assert done.status == status, done
    assert [line for line in lines if line.startswith("error: ")] == lines[
        -2 if lines[-1].startswith("hint: ") else -1 :
    ][:1]
    for part in parts:
        assert part in done.err


def test_every_command_of_the_contract_is_there(bxctl: Bxctl) -> None:
    done = bxctl("--help")
    listed = [line.split()[0] for line in done.out.partition("Commands:")[2].splitlines() if line.startswith("  ")]
    assert [name for name in listed if name in COMMANDS] == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(bxctl: Bxctl, name: str) -> None:
    done = bxctl(name, "--help")
    assert done.status == 0
    assert done.out.startswith(f"Usage: bxctl {name}")


def test_version(bxctl: Bxctl) -> None:
    assert bxctl("--version").out == f"bxctl {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(bxctl: Bxctl, shell: str) -> None:
    assert "_BXCTL_COMPLETE" in bxctl("completion", shell).out


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from loopd.cli.bxctl import cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"pydantic", "rich", "prompt_toolkit", "asyncio", "tenacity", "httpx"} & set(loaded)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["sessions"],
        ["show", "x"],
        ["usage", "x"],
        ["doctor"],
        ["tools"],
        ["export", "x"],
        ["chat", "--message", "x"],
        ["chat", "--continue", "--message", "x"],
        ["delete", "x", "--yes"],
    ],
)
def test_no_daemon_is_exit_status_3(bxctl: Bxctl, arguments: list[str]) -> None:
    assert_error(bxctl(*arguments), 3, os.environ["LOOPD_SOCKET"], "hint: start it: loopd serve")


@pytest.mark.parametrize(
    "arguments",
    [
        ["fly"],
        ["show"],
        ["show", "../x"],
        ["fork", "s", "--to", "../x"],
        ["fork", "s", "--upto", "0"],
        ["chat", "--session", "A", "--message", "x"],
        ["chat", "--session", "s", "--continue", "--message", "x"],
        ["chat", "--message", "x", "--key", "a", "--key", "b"],
        ["chat", "--message", "x", "--key", ""],
        ["chat", "--message", ""],
        ["chat", "--key", "k"],
        ["chat"],
        ["chat", "--json"],
        ["delete", "s"],
        ["--home"],
    ],
)
def test_wrong_usage_is_exit_status_2(served: Bxctl, arguments: list[str]) -> None:
    assert_error(served(*arguments), 2)


WRONG = "[channel] socket: found 'relative', allowed: an absolute path of at most 107 bytes"


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch, root: Path) -> str:
    """A configuration that is refused, and what bxctl says to it."""
    monkeypatch.delenv("LOOPD_SOCKET")
    (root / "loopd.toml").write_text("[channel]\nsocket = 'relative'\n")
    return f"warning: {root / 'loopd.toml'}: {WRONG}; the default socket is used\n"


@pytest.mark.parametrize("arguments", [["status"], ["doctor"], ["chat", "--message", "one"], ["approve", "s"]])
def test_a_refused_configuration_is_a_warning_and_the_daemon_is_asked(
    served: Bxctl, wrong: str, root: Path, home: Home, arguments: list[str]
) -> None:
    (home.path / "run").mkdir(exist_ok=True)
    (home.path / "run" / "channel.sock").symlink_to(root / "c.sock")
    served("chat", "--session", "s", "--message", "one")
    done = served(*arguments)
    assert done.status == 0
    assert done.err.startswith(wrong)
    assert done.err.count("warning: ") == 1


@pytest.mark.parametrize("arguments", [["status"], ["doctor"], ["chat", "--message", "one"], ["approve", "s"]])
def test_with_a_refused_configuration_and_no_daemon_the_hint_names_its_fault(
    bxctl: Bxctl, wrong: str, root: Path, arguments: list[str]
) -> None:
    done = bxctl(*arguments)
    assert_error(done, 3, f"the configuration is refused ({root / 'loopd.toml'}: {WRONG})", "LOOPD_SOCKET")
    assert done.err.startswith(wrong)
    assert done.err.count("warning: ") == 1


def test_a_configuration_that_is_asked_for_must_be_there(bxctl: Bxctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOOPD_SOCKET")
    assert_error(bxctl("--config", "/none.toml", "status"), 2, "there is no such file")


def test_the_socket_comes_from_the_configuration(served: Bxctl, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.delenv("LOOPD_SOCKET")
    (root / "loopd.toml").write_text(f"[channel]\nsocket = '{root / 'c.sock'}'\n")
    assert served("status").status == 0


# --- chat --message ----------------------------------------------------------------------------------------------


def test_messages_are_said_one_after_another_and_answers_printed(served: Bxctl) -> None:
    done = served("chat", "--session", "s", "--message", "one", "--message", "two")
    assert (done.status, done.out, done.err) == (0, "ONE\nTWO\n", "new session s\n")
    again = served("chat", "--session", "s", "--message", "three")
    assert (again.out, again.err) == ("THREE\n", "")


def test_without_a_session_a_new_one_is_made_and_said(served: Bxctl) -> None:
    done = served("chat", "--message", "one")
    (row,) = served("sessions", "--json").json["sessions"]
    assert done.err == f"new session {row['session']}\n"


def test_continue_takes_the_session_that_was_used_last(served: Bxctl) -> None:
    served("chat", "--session", "old", "--message", "one")
    served("chat", "--session", "new", "--message", "one")
    assert served("chat", "--continue", "--message", "two").err == ""
    assert len(served("usage", "new", "--json").json["requests"]) == 2


def test_json_prints_every_frame(served: Bxctl) -> None:
    frames = served("chat", "--session", "s", "--message", "one", "--json").frames
    assert [frame["type"] for frame in frames] == [
        "welcome", "opened", "caught_up", "accepted", "prefill", "delta", "delta",
        "record", "record", "record", "usage", "record", "turn_end",
    ]  # fmt: skip


def test_a_key_runs_once_and_its_answer_is_printed_again(served: Bxctl, engine: FakeEngine) -> None:
    first = served("chat", "--session", "s", "--message", "one", "--key", "k")
    second = served("chat", "--session", "s", "--message", "one", "--key", "k")
    assert first.out == second.out == "ONE\n"
    assert engine.ran == ["one"]
    assert_error(served("chat", "--session", "s", "--message", "two", "--key", "k"), 1, "another text")


def test_the_first_end_that_is_not_good_stops_the_list(served: Bxctl, engine: FakeEngine) -> None:
    engine.failure = ValueError("a fault")
    done = served("chat", "--session", "s", "--message", "one", "--message", "two")
    assert_error(done, 1, "internal error")
    assert engine.ran == ["one"]


def test_a_refused_session_is_exit_status_4(served: Bxctl, home: Home, config: object) -> None:
    log = torn(served, home)
    assert_error(served("chat", "--session", "s", "--message", "x"), 4, f"{log}:5: ", "loopd session verify s")


def torn(served: Bxctl, home: Home) -> Path:
    """Leave a session `s` whose log lost its end while nobody had it open."""
    served("chat", "--session", "r", "--message", "one")
    served("fork", "r", "--to", "s")
    log = home.sessions / "s" / "0.jsonl"
    log.write_bytes(log.read_bytes()[:-5])
    return log


# --- the other commands ------------------------------------------------------------------------------------------


def test_show_prints_records(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "one")
    assert "\none\n" in served("show", "s").out
    records = served("show", "s", "--json").json["records"]
    assert [(record["line"], record["type"]) for record in records] == [
        (1, "session_start"), (2, "user"), (3, "assistant"), (4, "usage"), (5, "turn_end"),
    ]  # fmt: skip


def test_show_of_a_refused_session_prints_what_is_good_and_ends_with_4(served: Bxctl, home: Home) -> None:
    log = torn(served, home)
    done = served("show", "s", "--json")
    assert done.status == 4
    assert len(done.json["records"]) == 4
    assert f"{log}:5: " in done.json["refused"]
    text = served("show", "s")
    assert_error(text, 4, f"{log}:5: ")
    assert "ONE" in text.out


def test_sessions_lists_titles_and_reasons(served: Bxctl, home: Home) -> None:
    log = torn(served, home)
    served("status")
    rows = {row["session"]: row for row in served("sessions", "--json").json["sessions"]}
    assert (rows["r"]["title"], rows["r"]["refused"]) == ("one", None)
    assert str(log) in rows["s"]["refused"]
    assert str(log) in served("sessions").out


def test_no_session_yet_is_said(served: Bxctl) -> None:
    done = served("sessions")
    assert (done.status, done.out) == (0, "")
    assert "bxctl chat" in done.err


def test_usage_prints_the_table_of_the_specification(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "one", "--message", "two")
    table = served("usage", "s", "--json").json
    assert table["session"] == "s"
    assert table["total"] == {"evaluated": 10, "floor": 10, "ratio": 1.0, "loss": 0, "max_loss": 0, "left_out": 1}
    text = served("usage", "s").out
    assert "evaluated 10 · floor 10 · ratio 1.000 · loss 0" in text


def test_why_tools_status_and_doctor_print_text_and_json(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "a secret text")
    for command in (["why", "s"], ["tools"], ["status"], ["doctor"]):
        assert served(*command).out
        assert served(*command, "--json").json
    assert "secret" not in served("doctor").out + served("doctor", "--json").out


def test_export_json_is_what_the_next_request_begins_with(served: Bxctl, home: Home, config: object) -> None:
    served("chat", "--session", "s", "--message", "one")
    exported = served("export", "s", "--json")
    assert exported.json["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "ONE"},
    ]
    assert exported.json["tools"][0]["function"]["name"] == "find_tool"
    served("fork", "s", "--to", "t")
    session = Session.open(home, "t", limits=config.loop)  # type: ignore[attr-defined]
    assert exported.out.startswith('{"messages":[' + b",".join(session.request(None).messages).decode() + "]")
    session.close()


def test_export_markdown_is_for_reading(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "one")
    assert served("export", "s").out == "# Session s\n\n## User\n\none\n\n## Assistant\n\nONE\n"


def test_fork_prints_the_new_id(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "one")
    assert served("fork", "s", "--to", "t", "--upto", "1").out == "t\n"
    assert served("fork", "s", "--json").json["parent"] == "s"
    assert_error(served("fork", "s", "--to", "t"), 1, "t")


def test_compact_says_what_it_costs_and_wants_a_yes(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "one")
    refused = served("compact", "s")
    assert_error(refused, 2, "needs a yes", "--yes")
    assert "70 of 5,000 prompt tokens to evaluate, at most 512 to write, about 6 s" in refused.err
    assert served("show", "s", "--json").json["records"][-1]["epoch"] == 0
    done = served("compact", "s", "--yes")
    assert (done.status, done.out) == (0, "They said something.\n")
    assert "at most 800 tokens once" in done.err
    assert "s goes on in epoch 1, after 1.5 s" in done.err
    assert served("compact", "s", "--yes", "--json").json["epoch"] == 2
    assert_error(served("compact", "t", "--yes"), 1, "no session t")


def test_every_epoch_is_shown_and_exported(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "one")
    served("compact", "s", "--yes")
    served("chat", "--session", "s", "--message", "two")
    records = served("show", "s", "--json").json["records"]
    assert [record["epoch"] for record in records] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert [record["epoch"] for record in served("show", "s", "--epoch", "1", "--json").json["records"]] == [1] * 5
    assert "epoch 1, from s:5\nThey said something." in served("show", "s").out
    assert served("export", "s").out == (
        "# Session s\n\n## User\n\none\n\n## Assistant\n\nONE\n\n"
        "## Summary (epoch 1 begins)\n\nThey said something.\n\n## User\n\ntwo\n\n## Assistant\n\nTWO\n"
    )
    newest, oldest = (served("export", "s", *of, "--json").json["messages"] for of in ((), ("--epoch", "0")))
    assert [message["content"] for message in newest[1:]] == ["Write a summary.", "They said something.", "two", "TWO"]
    assert [message["content"] for message in oldest[1:]] == ["one", "ONE"]
    assert_error(served("show", "s", "--epoch", "2"), 1, "no epoch 2")
    assert "EPOCH" in served("usage", "s").out


def test_delete_removes(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "one")
    assert served("delete", "s", "--yes").out == "s was removed\n"
    assert_error(served("show", "s"), 1, "no session s")


def test_cancel_says_whether_there_was_a_turn(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "one")
    assert served("cancel", "s", "--json").json == {"cancelled": False}
    assert served("cancel", "s").out == "s has no turn in flight\n"


# --- as a process ------------------------------------------------------------------------------------------------


def test_a_closed_pipe_leaves_no_trace(served: Bxctl) -> None:
    served("chat", "--session", "s", *(part for number in range(30) for part in ("--message", f"{number} " * 4000)))
    script = f"{sys.executable} -m loopd.cli.bxctl show s | head -n 1"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_closed_output_leaves_no_trace(served: Bxctl) -> None:
    script = f"{sys.executable} -m loopd.cli.bxctl status >&- 2>&1 </dev/null"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stdout + done.stderr


def test_text_that_the_terminal_cannot_show_is_escaped(served: Bxctl) -> None:
    served("chat", "--session", "s", "--message", "grüße 😀 \x1b[31m")
    for arguments in (["show", "s"], ["export", "s"], ["sessions"], ["chat", "--session", "s", "--message", "é"]):
        done = subprocess.run(
            [*BXCTL, *arguments],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "ascii"},
            check=False,
        )
        assert done.returncode == 0
        assert b"\x1b" not in done.stdout
        assert done.stderr == b""


def test_json_survives_any_text(served: Bxctl) -> None:
    text = 'grüße 😀 \x1b[31m \u2028 \\ "'
    served("chat", "--session", "s", "--message", text)
    assert served("show", "s", "--json").json["records"][1]["text"] == text
    assert json.loads(served("export", "s", "--json").out)["messages"][1]["content"] == text
