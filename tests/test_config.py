from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from click.testing import CliRunner
from pydantic import BaseModel

from loopd.cli.loopd import cli
from loopd.config import _PATTERNS, Config, load_config, parse_config
from loopd.errors import ConfigError
from loopd.tools.executables import Manifest

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
        ('[model]\nslots = "two"', "[model] slots: found 'two', allowed: a whole number"),
        ("[model]\nslots = 0", "[model] slots: found 0, allowed: at least 1"),
        ("[model]\nslots = 1.0", "[model] slots: found 1.0, allowed: a whole number"),
        ("[model]\nslots = true", "[model] slots: found true, allowed: a whole number"),
        (
            '[model]\nurl = "ftp://x"',
            "[model] url: found 'ftp://x', allowed: a URL that begins with http://, https:// or unix:/",
        ),
        ('[model]\nurl = "http://[::1"', "[model] url: found 'http://[::1', allowed: a URL"),
        ('[model]\nurl = "http://a:99999"', "[model] url: found 'http://a:99999', allowed: a URL"),
        ("[model]\ntemperature = -0.1", "[model] temperature: found -0.1, allowed: at least 0"),
        ("[model]\nload_timeout_s = nan", "[model] load_timeout_s: found nan, allowed: a finite number"),
        ("[model]\nload_timeout_s = inf", "[model] load_timeout_s: found inf, allowed: a finite number"),
        ("[model]\nload_timeout_s = 0", "[model] load_timeout_s: found 0, allowed: more than 0"),
        ('[model]\ntemplate = ""', "[model] template: found '', allowed: a text that is not empty"),
        (
            '[loop]\nreasoning = "maybe"',
            "[loop] reasoning: found 'maybe', allowed: 'sent' or 'dropped'",
        ),
        ("[loop]\nsystem_prompt = 2026-12-01", "[loop] system_prompt: found 2026-12-01, allowed: a text"),
        ("[loop]\nmax_steps = [1]", "[loop] max_steps: found a list, allowed: a whole number"),
        ('[channel]\nsocket = "relative.sock"', "[channel] socket: found 'relative.sock', allowed: an absolute path"),
        ('[tools]\nbuiltin = ["shell"]', "[tools] builtin.0: found 'shell', allowed: 'clock', 'device' or 'files'"),
        ('[tools]\nbuiltin = "clock"', "[tools] builtin: found 'clock', allowed: a list"),
        (
            "[loop]\nmax_step = 3",
            "[loop] max_step: unknown key, allowed: approval_timeout_s, auto_compact, close_idle_s, ",
        ),
        ("[lop]\nmax_steps = 3", "[lop]: unknown table, allowed: channel, loop, model, tools"),
        ("max_steps = 3", "[max_steps]: unknown table, allowed: channel, loop, model, tools"),
        ("loop = 3", "[loop]: found 3, allowed: a table"),
        ("[[loop]]\nmax_steps = 3", "[loop]: found a list, allowed: a table"),
        ("[loop]\nmax_steps = 0\nmax_same_call = 0", "(and 1 more)"),
    ],
)
def test_an_error_names_file_table_key_what_was_found_and_what_is_allowed(
    text: str, expected: str, tmp_path: Path
) -> None:
    assert expected in fault_in(write(tmp_path / "loopd.toml", text))


