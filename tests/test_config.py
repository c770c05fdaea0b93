from pathlib import Path
from typing import Any

import pytest
import tomli_w

from loopd.config import Config, load_config, parse_config
from loopd.errors import ConfigError

TABLES = {name: type(getattr(Config(), name)).model_fields for name in Config.model_fields}
KEYS = [(table, key) for table, fields in TABLES.items() for key in fields]
OF_NO_KEY: list[Any] = [[[1]], {"a": 1}, True, "\x00wrong", -1, float("nan")]


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def fault_in(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.exit_code == 2
    assert caught.value.hint
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_an_empty_file_and_no_file_mean_the_defaults(tmp_path: Path) -> None:
    assert load_config(tmp_path / "none.toml") == load_config(write(tmp_path / "empty.toml", "")) == Config()


def test_the_defaults_written_to_a_file_are_the_defaults(tmp_path: Path) -> None:
    values = Config().model_dump(mode="json", exclude_none=True)
    path = write(tmp_path / "loopd.toml", tomli_w.dumps(values))
    assert load_config(path) == Config()


def test_a_value_of_each_type_is_taken(tmp_path: Path) -> None:
    path = write(
        tmp_path / "loopd.toml",
        '[model]\nurl = "http://127.0.0.1:8080"\ntemperature = 0\nseed = 42\n'
        '[loop]\nreasoning = "dropped"\nturn_timeout_s = 60\ntool_timeout_s = 0.5\n'
        '[channel]\nsocket = "/run/loopd/channel.sock"\n[tools]\nbuiltin = ["clock"]\n',
    )
    config = load_config(path)
    assert (config.model.url, config.model.temperature, config.model.seed) == ("http://127.0.0.1:8080", 0, 42)
    assert (config.loop.reasoning, config.loop.turn_timeout_s, config.loop.tool_timeout_s) == ("dropped", 60, 0.5)
    assert (config.channel.socket, config.tools.builtin) == ("/run/loopd/channel.sock", ("clock",))


def test_semantic_ranking_without_its_extra_is_refused_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "loopd.toml", '[tools]\nranking = "semantic"\n')
    monkeypatch.setattr("loopd.config.find_spec", lambda name: None)
    assert fault_in(path) == (
        "[tools] ranking: found 'semantic', allowed: words, and semantic once its extra is there: "
        "pip install 'loopd[semantic]'"
    )
    monkeypatch.setattr("loopd.config.find_spec", lambda name: object())
    assert load_config(path).tools.ranking == "semantic"


