"""testinfra's paramiko backend, with the host key that is known or none at all, and no command run twice."""

import os
from functools import partial
from pathlib import Path
from select import select
from typing import Any

import paramiko
from testinfra.backend import base
from testinfra.backend.paramiko import ParamikoBackend


class PinnedBackend(ParamikoBackend):
    """Logs in only where the host's key is in the known_hosts files that ssh_config names (or ssh's usual two).

    testinfra itself logs in with any key, and runs a command a second time after a dropped connection. paramiko itself
    does not see the end of a ProxyCommand, and waits until it has lost patience.
    """

    def _load_ssh_config(
        self,
        client: paramiko.SSHClient,
        cfg: dict[str, Any],
        ssh_config: paramiko.SSHConfig,
        ssh_config_dir: str = "~/.ssh",
    ) -> None:
        super()._load_ssh_config(client, cfg, ssh_config, ssh_config_dir)
        entry = ssh_config.lookup(self.host.name)
        files = [
            *entry.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split(),
            *entry.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts").split(),
        ]
        for name in files:
            path = Path(name.strip('"')).expanduser()
            if path.is_file():
                client.load_host_keys(str(path))
        client.set_missing_host_key_policy(paramiko.RejectPolicy())
        if "sock" in cfg:
            cfg["sock"].recv = partial(_receive, cfg["sock"])

    def run(self, command: str, *args: str, **kwargs: Any) -> base.CommandResult:  # noqa: ANN401, ARG002 - as above
        """Run once; a dropped connection is an error, never a second run.

        Raises:
            OSError, SSHException: the connection dropped; whether the command ran is not known.
        """
        line = self.encode(self.get_command(command, *args))
        status, stdout, stderr = self._exec_command(line)
        return self.result(status, line, stdout, stderr)

    def drop(self) -> None:
        """Forget the connection; the next command makes a new one."""
        client = self.__dict__.pop("client", None)
        if client is not None:
            client.close()


def _receive(proxy: paramiko.ProxyCommand, size: int) -> bytes:
    """Return what a ProxyCommand has sent, nothing once it has ended, as a socket does.

    Raises:
        TimeoutError: it sent nothing in its time.
    """
    output = proxy.process.stdout
    if not select([output], [], [], proxy.timeout)[0]:
        raise TimeoutError
    return os.read(output.fileno(), size)