CANARY = "inline-canary"
NOT_SHOWN = "found a text that is not shown, allowed: the absolute path of a file that holds the value"
SECRET: list[tuple[dict[str, Any], str]] = [
    ({"header_files": {"Authorization": f"Bearer {CANARY}"}}, f"header_files.Authorization: {NOT_SHOWN}"),
    ({"header_files": {"A": [CANARY]}}, "header_files.A: found a list, allowed: the absolute path of a file"),
    ({"header_files": {f"A: {CANARY}": "/k"}}, "header_files.A…: found 'A…', allowed: the name of an HTTP header"),
    ({"header_files": {f"A: {CANARY}": CANARY}}, "header_files.A…: found 'A…', allowed: the name of an HTTP header"),
    ({"header_files": {"[key]": CANARY}}, "header_files.[key]: found '[key]', allowed: the name of an HTTP header"),
    ({"header_files": f"Bearer {CANARY}"}, "header_files: found a text that is not shown, allowed: a table"),
    ({"header_files": [{"A": CANARY}]}, "header_files: found a list, allowed: a table"),
    ({"env_files": {"KEY": CANARY}}, f"env_files.KEY: {NOT_SHOWN}"),
    ({"env_files": {"KEY": {"a": CANARY}}}, "env_files.KEY: found a table, allowed: the absolute path of a file"),
    ({"env_files": {f"KEY={CANARY}": "/k"}}, "env_files.KEY…: found 'KEY…', allowed: the name of an environment"),
    ({"env_files": CANARY}, "env_files: found a text that is not shown, allowed: a table"),
    ({"env": {"KEY": f"{CANARY}\0"}}, "env.KEY: found a text that is not shown, allowed: a text without NUL"),
    ({"env": {"KEY": [CANARY]}}, "env.KEY: found a list, allowed: a text"),
    ({"env": {"KEY": 4711}}, "env.KEY: found a value that is not shown, allowed: a text"),
    ({"env": {f"KEY={CANARY}": "x"}}, "env.KEY…: found 'KEY…', allowed: the name of an environment variable"),
    ({"env": [f"KEY={CANARY}"]}, "env: found a list, allowed: a table"),
    ({"command": f"run --key {CANARY}"}, "command: found a text that is not shown, allowed: a list"),
    ({"command": ["run", f"{CANARY}\0"]}, "command.1: found a text that is not shown, allowed: a text without NUL"),
    ({"command": {"run": CANARY}}, "command: found a table, allowed: a list"),
]
PLACES: list[tuple[dict[str, Any], str]] = [
    *(({"tools": {"mcp": {"m": {"url": "http://h", **t}}}}, f"[tools] mcp.m.{fault}") for t, fault in SECRET),
    ({"tools": {"mcp": {"m": {"env": {"KEY": CANARY}}}}}, "[tools] mcp.m: found a table, allowed: either command or"),
    ({"tools": {"mcp": {"m": CANARY}}}, "[tools] mcp.m: found a text that is not shown, allowed: a table"),
    ({"tools": {"mcp": {"m": [{"env": {"KEY": CANARY}}]}}}, "[tools] mcp.m: found a list, allowed: a table"),
    ({"tools": {"mcp": {"a b": {"url": "http://h", "env": {"KEY": CANARY}}}}}, "[tools] mcp.a b: found 'a b', "),
    ({"tools": {"mcp": {"files": {"url": "http://h", "env": {"K": CANARY}}}}}, "[tools] mcp: found a table, "),
    ({"tools": {"mcp": CANARY}}, "[tools] mcp: found a text that is not shown, allowed: a table"),
    ({"tools": {"mcp": [{"m": {"env": {"KEY": CANARY}}}]}}, "[tools] mcp: found a list, allowed: a table"),
    ({"tools": CANARY}, "[tools]: found a text that is not shown, allowed: a table"),
    ({"tools": [{"mcp": {"m": {"env": {"KEY": CANARY}}}}]}, "[tools]: found a list, allowed: a table"),
    ({"model": {"api_key_file": CANARY}}, f"[model] api_key_file: {NOT_SHOWN}"),
    ({"model": {"api_key_file": {"key": CANARY}}}, "[model] api_key_file: found a table, allowed: the absolute"),
    ({"model": CANARY}, "[model]: found a text that is not shown, allowed: a table"),
    ({"model": [{"api_key_file": CANARY}]}, "[model]: found a list, allowed: a table"),
    ({"channel": {"socket": {"api_key": CANARY}}}, "[channel] socket: found a table, allowed: a text"),
]


@pytest.mark.parametrize(("values", "expected"), PLACES)
def test_what_stands_where_a_secret_could_is_never_shown(values: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(values, source="test")
    assert caught.value.message.startswith(f"test: {expected}")
    path = write(tmp_path / "loopd.toml", tomli_w.dumps(values))
    done = CliRunner().invoke(cli, ["config", "check", str(path)])
    assert isinstance(done.exception, ConfigError)
    assert done.exception.message.startswith(f"{path}: {expected}")
    for text in (str(caught.value), caught.value.hint, str(done.exception), done.output):
        assert CANARY not in text
        assert "4711" not in text


@pytest.mark.parametrize(
    ("table", "name", "good"),
    [
        ("env", "API_KEY", True),
        ("env", "_a1", True),
        ("env", "1A", False),
        ("env", "A-B", False),
        ("env", "", False),
        ("env_files", "A", True),
        ("env_files", "Ä", False),
        ("env_files", "A\n", False),
        ("header_files", "X-Api-Key", True),
        ("header_files", "x!#$%&'*+.^_`|~9", True),
        ("header_files", "A(B", False),
        ("header_files", "", False),
        ("header_files", "A\r\nB", False),
    ],
)
def test_names_of_variables_and_headers_are_of_their_form(table: str, name: str, good: bool) -> None:
    values = {"tools": {"mcp": {"m": {"url": "http://h", table: {name: "/f"}}}}}
    if good:
        parse_config(values, source="test")
        return
    with pytest.raises(ConfigError, match=rf"^test: \[tools\] mcp\.m\.{table}\..*, allowed: the name of an ") as caught:
        parse_config(values, source="test")
    assert "\n" not in caught.value.message
    assert name.split()[:1] == [] or name.split(maxsplit=1)[0] in caught.value.message


def patterns_in(schema: Any) -> Iterator[str]:
    """Yield the patterns that a JSON Schema holds, those of names included."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == "pattern":
            yield value
        elif isinstance(value, dict | list):
            yield from value if key == "patternProperties" else ()
            yield from patterns_in(value)


@pytest.mark.parametrize("table", [Config, Manifest])
def test_every_pattern_has_words(table: type[BaseModel]) -> None:
    found = set(patterns_in(table.model_json_schema()))
    assert found
    assert found <= _PATTERNS.keys()


def test_a_file_that_is_not_there_has_a_hint_that_works(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file") as caught:
        load_config(tmp_path / "none.toml", required=True)
    command = caught.value.hint.removesuffix(" prints one to start from")
    done = CliRunner().invoke(cli, command.split()[1:])
    assert done.exit_code == 0
    assert load_config(write(tmp_path / "loopd.toml", done.output)) == Config()


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
