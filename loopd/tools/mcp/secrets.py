"""Values that stand in files: the configuration names only the file, and what is shown never holds the value."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from loopd.errors import ToolError

_MAX_BYTES = 65_536
_MIN_HIDDEN_CHARS = 4
_HIDDEN = "[secret]"


def read_secrets(files: Mapping[str, str]) -> dict[str, str]:
    """Return the content of each file by its key, without white space around it.

    Raises:
        ToolError: a file is missing, unreadable, or holds no single line of text. Names key and file, never content.
    """
    return {key: _read(key, Path(path)) for key, path in files.items()}


def hidden(text: str, values: Iterable[str]) -> str:
    """Return `text` with every value replaced, and every word of one.

    A word of less than four characters stays: it would hide half of any text.
    """
    words = {part for value in values for part in (value, *value.split()) if len(part) >= _MIN_HIDDEN_CHARS}
    for word in sorted(words, key=len, reverse=True):
        text = text.replace(word, _HIDDEN)
    return text


def _read(key: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            value = file.read(_MAX_BYTES + 1).decode("utf-8").strip()
    except OSError as error:
        raise ToolError(f"the secret {key} cannot be read from {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ToolError(f"the secret {key} in {path} is not UTF-8 text") from None
    if not value or len(value) > _MAX_BYTES or not value.isprintable():
        raise ToolError(f"the secret {key} in {path} is not one line of text")
    return value
