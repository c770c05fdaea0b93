"""An MCP server over stdio that does what it is told to, wrong things above all. Raw JSON-RPC, standard library only.

    python fake_server.py CONFIG.json

The configuration is read anew at each list, so that a test may change it:

    tools           tools as they stand in the answer; default: one `NAME` for each behaviour below
    needs           a file that must be there, else it says why on stderr and ends
    banner          lines printed on stdout before anything else
    heard           a file to which each message is appended
    silent          methods that are never answered
    answer          for a method, the line that is printed in place of the answer; `$ID` is the request's id
    pages           tools on a page
    endless         every page has a next one; "same" gives the same cursor for ever
    only            "discover": it knows no `initialize`, as servers of the newer era
    stubborn        ignores SIGTERM and the end of its stdin
    deaf            reads nothing more once it has answered its first list
    flood           writes to stdout without a newline and without end, before anything else

The tool `hang` has it read nothing more, `flood` has it write like that.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NOTIFICATION = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
extra: list[dict[str, Any]] = []


def config() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(Path(sys.argv[1]).read_bytes())
    return value


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"text": {"type": "string"}}}
    return {"name": name, "description": f"Fake {name}.", "inputSchema": schema}


def send(message: dict[str, Any] | str) -> None:
    line = message if isinstance(message, str) else json.dumps(message)
    sys.stdout.buffer.write(line.encode("utf-8", "surrogateescape") + b"\n")
    sys.stdout.buffer.flush()


def listed(settings: dict[str, Any], cursor: str) -> dict[str, Any]:
    tools = [*settings.get("tools", [tool(name) for name in BEHAVIOURS if name != "grown"]), *extra]
    size, start = settings.get("pages", len(tools) or 1), int(cursor or 0)
    result: dict[str, Any] = {"tools": tools[start : start + size]}
    if settings.get("endless") == "same":
        result = {"tools": tools, "nextCursor": "0"}
    elif settings.get("endless") or start + size < len(tools):
        result["nextCursor"] = str(start + size)
    return result


def text(value: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}]}


def die(_given: dict[str, Any], _id: int) -> None:
    print("the roof is on fire", file=sys.stderr, flush=True)
    os._exit(3)


def noise(_given: dict[str, Any], request_id: int) -> dict[str, Any]:
    send("<<< \udcff this is no JSON >>>")
    send({"level": "info", "id": request_id, "message": "nor is this a message"})
    return text("after the noise")


def broken(_given: dict[str, Any], request_id: int) -> None:
    send(f'{{"jsonrpc": "2.0", "id": {request_id}, "result": {{"content": [{{"type": "te')


def wrong(_given: dict[str, Any], request_id: int) -> None:
    send({"id": request_id, "result": "what?"})


def grow(_given: dict[str, Any], _id: int) -> dict[str, Any]:
    extra.append(tool("grown"))
    send(NOTIFICATION)
    return text("grown")


def flood(_given: dict[str, Any], _id: int) -> None:
    while True:
        sys.stdout.buffer.write(b"x" * 65_536)


def hang(_given: dict[str, Any], _id: int) -> None:
    while True:
        time.sleep(1000)


def child(_given: dict[str, Any], _id: int) -> dict[str, Any]:
    sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return text(str(sleeper.pid))


BEHAVIOURS: dict[str, Callable[[dict[str, Any], int], dict[str, Any] | None]] = {
    "echo": lambda given, _id: text(f"echo {given.get('text', '')}"),
    "grown": lambda given, _id: text(f"grown {given.get('text', '')}"),
    "fail": lambda _given, _id: text("it cannot be done") | {"isError": True},
    "env": lambda _given, _id: text(json.dumps(dict(os.environ))),
    "image": lambda _given, _id: {"content": [{"type": "image", "data": "aGVsbG8=", "mimeType": "image/png"}]},
    "huge": lambda given, _id: text("x" * int(given["text"])),
    "never": lambda _given, _id: None,
    "hang": hang,
    "flood": flood,
    "die": die,
    "noise": noise,
    "broken": broken,
    "wrong": wrong,
    "grow": grow,
    "child": child,
}


def answered(request: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a request, or None where none is sent."""
    params = request.get("params") or {}
    meta = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"} if settings.get("only") else {}
    match request["method"]:
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {"listChanged": True}},
                "serverInfo": {"name": "fake", "version": "1"},
            }
        case "server/discover":
            return {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}} | meta
        case "tools/list":
            return listed(settings, params.get("cursor") or "") | meta
        case "tools/call":
            behave = BEHAVIOURS.get(params["name"])
            result = behave(params.get("arguments") or {}, request["id"]) if behave else text(params["name"])
            return None if result is None else result | ({"resultType": "complete"} if meta else {})
    return {}


def respond(line: bytes, settings: dict[str, Any]) -> None:
    request = json.loads(line)
    method, request_id = request.get("method"), request.get("id")
    if request_id is None or method is None or method in settings.get("silent", ()):
        return
    if settings.get("only") and method == "initialize":
        send({"jsonrpc": "2.0", "id": request_id, "error": {"code": -32601, "message": "no such method"}})
    elif method in settings.get("answer", {}):
        send(settings["answer"][method].replace("$ID", str(request_id)))
    elif (result := answered(request, settings)) is not None:
        send({"jsonrpc": "2.0", "id": request_id, "result": result})


def serve() -> None:
    settings = config()
    if "needs" in settings and not Path(settings["needs"]).exists():
        print(f"not without {settings['needs']}", file=sys.stderr, flush=True)
        sys.exit(7)
    if settings.get("stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in settings.get("banner", ()):
        send(line)
    if settings.get("flood"):
        flood({}, 0)
    for data in sys.stdin.buffer:
        settings = config()
        if "heard" in settings:
            with Path(settings["heard"]).open("ab") as file:
                file.write(data)
        respond(data, settings)
        while settings.get("deaf") and b"tools/list" in data:
            time.sleep(1000)
    while settings.get("stubborn"):
        time.sleep(1000)


if __name__ == "__main__":
    serve()
