"""Process 1 of the machine whose power is cut: the release under check, and a way in from outside.

There is no systemd and nothing else that syncs, so that no flush of somebody else's makes durable what loopd forgot
to. A neighbour writes all the time, and the kernel passes on at once what is not synced, so that the disk always has
something to forget. `model=` in the kernel's command line is the URL of a scripted model server; without it the real
one is started here. It evaluates about one token a second: with its own template, which sends no tools, its prompts
are short, and so are its answers.
"""

import os
import socket
import subprocess
import threading
import time
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
template = "model"
context_tokens = 2048
temperature = 0.0
idle_timeout_s = 600.0
[loop]
system_prompt = "Answer briefly."
max_completion_tokens = @TOKENS@
turn_timeout_s = 3600.0
"""
_LOOPD = "/opt/loopd/current/bin/loopd"
_CONFIG = Path("/run/loopd/loopd.toml")
_NEIGHBOUR_BYTES = 1024 * 1024
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
    for name in ("dirty_writeback_centisecs", "dirty_expire_centisecs"):
        Path("/proc/sys/vm", name).write_text("10\n")
    _CONFIG.parent.mkdir()
    values = {"@MODEL@": options.get("model", f"unix:{_MODEL}"), "@TOKENS@": "2048" if "model" in options else "24"}
    text = (HERE / "loopd.toml").read_text()
    for name, value in values.items():
        text = text.replace(name, value)
    _CONFIG.write_text(text)
    environment = os.environ | {"LOOPD_HOME": "/var/lib/loopd", "LOOPD_CONFIG": str(_CONFIG)}
    if "model" not in options:
        subprocess.Popen([_LOOPD, "model", "serve"], env=environment)
    subprocess.Popen([_LOOPD, "serve"], env=environment)
    threading.Thread(target=_be_a_neighbour, daemon=True).start()
    threading.Thread(target=_relay, daemon=True).start()
    while True:
        pid, status = os.wait()
        print(f"guest: process {pid} ended with {os.waitstatus_to_exitcode(status)}", flush=True)


def _be_a_neighbour() -> None:
    with Path("/var/lib/neighbour").open("wb", buffering=0) as file:
        while True:
            file.write(os.urandom(4096))
            if file.tell() > _NEIGHBOUR_BYTES:
                file.seek(0)
            time.sleep(0.1)


def _relay() -> None:
    def connect() -> socket.socket:
        channel = socket.socket(socket.AF_UNIX)
        channel.connect(_CHANNEL)
        return channel

    relay.serve(socket.create_server(("", PORT)), connect)


if __name__ == "__main__":
    main()
