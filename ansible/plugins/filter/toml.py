"""The filter `to_toml`: a mapping as TOML text."""

from collections.abc import Callable, Mapping
from typing import Any

import tomli_w


class FilterModule:
    """Registers the filter."""

    def filters(self) -> dict[str, Callable[[Mapping[str, Any]], str]]:
        """Return the filters by name."""
        return {"to_toml": _to_toml}


def _to_toml(value: Mapping[str, Any]) -> str:
    return tomli_w.dumps(_plain(value))


def _plain(value: Any) -> Any:  # noqa: ANN401 - any TOML value
    """Return plain types: Ansible marks its strings, and TOML has no null (it means: the default)."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, str) else value
