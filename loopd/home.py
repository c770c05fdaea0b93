"""Where things are: the home directory and what may be done below it (SPEC 2, 8)."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loopd.errors import HomeError, HomeLocked

DEVICE_HOME = Path("/var/lib/loopd")
DEVICE_CONFIG = Path("/etc/loopd/loopd.toml")
DEVICE_CHANNEL = Path("/run/loopd/channel.sock")
DEVICE_MODEL = Path("/run/loopd-model/model.sock")


@dataclass(frozen=True, slots=True)
class Home:
    """The paths below one home directory. Nothing here touches the disk but the methods that say so."""

    path: Path

    @property
    def sessions(self) -> Path:
        """One directory for each session."""
        return self.path / "sessions"

    @property
    def refused(self) -> Path:
        """Whole originals of repaired sessions."""
        return self.path / "refused"

    @property
    def audit(self) -> Path:
        """The audit log's files."""
        return self.path / "audit"

    @property
    def slots(self) -> Path:
        """Saved slot states: a cache, may be deleted at any time."""
        return self.path / "slots"

    @property
    def tool_lists(self) -> Path:
        """The tools that each MCP server last had: a cache, may be deleted at any time."""
        return self.path / "tool-lists"

    @property
    def models(self) -> Path:
        """Model files that `loopd model fetch` brought."""
        return self.path / "models"

    @property
    def model_check(self) -> Path:
        """What `loopd model check` found out about the model that is served."""
        return self.path / "model-check.json"

    @property
    def tool_vectors(self) -> Path:
        """Vectors of tools for semantic ranking: a cache, may be deleted at any time."""
        return self.path / "tool-vectors.db"

    def make(self) -> None:
        """Create the directories that are missing, readable by their owner only.

        Raises:
            HomeError: the disk or the rights do not allow it.
        """
        try:
            for path in (self.path, self.sessions, self.refused, self.audit, self.slots, self.tool_lists, self.models):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise HomeError(
                f"cannot make the home {self.path}: {error.strerror} ({error.filename})",
                hint="choose another with --home DIR or LOOPD_HOME",
            ) from error

    def free_bytes(self) -> int:
        """Return how many bytes an ordinary user may still write on the home's disk."""
        disk = os.statvfs(self.path)
        return disk.f_bavail * disk.f_frsize

    def lock(self) -> int:
        """Take the home for this process's life and return the descriptor that holds it.

        The lock ends with the process, however it ends; a stopped (SIGSTOP) holder still holds it.

        Raises:
            HomeLocked: another daemon has it.
            HomeError: the lock file cannot be opened.
        """
        path = self.path / "loopd.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HomeError(f"cannot open the lock {path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise HomeLocked(
                f"another loopd (process {holder or 'unknown'}) serves the home {self.path}",
                hint="bxctl status asks it; stop it, or choose another home with --home DIR",
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def become_owner(self) -> None:
        """Run as the home's owner: root switches to it, its owner goes on, anyone else is refused.

        A home that does not exist yet belongs to whoever makes it.

        Raises:
            HomeError: it belongs to somebody else.
        """
        if owner := self._other_owner():
            os.setgroups([owner.st_gid])
            os.setgid(owner.st_gid)
            os.setuid(owner.st_uid)

    @contextmanager
    def as_owner(self) -> Iterator[None]:
        """Run a block as the home's owner, as `become_owner` does; root is root again behind it.

        Raises:
            HomeError: the home belongs to somebody else.
        """
        owner = self._other_owner()
        if owner is None:
            yield
            return
        groups, group = os.getgroups(), os.getegid()
        os.setgroups([owner.st_gid])
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(group)
            os.setgroups(groups)

    def _other_owner(self) -> os.stat_result | None:
        """Return the owner that root must become; None where nothing is to be done."""
        try:
            owner = self.path.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise HomeError(f"cannot look at the home {self.path}: {error.strerror}") from error
        if owner.st_uid == os.geteuid():
            return None
        if os.geteuid() != 0:
            raise HomeError(
                f"the home {self.path} belongs to user {owner.st_uid}, and this is user {os.geteuid()}",
                hint="run it as that user, or with sudo",
            )
        return owner


def default_home() -> Path:
    """Return `LOOPD_HOME`, else the device's home where there is one, else the person's data directory."""
    if given := os.environ.get("LOOPD_HOME"):
        return Path(given)
    if DEVICE_CONFIG.exists():
        return DEVICE_HOME
    return _xdg("XDG_DATA_HOME", ".local/share") / "loopd"


def default_config() -> Path:
    """Return `LOOPD_CONFIG`, else the device's file where there is one, else the person's."""
    if given := os.environ.get("LOOPD_CONFIG"):
        return Path(given)
    if DEVICE_CONFIG.exists():
        return DEVICE_CONFIG
    return _xdg("XDG_CONFIG_HOME", ".config") / "loopd" / "loopd.toml"


def default_channel(home: Path) -> Path:
    """Return `LOOPD_SOCKET`, else the device's channel, else the person's (SPEC 8)."""
    if given := os.environ.get("LOOPD_SOCKET"):
        return Path(given)
    if home == DEVICE_HOME:
        return DEVICE_CHANNEL
    return _runtime(home) / "channel.sock"


def default_model_socket(home: Path) -> Path:
    """Return the socket of the model server beside `home`."""
    return DEVICE_MODEL if home == DEVICE_HOME else _runtime(home) / "model.sock"


def _runtime(home: Path) -> Path:
    given = os.environ.get("XDG_RUNTIME_DIR")
    own = _xdg("XDG_DATA_HOME", ".local/share") / "loopd"
    return Path(given) / "loopd" if given and home == own else home / "run"


def _xdg(variable: str, fallback: str) -> Path:
    given = os.environ.get(variable, "")
    return Path(given) if given.startswith("/") else Path.home() / fallback