@pytest.mark.parametrize(("table", "key"), KEYS)
def test_every_key_refuses_what_is_not_of_its_type_in_one_line(table: str, key: str, tmp_path: Path) -> None:
    refused = 0
    for value in OF_NO_KEY:
        path = write(tmp_path / "loopd.toml", tomli_w.dumps({table: {key: value}}))
        try:
            load_config(path)
        except ConfigError:
            text = fault_in(path)
            assert text.startswith(f"[{table}] {key}")
            assert "found " in text or "unknown key" in text
            assert "allowed: " in text
            refused += 1
    assert refused >= 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[model]\nslots = "two"', "[model] slots: found 'two', allowed: input should be a valid integer"),
        ("[model]\nslots = 0", "[model] slots: found 0, allowed: input should be greater than or equal to 1"),
        ("[model]\nslots = 1.0", "[model] slots: found 1.0, allowed: input should be a valid integer"),
        ("[model]\nslots = true", "[model] slots: found True, allowed: input should be a valid integer"),
        ('[model]\nurl = "ftp://x"', "[model] url: found 'ftp://x', allowed: "),
        ('[model]\nurl = "http://[::1"', "[model] url: found 'http://[::1', allowed: a URL"),
        ('[model]\nurl = "http://a:99999"', "[model] url: found 'http://a:99999', allowed: a URL"),
        ("[model]\ntemperature = -0.1", "[model] temperature: found -0.1, allowed: input should be greater than"),
        ("[model]\nload_timeout_s = nan", "[model] load_timeout_s: found nan, allowed: "),
        ("[model]\nload_timeout_s = inf", "[model] load_timeout_s: found inf, allowed: "),
        ("[model]\nload_timeout_s = 0", "[model] load_timeout_s: found 0, allowed: input should be greater than 0"),
        ('[model]\ntemplate = ""', "[model] template: found '', allowed: string should have at least 1 char"),
        (
            '[loop]\nreasoning = "maybe"',
            "[loop] reasoning: found 'maybe', allowed: input should be 'sent' or",
        ),
        ("[loop]\nsystem_prompt = 2026-12-01", "[loop] system_prompt: found datetime.date(2026, 12, 1), allowed: "),
        ("[loop]\nmax_steps = [1]", "[loop] max_steps: found [1], allowed: input should be a valid integer"),
        ('[channel]\nsocket = "relative.sock"', "[channel] socket: found 'relative.sock', allowed: an absolute path"),
        ('[tools]\nbuiltin = ["shell"]', "[tools] builtin.0: found 'shell', allowed: input should be 'clock', "),
        ('[tools]\nbuiltin = "clock"', "[tools] builtin: found 'clock', allowed: input should be a valid tuple"),
        (
            "[loop]\nmax_step = 3",
            "[loop] max_step: unknown key, allowed: approval_timeout_s, auto_compact, close_idle_s, ",
        ),
        ("[lop]\nmax_steps = 3", "[lop]: unknown table, allowed: channel, loop, model, tools"),
        ("max_steps = 3", "[max_steps]: unknown table, allowed: channel, loop, model, tools"),
        ("loop = 3", "[loop]: found 3, allowed: "),
        ("[[loop]]\nmax_steps = 3", "[loop]: found [{'max_steps': 3}], allowed: "),
        ("[loop]\nmax_steps = 0\nmax_same_call = 0", "(and 1 more)"),
    ],
)
def test_an_error_names_file_table_key_what_was_found_and_what_is_allowed(
    text: str, expected: str, tmp_path: Path
) -> None:
    assert expected in fault_in(write(tmp_path / "loopd.toml", text))


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    text = fault_in(write(tmp_path / "loopd.toml", f'[model]\nslots = "{"x" * 10_000}"'))
    assert len(text) < 300


def test_a_socket_path_must_fit_a_socket_address(tmp_path: Path) -> None:
    path = "/" + "é" * 53 + "x"
    assert len(path.encode()) == 108
    assert "at most 107 bytes" in fault_in(write(tmp_path / "loopd.toml", f'[channel]\nsocket = "{path}"'))
    parse_config({"channel": {"socket": path[:-1]}}, source="test")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"[model\n", "not TOML"),
        (b"[model]\nslots = 1\nslots = 2\n", "not TOML"),
        (b"[model]\nurl = \"\xff\"\n", "not UTF-8 text at byte 15"),
        (b"\0\0\0\0", "not TOML"),
        (b"{" * 5000, "not TOML"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_toml_is_refused(data: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "loopd.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=expected) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_very_deep_toml_is_refused_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "loopd.toml", "a = " + "[" * 50_000)
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(path)


def test_a_file_that_is_asked_for_must_be_there_and_readable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.toml", required=True)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)


def test_the_hash_is_of_the_effective_values(tmp_path: Path) -> None:
    same = parse_config({"loop": {"max_steps": Config().loop.max_steps}}, source="test")
    other = parse_config({"loop": {"max_steps": 1}}, source="test")
    assert Config().sha256() == same.sha256() != other.sha256()


def test_the_channel_socket_goes_flag_or_environment_then_file_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOOPD_SOCKET", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    configured = parse_config({"channel": {"socket": "/run/other.sock"}}, source="test")
    assert Config().channel_socket(tmp_path) == tmp_path / "run" / "channel.sock"
    assert configured.channel_socket(tmp_path) == Path("/run/other.sock")
    monkeypatch.setenv("LOOPD_SOCKET", "/run/typed.sock")
    assert configured.channel_socket(tmp_path) == Path("/run/typed.sock")


def test_the_model_is_asked_on_the_default_socket_unless_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert Config().model_url(tmp_path) == f"unix:{tmp_path}/run/model.sock"
    configured = parse_config({"model": {"url": "unix:/run/m.sock"}}, source="test")
    assert configured.model_url(tmp_path) == "unix:/run/m.sock"
