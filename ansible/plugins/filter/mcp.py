"""The filters `mcp_folders` and `mcp_tables`: the servers of `base_mcp` on the device and in loopd.toml."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any


class FilterModule:
    """Registers the filters."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"mcp_folders": _folders, "mcp_tables": _tables}


def _folders(bundles: Iterable[Mapping[str, Any]], root: str) -> dict[str, str]:
    """Return the environment of each server that was bundled, named by the bundle's content.

    Args:
        bundles: results of `loopd_bundle` in a loop over the items of `base_mcp`.
        root: the folder of all of them.
    """
    return {bundle["item"]["key"]: f"{root}/{bundle['item']['key']}/{bundle['sha256'][:12]}" for bundle in bundles}


def _tables(servers: Mapping[str, Mapping[str, Any]], folders: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the tables `[tools.mcp.NAME]`.

    Args:
        servers: their keys, and `packages` where the rollout installs the server.
        folders: what `mcp_folders` returned; a program that is named without its folder is one of there.
    """
    tables = {}
    for name, server in servers.items():
        table = {key: value for key, value in server.items() if key != "packages"}
        command = list(table.get("command", ()))
        if name in folders and command and "/" not in command[0]:
            table["command"] = [f"{folders[name]}/bin/{command[0]}", *command[1:]]
        tables[name] = table
    return tables
