from pathlib import Path

import pytest

from loopd.errors import ToolError
from loopd.tools.mcp.secrets import hidden, read_secrets


def test_a_secret_is_the_content_of_its_file_without_white_space_around(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("  abc def\n", encoding="utf-8")
    assert read_secrets({"KEY": str(tmp_path / "key")}) == {"KEY": "abc def"}


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"tops3cret\nheader: x", b"tops3cret\0", b"tops3cret\xff", b"x" * 70_000]
)
def test_what_is_no_line_of_text_is_refused_without_showing_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(ToolError, match="the secret KEY in") as caught:
        read_secrets({"KEY": str(tmp_path / "key")})
    assert "tops3cret" not in str(caught.value)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ToolError, match=f"the secret KEY cannot be read from {path}: "):
            read_secrets({"KEY": str(path)})


def test_what_is_shown_holds_no_secret_but_very_short_ones() -> None:
    assert hidden("a tops3cret of tops3cret2", ["tops3cret", "tops3cret2", "a"]) == "a [secret] of [secret]"
    assert hidden("no key is tops3cret", ["Bearer tops3cret"]) == "no key is [secret]"
