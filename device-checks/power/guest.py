"""Process 1 of the machine whose power is cut: the release under check, and a way in from outside.

There is no systemd and nothing else that writes, so that no flush of somebody else's makes durable what loopd forgot
to. `model=` in the kernel's command line is the URL of the model server; without it the real one is started here.
"""

import os
import socket
import subprocess
from pathlib import Path

from power import relay

HERE = Path("/opt/loopd-power")
INIT = HERE / "init"
INIT_TEXT = f"#!/bin/sh\nPYTHONPATH={HERE} exec python3 -m power.guest\n"
PORT = 7000
CONFIG = """
[model]
url = "@MODEL@"
{gguf}
context_tokens = 2048
temperature = 0.0
idle_timeout_s = 600.0
[loop]
max_completion_tokens = 24
turn_timeout_s = 3600.0
"""
_LOOPD = "/opt/loopd/current/bin/loopd"
_CONFIG = Path("/run/loopd/loopd.toml")
_CHANNEL = "/run/loopd/channel.sock"
_MODEL = "/run/loopd/model.sock"


def main() -> None:
    """Set up the network, start everything, and reap for ever: the machine never ends by itself."""
    for command in (
        ("ip", "link", "set", "lo", "up"),
        ("ip", "address", "add", "10.0.2.15/24", "dev", "eth0"),
        ("ip", "link", "set", "eth0", "up"),
    ):
        subprocess.run(command, check=True)
    options = dict(word.partition("=")[::2] for word in Path("/proc/cmdline").read_text().split())
    _CONFIG.parent.mkdir()
    _CONFIG.write_text((HERE / "loopd.toml").read_text().replace("@MODEL@", options.get("model", f"unix:{_MODEL}")))
    environment = os.environ | {"LOOPD_HOME": "/var/lib/loopd", "LOOPD_CONFIG": str(_CONFIG)}
    if "model" not in options:
        subprocess.Popen([_LOOPD, "model", "serve"], env=environment)
    subprocess.Popen([_LOOPD, "serve"], env=environment)
    if os.fork() == 0:
        _relay()
    while True:
        pid, status = os.wait()
        print(f"guest: process {pid} ended with {os.waitstatus_to_exitcode(status)}", flush=True)


def _relay() -> None:
    def connect() -> socket.socket:
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(_CHANNEL)
        return channel

    relay.serve(socket.create_server(("", PORT)), connect)


if __name__ == "__main__":
    main()
