"""Copy one large file to a device in pieces, saying after each how far it is, and hand it to Ansible's own copy."""

import tempfile
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display
from ansible.utils.hashing import checksum

from ansible.plugins.action import ActionBase

_PIECE_BYTES = 16 * 1024**2
_display = Display()


class ActionModule(ActionBase):
    """`loopd_copy: {src, dest, owner, group, mode}`, as `ansible.builtin.copy` of a file that is not there yet."""

    _requires_connection = True
    _VALID_ARGS = frozenset(("src", "dest", "owner", "group", "mode"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send the pieces, then let the module of `copy` put the file in its place in one step."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = dict(self._task.args)
        folder = self._make_tmp_path()
        try:
            whole = self._connection._shell.join_path(folder, "whole")
            source = Path(given["src"])
            self._send(source, whole)
            placed = given | {"src": whole, "_original_basename": source.name, "checksum": checksum(str(source))}
            return result | self._execute_module("ansible.legacy.copy", module_args=placed, task_vars=task_vars)
        finally:
            self._remove_tmp_path(folder)

    def _send(self, source: Path, whole: str) -> None:
        size, sent = source.stat().st_size, 0
        with source.open("rb") as file:
            while data := file.read(_PIECE_BYTES):
                with tempfile.NamedTemporaryFile() as piece:
                    piece.write(data)
                    piece.flush()
                    self._transfer_file(piece.name, f"{whole}.piece")
                self._append(whole)
                sent += len(data)
                _display.display(f"  {source.name}: {sent / 1e6:.0f} of {size / 1e6:.0f} MB")

    def _append(self, whole: str) -> None:
        done = self._low_level_execute_command(f"cat {whole}.piece >>{whole} && rm {whole}.piece", sudoable=False)
        if done["rc"]:
            raise AnsibleActionFail(f"the device does not take it: {done['stderr'].strip()}")
