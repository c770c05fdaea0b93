"""The fake MCP server over streamable HTTP, answering in plain JSON. Standard library only.

    python -m tests.tools.mcp.fake_web_server CONFIG.json PORT

Beside what `fake_server` takes, the configuration may have:

    token           what the header `Authorization` must be
    status          an HTTP status that everything is answered with
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.tools.mcp.fake_server import answered, config

sessions: set[str] = set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        settings = config()
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if "heard" in settings:
            with Path(settings["heard"]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(request) + "\n")
        session = self.headers["mcp-session-id"]
        wrong = "token" in settings and self.headers["authorization"] != settings["token"]
        if wrong or "status" in settings:
            self.reply(settings.get("status", 401))
        elif request["method"] == "initialize":
            sessions.add(session := uuid4().hex)
            self.reply(200, request, answered(request, settings), session)
        elif session not in sessions:
            self.reply(404)
        elif request["method"] in settings.get("silent", ()):
            self.rfile.read(1)  # which comes when the client has gone
        elif "id" not in request:
            self.reply(202)
        elif (result := answered(request, settings)) is None:
            self.rfile.read(1)
        else:
            self.reply(200, request, result)

    def do_GET(self) -> None:
        self.reply(405)

    def do_DELETE(self) -> None:
        sessions.discard(self.headers["mcp-session-id"])
        print("session ended", flush=True)
        self.reply(200)

    def reply(self, status: int, request: Any = None, result: Any = None, session: str = "") -> None:
        body = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode() if request else b""
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if session:
            self.send_header("mcp-session-id", session)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
server.daemon_threads = True
print(f"listening on http://127.0.0.1:{server.server_address[1]}/mcp", flush=True)
server.serve_forever()
