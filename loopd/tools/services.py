"""What systemd says about services: which have failed, and the state of one (SPEC 6). Only reads.

`systemctl` is asked, for a few seconds at most; it needs no rights for this, and gets through to systemd from inside
the sandbox of loopd's own unit where the device has a system bus.
"""

import shutil
import subprocess
from pathlib import Path

_PATIENCE_S = 5.0
_MAX_NAMED = 10
_ENVIRONMENT = {"LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
_FACTS = (
    "Id",
    "Description",
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "UnitFileState",
    "StateChangeTimestamp",
)


def failed_services(root: Path) -> str:
    """Return which units have failed, in a line; "" on a device that systemd does not run.

    Args:
        root: where `run` and `usr` are.
    """
    if not _runs(root):
        return ""
    try:
        listed = _systemctl(root, "list-units", "--state=failed", "--plain", "--no-legend", "--full")
    except OSError as error:
        return f"not known: {error}"
    units = [line.split(maxsplit=4) for line in listed.splitlines() if line.strip()]
    named = [f"{unit[0]} ({unit[4]})" if len(unit) > 4 else unit[0] for unit in units]  # noqa: PLR2004 - its columns
    more = f" and {len(named) - _MAX_NAMED} more" if len(named) > _MAX_NAMED else ""
    return f"{len(named)} failed: {', '.join(named[:_MAX_NAMED])}{more}" if named else "none failed"


def service_state(root: Path, name: str) -> str:
    """Return what a unit does, in a line; a name without a suffix is a service's.

    Args:
        root: where `run` and `usr` are.
        name: the unit.
    """
    if not _runs(root):
        return "not known: this device does not run systemd"
    try:
        shown = _systemctl(root, "show", f"--property={','.join(_FACTS)}", "--", name)
    except OSError as error:
        return f"not known: {error}"
    facts = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    if facts.get("LoadState") == "not-found":
        return "there is none of that name"
    state = f"{facts.get('ActiveState', 'unknown')} ({facts.get('SubState', 'unknown')})"
    since = f" since {facts['StateChangeTimestamp']}" if facts.get("StateChangeTimestamp") else ""
    result = f", result {facts['Result']}" if facts.get("Result", "success") != "success" else ""
    boot = f", {facts['UnitFileState']}" if facts.get("UnitFileState") else ""
    return f"{state}{since}{result}{boot}; {facts.get('Description', '')}"


def _runs(root: Path) -> bool:
    return (root / "run/systemd/system").is_dir()


def _systemctl(root: Path, *arguments: str) -> str:
    """Return what `systemctl` prints.

    Raises:
        OSError: it is not there, does not end in time, or does not reach systemd.
    """
    program = shutil.which("systemctl", path=f"{root / 'usr/bin'}:{root / 'bin'}")
    if program is None:
        raise FileNotFoundError("there is no systemctl")
    try:
        done = subprocess.run(  # noqa: S603 - the system's own program; the name of a unit stands behind `--`
            [program, "--no-pager", *arguments],
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"systemd did not answer within {_PATIENCE_S:g} s") from error
    if done.returncode:
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise OSError(f"systemd does not answer ({words[0] if words else done.returncode})")
    return done.stdout.decode("utf-8", "replace")
