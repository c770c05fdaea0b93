"""`loopd model` on the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.servers import start_scripted_server


def loopd(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PIP_NO_INDEX": "1"}
    command = [sys.executable, "-c", "from loopd.cli.loopd import main; main()", "--home", str(home), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def configured(tmp_path: Path, url: str) -> tuple[str, ...]:
    config = tmp_path / "loopd.toml"
    config.write_text(f'[model]\nurl = "{url}"\nconnect_timeout_s = 0.2\n')
    return ("--config", str(config))


def test_check_tells_what_the_template_takes(tmp_path: Path) -> None:
    with start_scripted_server(tmp_path / "m.sock", {}) as url:
        flags = configured(tmp_path, url)
        words = loopd(tmp_path / "home", *flags, "model", "check")
        found = json.loads(loopd(tmp_path / "home", *flags, "model", "check", "--json").stdout)
    assert words.returncode == 0, words.stderr
    assert "prompts only grow         yes" in words.stdout
    assert re.search(r"one batch takes +\d+ ms", words.stdout)
    assert (found["forms"]["arguments"], found["batch_ms"]) == ("string", None), "by now a slot was used"


def test_check_without_a_server_is_one_error_with_a_hint(tmp_path: Path) -> None:
    done = loopd(tmp_path / "home", *configured(tmp_path, f"unix:{tmp_path}/m.sock"), "model", "check")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-2:]
    assert last[0].startswith("error: no model server answers on unix:")
    assert last[1].startswith("hint: loopd model serve")
    assert "Traceback" not in done.stderr


def test_serve_without_a_model_says_how_to_get_one(tmp_path: Path) -> None:
    done = loopd(tmp_path / "home", "model", "serve", "--socket", str(tmp_path / "m.sock"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no model file" in done.stderr
    assert "hint: loopd model fetch" in done.stderr


def test_fetch_without_a_network_is_one_error_with_a_hint(tmp_path: Path) -> None:
    done = loopd(tmp_path / "home", "model", "fetch")
    assert done.returncode == 1
    assert "error: pip cannot download" in done.stderr
    assert "Traceback" not in done.stderr
