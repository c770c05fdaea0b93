"""`loopd model check` on five chat templates in the manner of the common ones, each served by the real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loopd.cli.loopd import main
from loopd.model.identity import FIXED_DATE
from tests.servers import start_model_server

TEMPLATES = Path(__file__).parent / "templates"
NO_REASONING = "the template never shows reasoning to the model"
GOOD = {
    "arguments": "string",
    "system": "message",
    "user_after_tool": True,
    "tools": True,
    "reasoning_kept": False,
    "grows": True,
}


def white_space(tokens: int) -> str:
    return f"white space: message 2, an answer, tokenises otherwise when it comes back ({tokens} tokens)"


@pytest.fixture
def served(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Iterator[tuple[str, str]]:
    template = TEMPLATES / f"{request.param}.jinja"
    with start_model_server(tmp_path / "m.sock", gguf=tiny_model, template=str(template)) as url:
        yield url, template.read_text()


def check(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    config = tmp_path / "loopd.toml"
    config.write_text(f'[model]\nurl = "{url}"\n')
    arguments = ["loopd", "--home", str(tmp_path / "home"), "--config", str(config), "model", "check", "--json"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in {0, None}
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("served", "forms", "options", "notes"),
    [
        ("chatml", GOOD, {}, [NO_REASONING, white_space(1)]),
        (
            "drops-reasoning",
            GOOD | {"grows": False},
            {},
            ["reasoning: message 2 is rewritten by a later request", white_space(1)],
        ),
        (
            "dated",
            GOOD,
            {"date_string": FIXED_DATE},
            [
                f"the template asks for the time, and is given a fixed date: {FIXED_DATE}",
                NO_REASONING,
                white_space(4),
            ],
        ),
        (
            "alternating",
            # The server itself makes an object of the arguments where a template wants one.
            GOOD | {"user_after_tool": False},
            {},
            [NO_REASONING, "user after a result: refused", "user after user: refused", white_space(1)],
        ),
        # The server itself puts the system prompt before the first user text where a template refuses the role.
        ("no-system", GOOD, {}, [NO_REASONING, white_space(4)]),
    ],
    indirect=["served"],
)
def test_a_template_is_described_as_it_is(
    served: tuple[str, str],
    forms: dict[str, Any],
    options: dict[str, str],
    notes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, _ = served
    found = check(url, tmp_path, monkeypatch, capsys)
    assert found["template"]["options"] == options
    said = found["forms"].pop("notes")
    assert found["forms"] == forms
    assert len(said) == len(notes), said
    for note, expected in zip(said, notes, strict=True):
        assert note.startswith(expected)
    assert found["batch_ms"] > 0
