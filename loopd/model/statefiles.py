"""The files of saved states under `<home>/slots/`: descriptions, the ledger of what was written (SPEC 4.4).

All of it is a cache that may be deleted at any time. The server writes `NAME.bin`; `NAME.json` beside it describes
it and is written last, by rename. A file that a power cut may have torn must never be restored - the server would
take it, and answer from garbage - so until it is synced its description is good for this boot only.
"""

import contextlib
import os
import tempfile
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loopd.model.states import Fit, Left, State

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Useless(BaseModel):
    """Why states of a model are not restored."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    fit: Fit
    restore: str = ""
    roll_back: str = ""


class Ledger(BaseModel):
    """What loopd must know after a restart: how the slots were left, and what was written today."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    serial: int = 0
    day: str = ""
    day_bytes: int = 0
    slots: dict[int, Left] = Field(default_factory=dict)
    useless: Useless | None = None


class StateFiles:
    """One directory of states. Everything here blocks.

    Attributes:
        states: by name, as the descriptions say.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.boot = _boot_id()
        self.states: dict[str, State] = {}

    def load(self) -> Ledger:
        """Read what is there, and remove what is of no use: half of a pair, another size, unsynced before a boot."""
        self.states = {}
        with contextlib.suppress(OSError):
            for path in self.directory.glob("*.json"):
                if path != self._ledger and (state := self._described(path)) is not None:
                    self.states[state.name] = state
            for path in self.directory.iterdir():
                if path != self._ledger and path.stem not in self.states and path.suffix in {".json", ".bin", ".new"}:
                    path.unlink(missing_ok=True)
        with contextlib.suppress(OSError, ValidationError):
            return Ledger.model_validate_json(self._ledger.read_bytes(), strict=True)
        return Ledger(serial=max((state.serial for state in self.states.values()), default=0))

    def file_name(self, name: str) -> str:
        """Return the name that the server is given."""
        return f"{name}.bin"

    def prepare(self, name: str) -> None:
        """Make the directory, and see that no description speaks of a file that is about to be written."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._description(name).unlink(missing_ok=True)
        self.states.pop(name, None)

    def size_bytes(self, name: str) -> int | None:
        """Return the size of the state's file; None if it is not there."""
        try:
            return self._file(name).stat().st_size
        except OSError:
            return None

    def add(self, state: State) -> None:
        """Describe a file that the server has written.

        Raises:
            OSError: the disk does not take it.
        """
        self._write(self._description(state.name), state.model_dump_json(indent=1).encode())
        self.states[state.name] = state

    def sync(self, name: str) -> None:
        """Make a state outlive a power cut; one that cannot be synced is removed.

        Raises:
            OSError: the disk does not take it.
        """
        state = self.states.get(name)
        if state is None or not state.boot:
            return
        try:
            descriptor = os.open(self._file(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            self.remove(name)
            raise
        if self.states.get(name) is state:
            self.add(state.model_copy(update={"boot": ""}))

    def become_baseline(self, state: State) -> State:
        """Make a session's state the one that new sessions start from; return it under its new name.

        Raises:
            OSError: the disk does not take it; the state is gone then.
        """
        name = State.named("baseline", state.mark, state.tokens)
        self.states.pop(state.name, None)
        self._description(state.name).unlink(missing_ok=True)
        self._file(state.name).replace(self._file(name))
        kept = state.model_copy(update={"name": name, "kind": "baseline"})
        self.add(kept)
        return kept

    def remove(self, name: str) -> None:
        """Remove a state, its description first; one that is gone is no error."""
        self.states.pop(name, None)
        with contextlib.suppress(OSError):
            self._description(name).unlink(missing_ok=True)
            self._file(name).unlink(missing_ok=True)

    def keep(self, ledger: Ledger) -> None:
        """Write the ledger; it need not survive a power cut.

        Raises:
            OSError: the disk does not take it.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._write(self._ledger, ledger.model_dump_json().encode())

    @property
    def _ledger(self) -> Path:
        return self.directory / "ledger.json"

    def _file(self, name: str) -> Path:
        return self.directory / self.file_name(name)

    def _description(self, name: str) -> Path:
        return self.directory / f"{name}.json"

    def _described(self, path: Path) -> State | None:
        try:
            state = State.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None
        whole = state.name == path.stem and self.size_bytes(state.name) == state.size_bytes
        return state if whole and state.boot in {"", self.boot} else None

    def _write(self, path: Path, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".new", delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return "unknown"
