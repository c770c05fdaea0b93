"""An MCP server over stdio with one tool, `where`, that says which user and which unit the server runs in."""

import json
import os
import pwd
import sys
from pathlib import Path
from typing import Any

_TOOL = {"name": "where", "description": "Tell where this server runs.", "inputSchema": {"type": "object"}}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a request."""
    if method == "initialize":
        server = {"name": "check", "version": "1"}
        return {"protocolVersion": parameters["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": server}
    if method == "tools/list":
        return {"tools": [_TOOL | {"annotations": {"readOnlyHint": True}}]}
    if method == "tools/call":
        text = f"{pwd.getpwuid(os.getuid()).pw_name} {Path('/proc/self/cgroup').read_text()}"
        return {"content": [{"type": "text", "text": text}]}
    return {}


for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = answer(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
