"""Write down what each published server lists, for the benchmark of find_tool.

    python -m tests.mcp_servers DIRECTORY

A file for each, `NAME.json`: `{"tools": [{"name", "description", "inputSchema"}]}`.
"""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

from tests.mcp_servers import everything_server, filesystem_server, git_server, time_server

_PATIENCE_S = 120.0


async def _listed(client: Client) -> list[dict[str, Any]]:
    async with asyncio.timeout(_PATIENCE_S), client:
        tools = (await client.list_tools()).tools
    return [{"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema} for tool in tools]


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        nowhere = stack.enter_context(Path(os.devnull).open("w", encoding="utf-8"))
        subprocess.run(["git", "init", "--quiet", str(place)], check=True)
        commands = {"time": time_server(), "git": git_server(place), "filesystem": filesystem_server(place)}
        clients = {
            name: Client(stdio_client(StdioServerParameters(command=program, args=arguments), errlog=nowhere))
            for name, (program, *arguments) in commands.items()
        }
        clients["everything"] = Client(stack.enter_context(everything_server()))
        for name, client in clients.items():
            text = json.dumps({"tools": asyncio.run(_listed(client))}, indent=1)
            (directory / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
