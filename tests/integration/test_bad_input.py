"""What people and machines get wrong: one line, what to type next, the exit status, no trace."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.appliance import BXCTL, LOOPD, PATIENCE_S, Appliance, running
from tests.servers import start_scripted_server

HELLO = b'{"type":"hello","version":1}\n'


@contextmanager
def scripted(tmp_path: Path, *steps: dict[str, Any], **tables: dict[str, Any]) -> Iterator[Appliance]:
    script = {"steps": list(steps), "default": {"text": "Fine."}}
    with (
        start_scripted_server(tmp_path / "m.sock", script) as url,
        running(Appliance(tmp_path, url, **tables)) as device,
    ):
        yield device


def assert_one_line_error(done: subprocess.CompletedProcess[str], status: int, *parts: str) -> None:
    lines = done.stderr.strip().splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert done.returncode == status, done
    assert len(errors) == 1, done.stderr
    assert all(line.startswith(("error: ", "hint: ")) or "new session" in line for line in lines), done.stderr
    for part in parts:
        assert part in done.stderr


def ends(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [frame for frame in frames if frame["type"] == "turn_end"]


def test_no_daemon_is_exit_status_3(tmp_path: Path) -> None:
    device = Appliance(tmp_path, "unix:/nowhere")
    for command in (["status"], ["sessions"], ["show", "x"], ["usage", "x"], ["doctor"]):
        assert_one_line_error(device.bxctl(*command, ok=False), 3, str(device.socket), "loopd serve")


def test_a_session_id_that_is_a_path_is_refused_before_it_touches_one(tmp_path: Path) -> None:
    with scripted(tmp_path) as device:
        for bad in ("../x", "/etc/passwd", "A", "", "x" * 65, "a/b"):
            for command in (["show", bad], ["chat", "--session", bad, "--message", "x"], ["delete", bad, "--yes"]):
                assert device.bxctl(*command, ok=False).returncode == 2
            assert_one_line_error(device.loopd("session", "verify", bad), 2, "session id")
        assert device.json("sessions")["sessions"] == []


def test_a_second_daemon_on_the_same_home_is_refused_and_the_first_serves_on(tmp_path: Path) -> None:
    with scripted(tmp_path) as device:
        assert_one_line_error(device.loopd("serve"), 1, "another loopd", str(device.home))
        assert device.daemon is not None
        device.daemon.send_signal(signal.SIGSTOP)
        assert_one_line_error(device.loopd("serve"), 1, "another loopd")
        device.daemon.send_signal(signal.SIGCONT)
        assert ends(device.chat("s", "Hello."))[0]["reason"] == "completed"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[loop]\nmax_steps = 0\n", ("[loop] max_steps", "found 0")),
        ('[loop]\nmax_steps = "many"\n', ("[loop] max_steps", "found 'many'")),
        ("[loop]\nmax_stepz = 3\n", ("[loop] max_stepz", "unknown key")),
        ("[loops]\n", ("[loops]", "unknown table")),
        ("[model]\nurl = 'ftp://x'\n", ("[model] url", "ftp://x")),
        ("[channel]\nsocket = 'relative'\n", ("[channel] socket", "absolute")),
        ("not toml", ("not TOML",)),
        ("[model]\ntemperature = nan\n", ("[model] temperature",)),
        ("[tools]\nbuiltin = ['teleport']\n", ("[tools] builtin", "teleport")),
    ],
)
def test_a_wrong_configuration_is_exit_status_2_and_names_the_place(
    tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    device = Appliance(tmp_path, "unix:/nowhere")
    device.config_path.write_text(text)
    for command in (["serve"], ["config", "check", str(device.config_path)]):
        assert_one_line_error(device.loopd(*command), 2, str(device.config_path), *parts)


def test_no_model_server_ends_the_turn_and_gives_the_text_back(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path / "m.sock", {"default": {"text": "Fine."}}) as url:
        device = Appliance(tmp_path, url, model={"connect_timeout_s": 0.2})
        device.start()
        device.chat("s", "Hello.")
    try:
        done = device.bxctl("chat", "--session", "s", "--message", "Still there?", "--json", ok=False)
        end = ends([json.loads(line) for line in done.stdout.splitlines()])[0]
        assert (done.returncode, end["reason"], end["code"]) == (1, "model_error", "model_unavailable")
        assert (end["recorded"], end["text"]) == (False, "Still there?")
        assert_one_line_error(
            device.bxctl("chat", "--session", "new", "--message", "x", ok=False),
            1,
            "no model server",
            "loopd model serve",
        )
        assert device.json("export", "s")["messages"][-1]["content"] == "Fine."
    finally:
        device.stop()


def test_a_model_server_that_dies_in_mid_stream_leaves_no_trace_in_the_log(tmp_path: Path) -> None:
    with scripted(tmp_path, {"text": "One."}, {"text": "A long answer. " * 20, "drop_after_chunks": 3}) as device:
        device.chat("s", "First.")
        log = device.home / "sessions" / "s" / "0.jsonl"
        before = log.read_bytes()
        done = device.bxctl("chat", "--session", "s", "--message", "Second.", "--json", ok=False)
        end = ends([json.loads(line) for line in done.stdout.splitlines()])[0]
        assert (done.returncode, end["reason"], end["recorded"], end["text"]) == (1, "model_error", False, "Second.")
        assert log.read_bytes() == before
        assert ends(device.chat("s", "Second."))[0]["reason"] == "completed"


@pytest.mark.parametrize("arguments", ['{"a":', '""', "null", "[1]", "", '{"name": "clock", "arguments": "{\\"a\\":"}'])
def test_malformed_arguments_become_a_result_and_the_session_lives_on(tmp_path: Path, arguments: str) -> None:
    call = {"tool_calls": [{"name": "call_tool", "arguments": arguments}]}
    with scripted(tmp_path, call, {"text": "I see."}) as device:
        assert ends(device.chat("s", "Do it."))[0]["reason"] == "completed"
        assert ends(device.chat("s", "And now?"))[0]["reason"] == "completed"
        roles = [message["role"] for message in device.json("export", "s")["messages"]]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]


def test_the_connection_lives_on_after_frames_that_are_too_large_or_garbage(tmp_path: Path) -> None:
    with scripted(tmp_path) as device, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(str(device.socket))
        lines = client.makefile("rb")
        client.sendall(HELLO)
        assert json.loads(lines.readline())["type"] == "welcome"
        for bad, code in (
            (b"x" * (2 * 1024 * 1024) + b"\n", "frame_too_large"),
            (b"not json\n", "frame_invalid"),
            (b"\xff\xfe\n", "frame_invalid"),
            (b'{"type":"fly"}\n', "frame_invalid"),
            (b'{"type":"say","session":"s"}\n', "frame_invalid"),
            (b"[]\n", "frame_invalid"),
            (b'{"type":"open","session":"../x","create":true}\n', "usage"),
        ):
            client.sendall(bad)
            assert json.loads(lines.readline())["code"] == code
        client.sendall(b'{"type":"sta')
        client.sendall(b'tus","ref":"1"}\n')
        assert json.loads(lines.readline())["to"] == "status"


def test_a_client_of_another_version_is_told_so(tmp_path: Path) -> None:
    with scripted(tmp_path) as device, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(PATIENCE_S)
        client.connect(str(device.socket))
        client.sendall(b'{"type":"hello","version":99}\n')
        lines = client.makefile("rb")
        assert json.loads(lines.readline())["code"] == "version_mismatch"
        assert lines.readline() == b""


def test_one_refused_session_stops_nobody_else_and_says_its_file_and_line(tmp_path: Path) -> None:
    with scripted(tmp_path) as device:
        device.chat("good", "Hello.")
        device.chat("bad", "Hello.")
    log = device.home / "sessions" / "bad" / "0.jsonl"
    log.write_bytes(log.read_bytes()[:-5])
    with scripted(tmp_path) as device:
        refused = device.bxctl("chat", "--session", "bad", "--message", "x", ok=False)
        assert_one_line_error(refused, 4, f"{log}:5:", "loopd session verify bad")
        assert ends(device.chat("good", "Still there?"))[0]["reason"] == "completed"
        assert [entry["session"] for entry in device.json("status")["refused"]] == ["bad"]
        assert_one_line_error(device.loopd("session", "verify", "bad"), 4, f"{log}:5:")
        assert device.loopd("session", "fork", "bad", "--to", "rescued", "--upto", "1").returncode == 0
        assert device.loopd("session", "repair", "bad").returncode == 0
        assert ends(device.chat("bad", "Back again?"))[0]["reason"] == "completed"


def test_sigterm_in_mid_answer_ends_the_daemon_at_once_with_status_0(tmp_path: Path) -> None:
    slow = {"text": "word " * 4000, "delay_ms": 20}
    with scripted(tmp_path, {"text": "One."}, slow) as device, socket.socket(socket.AF_UNIX) as client:
        device.chat("s", "First.")
        client.settimeout(PATIENCE_S)
        client.connect(str(device.socket))
        client.sendall(HELLO + b'{"type":"open","session":"s"}\n')
        client.sendall(b'{"type":"say","session":"s","text":"Second.","key":"k"}\n')
        lines = client.makefile("rb")
        while json.loads(lines.readline())["type"] != "delta":
            pass
        assert device.daemon is not None
        device.daemon.send_signal(signal.SIGTERM)
        assert device.daemon.wait(5) == 0
        device.start()
        assert device.loopd("session", "verify", "s").returncode == 0


def test_a_leftover_socket_is_replaced_and_a_regular_file_is_not(tmp_path: Path) -> None:
    with scripted(tmp_path) as device:
        assert device.stop(signal.SIGKILL) == -signal.SIGKILL
        assert device.socket.is_socket()
        device.start()
        device.stop()
        device.socket.write_text("precious")
        assert_one_line_error(device.loopd("serve"), 2, str(device.socket))
        assert device.socket.read_text() == "precious"


def test_ctrl_c_in_any_command_leaves_no_trace(tmp_path: Path) -> None:
    device = Appliance(tmp_path, "unix:/nowhere")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(device.socket))
        silent.listen()
        # Whoever started the tests in the background may have had SIGINT ignored.
        command = ["env", "--default-signal=INT", *BXCTL, "status"]
        with subprocess.Popen(command, env=device.environment, stderr=subprocess.PIPE, text=True) as client:
            silent.settimeout(PATIENCE_S)
            connection, _ = silent.accept()
            client.send_signal(signal.SIGINT)
            _, err = client.communicate(timeout=PATIENCE_S)
            connection.close()
        assert client.returncode == 130
        assert "Traceback" not in err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_is_a_typed_error_and_the_session_goes_on_once_there_is_room(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], check=True)
    try:
        script = {"default": {"text": "A long answer. " * 2000, "chunk_chars": 4096}, "context_tokens": 100_000}
        with start_scripted_server(tmp_path / "m.sock", script) as url:
            device = Appliance(small, url, loop={"min_free_bytes": 0, "max_completion_tokens": 50_000})
            device.log_path = tmp_path / "loopd.log"
            with running(device):
                ballast = small / "ballast"
                device.chat("s", "First.")
                ballast.write_bytes(b"x" * (os.statvfs(small).f_bavail * os.statvfs(small).f_frsize - 8192))
                done = device.bxctl("chat", "--session", "s", "--message", "Second.", "--json", ok=False)
                end = ends([json.loads(line) for line in done.stdout.splitlines()])[0]
                assert (done.returncode, end["code"], end["recorded"]) == (1, "session_io", False)
                assert device.loopd("session", "verify", "s").returncode == 0
                ballast.unlink()
                assert ends(device.chat("s", "Second."))[0]["reason"] == "completed"
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_too_little_free_space_refuses_a_new_turn_before_anything_is_lost(tmp_path: Path) -> None:
    with scripted(tmp_path, loop={"min_free_bytes": 1 << 60}) as device:
        done = device.bxctl("chat", "--session", "s", "--message", "Hello.", ok=False)
        assert_one_line_error(done, 1, "bytes are free", "min_free_bytes")


def test_loopd_runs_as_a_module_too() -> None:
    done = subprocess.run([*LOOPD, "--version"], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.startswith("loopd ")


@pytest.mark.parametrize("kind", ["fifo", "link", "directory"])
def test_what_has_a_logs_name_and_is_no_file_is_refused_at_once_and_the_daemon_still_stops(
    tmp_path: Path, kind: str
) -> None:
    with scripted(tmp_path) as device:
        device.chat("good", "Hello.")
        odd = device.home / "sessions" / "odd"
        odd.mkdir()
        log = odd / "0.jsonl"
        if kind == "fifo":
            os.mkfifo(log)
        elif kind == "link":
            log.symlink_to("/nonexistent")
        else:
            log.mkdir()
        listed = {row["session"]: row["refused"] for row in device.json("sessions")["sessions"]}
        assert listed["good"] is None
        assert listed["odd"]
        assert_one_line_error(device.loopd("session", "verify", "odd"), 4, str(log), f"move {log} away")
        for command in (["show", "odd"], ["chat", "--session", "odd", "--message", "x"]):
            assert_one_line_error(device.bxctl(*command, ok=False), 4, str(log))
        assert ends(device.chat("good", "Still there?"))[0]["reason"] == "completed"
        assert device.stop() == 0


def test_a_text_that_is_not_utf8_is_a_usage_error(tmp_path: Path) -> None:
    device = Appliance(tmp_path, "unix:/nowhere")
    done = subprocess.run(
        [*BXCTL, "chat", "--message", b"\xff"], env=device.environment, capture_output=True, text=True, check=False
    )
    assert_one_line_error(done, 2, "UTF-8")


def test_a_busy_session_prints_nothing_of_another_clients_answer(tmp_path: Path) -> None:
    with scripted(tmp_path, {"text": "first words of somebody else", "gate": "g"}) as device:
        arguments = [*BXCTL, "chat", "--session", "s", "--message", "Long.", "--json"]
        with subprocess.Popen(arguments, env=device.environment, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert any(json.loads(line)["type"] == "delta" for line in other.stdout)
            done = device.bxctl("chat", "--session", "s", "--message", "What is 2+2?", ok=False)
            assert_one_line_error(done, 1, "turn in flight")
            assert done.stdout == ""
            device.bxctl("cancel", "s")
            other.stdout.read()
            other.wait(PATIENCE_S)
