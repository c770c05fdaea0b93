"""Assemble a bundle on the controller, showing what is fetched while it is fetched."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.utils.display import Display

from ansible.plugins.action import ActionBase

_SCRIPT = Path(__file__).resolve().parents[2] / "bundle.py"
_display = Display()


class ActionModule(ActionBase):
    """`loopd_bundle: {kind, …}` returns `name`, `tar` and `sha256`; it changes nothing.

    `kind` is a word of bundle.py, the others are its options; a list is an option given several times.
    """

    _supports_check_mode = True
    _VALID_ARGS = frozenset(("kind", "python", "arch", "glibc", "name", "package", "folder"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run bundle.py with the task's arguments.

        Raises:
            AnsibleActionFail: it failed; with its own line.
        """
        result: dict[str, Any] = super().run(tmp, task_vars)
        options = dict(self._task.args)
        given = [options.pop("kind")]
        for name, value in options.items():
            given += [f"--{name}={part}" for part in (value if isinstance(value, list) else [value])]
        last = ""
        with subprocess.Popen(
            [sys.executable, str(_SCRIPT), *given],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                last = line.strip()
                if last.startswith("bundle: "):
                    _display.display(f"  {last}")
        if process.returncode:
            raise AnsibleActionFail(last.removeprefix("error: "))
        return result | json.loads(last) | {"changed": False}
