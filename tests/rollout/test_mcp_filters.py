"""From the variable `base_mcp` to the tables `[tools.mcp.NAME]`."""

from loopd.config import parse_config
from tests.rollout.scripts import loaded

filters = loaded("plugins/filter/mcp.py").FilterModule().filters()
SERVERS = {
    "time": {"packages": ["mcp-server-time"], "command": ["mcp-server-time", "--local-timezone=UTC"]},
    "notes": {"packages": ["notes"], "command": ["/usr/bin/env", "notes"], "effects": {"read_*": "read"}},
    "house": {"url": "http://192.0.2.7/mcp"},
}
BUNDLES = [
    {"item": {"key": "time"}, "sha256": "0123456789abcdef"},
    {"item": {"key": "notes"}, "sha256": "fedcba9876543210"},
]


def test_a_program_of_an_installed_server_is_one_of_its_own_environment() -> None:
    tables = filters["mcp_tables"](SERVERS, filters["mcp_folders"](BUNDLES, "/opt/loopd/mcp"))
    program = "/opt/loopd/mcp/time/0123456789ab/bin/mcp-server-time"
    assert tables["time"] == {"command": [program, "--local-timezone=UTC"]}
    assert tables["notes"] == {"command": ["/usr/bin/env", "notes"], "effects": {"read_*": "read"}}
    assert tables["house"] == SERVERS["house"]


def test_loopd_takes_the_tables() -> None:
    tables = filters["mcp_tables"](SERVERS, filters["mcp_folders"](BUNDLES, "/opt/loopd/mcp"))
    assert parse_config({"tools": {"mcp": tables}}, source="test").tools.mcp.keys() == SERVERS.keys()
