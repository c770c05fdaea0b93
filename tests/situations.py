"""What happens to conversations between their turns, for tests and benchmarks: on loopd, and on a client without it.

Each situation is played by two sides. `LoopdSide` is the real daemon, the real client protocol and the real model
server. `PlainSide` is what most agent programs are: it appends messages, keeps them over its own restarts, makes its
system prompt from its configuration, and leaves the choice of a slot to the server.
"""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import httpx

import loopd
from loopd.config import DEFAULT_SYSTEM_PROMPT, ToolsTable
from loopd.tools.meta import DEFINITIONS
from loopd.tools.registry import Registry
from tests.bench.talk import Talk
from tests.integration.appliance import PATIENCE_S, Appliance, ServerNumbers
from tests.servers import start_model_server
from tests.tools.fake import FakePort, planned, tool

PIRATE = "You are a pirate. Answer in rhymes, and never tell the time."
DAY_S, HOUR_S = 86_400, 3_600

_SITECUSTOMIZE = """
import os
from datetime import UTC, datetime, timedelta
import loopd.clock
_by = timedelta(seconds=float(os.environ["TEST_CLOCK_BY_S"]))
loopd.clock.now = lambda: (datetime.now(UTC) + _by).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
loopd.clock.local_time = lambda zone=None: str(datetime.now(UTC) + _by)
"""

_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}


@dataclass
class Outcome:
    """What a situation cost: tokens of all requests but the first of each session; bytes and seconds of states."""

    evaluated: int = 0
    floor: int = 0
    max_loss: int = 0
    turns: int = 0
    turn_s: float = 0.0
    causes: list[str] = field(default_factory=list)
    saved_bytes: int = 0
    save_s: float = 0.0
    restored_bytes: int = 0
    restore_s: float = 0.0

    @property
    def ratio(self) -> float:
        return self.evaluated / self.floor if self.floor else 1.0


class ModelProcess:
    """The model server, to be stopped and killed."""

    def __init__(self, socket: Path, gguf: Path, home: Path, **table: Any) -> None:
        self._socket, self._gguf, self._home, self._table = socket, gguf, home, table
        self._stack = ExitStack()
        self.url = f"unix:{socket}"

    def start(self) -> None:
        self.pids: list[int] = []
        serving = start_model_server(self._socket, gguf=self._gguf, home=self._home, pids=self.pids, **self._table)
        self._stack.enter_context(serving)

    def serve(self, gguf: Path, **table: Any) -> None:
        """Start with another model, or other keys of `[model]`."""
        self._gguf = gguf
        self._table |= table
        self.start()

    def stop(self) -> None:
        self._stack.close()

    def kill(self) -> None:
        os.kill(self.pids[-1], signal.SIGKILL)
        self._stack.close()


class Side(Protocol):
    """Whoever holds the conversations."""

    model: ModelProcess

    def say(self, session: str, text: str) -> None: ...

    def fork(self, source: str, target: str) -> None: ...

    def restart(self, *, system_prompt: str = "", tools: int = 2, clock_s: float = 0, release: str = "") -> None: ...

    def restart_model(self, *, planned: bool) -> None: ...

    def outcome(self) -> Outcome: ...


class LoopdSide:
    """The appliance with its own model server."""

    def __init__(self, root: Path, gguf: Path, *, slots: int = 1, **model: Any) -> None:
        self._root = root
        self.device = Appliance(root, f"unix:{root / 'm.sock'}")
        self._tables: dict[str, Any] = {
            "model": {"save_idle_s": 1000.0, **model},
            "loop": {"max_completion_tokens": 24},
        }
        self.device.configure(**self._tables)
        self.model = ModelProcess(root / "m.sock", gguf, self.device.home, slots=slots)
        self._talks: dict[str, Talk] = {}
        self._turns: list[float] = []
        self._states: dict[str, float] = {}

    def say(self, session: str, text: str) -> None:
        began = perf_counter()
        if session not in self._talks:
            self._talks[session] = Talk(self.device.socket, session)
        for _ in self._talks[session].say(text):
            pass
        self._turns.append(perf_counter() - began)

    def fork(self, source: str, target: str) -> None:
        made = self.device.json("fork", source)["session"]
        self._talks[target] = Talk(self.device.socket, made)

    def restart(self, *, system_prompt: str = "", tools: int = 2, clock_s: float = 0, release: str = "") -> None:
        self.stop()
        tables = {**self._tables, "tools": {"builtin": ["clock", "device"][:tools]}}
        if system_prompt:
            tables["loop"] = {**tables["loop"], "system_prompt": system_prompt}
        self.device.configure(**tables)
        with self._environment(clock_s, release):
            self.start()

    def restart_model(self, *, planned: bool) -> None:
        if not planned:
            self.model.kill()
            self.model.start()
            return
        self.stop()
        self.model.stop()
        self.model.start()
        self.start()

    def start(self) -> None:
        self.device.start()

    def stop(self) -> None:
        """Stop the daemon as a service manager does."""
        self._count_states()
        self.hang_up()
        assert self.device.stop() == 0

    def hang_up(self) -> None:
        """Close the clients."""
        for talk in self._talks.values():
            talk.close()
        self._talks.clear()

    def wait_saved(self) -> None:
        """Wait until everything that the slots hold is on disk."""
        while any(slot["saved_tokens"] != slot["tokens"] for slot in self.device.json("status")["slots"]):
            pass

    def wait_logged(self, words: str) -> None:
        """Wait until the daemon has logged something."""
        while words not in self.device.log():
            pass

    def sessions(self) -> list[str]:
        return [row["session"] for row in self.device.json("sessions")["sessions"]]

    def first_evaluated(self, session: str) -> int:
        """Return how many tokens of the session's first request were evaluated."""
        return int(self.device.json("usage", session)["requests"][0]["evaluated"])

    def behind_the_baseline(self, session: str) -> int:
        """Return how many tokens of the session's first request come after system prompt and tools."""
        system, asked = self.device.json("export", session)["messages"][:2]
        tools = self.device.baseline(session)["tools"]
        numbers = ServerNumbers(self.model.url)
        try:
            return numbers.prompt_tokens([system, asked], tools) - numbers.prompt_tokens([system], tools, open_=False)
        finally:
            numbers.close()

    def outcome(self) -> Outcome:
        self._count_states()
        found = Outcome(turns=len(self._turns), turn_s=sum(self._turns) / len(self._turns))
        for session in self.sessions():
            table = self.device.json("usage", session)
            found.evaluated += table["total"]["evaluated"]
            found.floor += table["total"]["floor"]
            found.max_loss = max(found.max_loss, table["total"]["max_loss"])
            found.causes += [row["cause"]["name"] for row in table["requests"] if row["cause"]]
        for name in ("saved_bytes", "save_s", "restored_bytes", "restore_s"):
            setattr(found, name, self._states.get(name, 0))
        return found

    def _count_states(self) -> None:
        for name, value in self.device.json("status")["states"].items():
            if name in {"saved_bytes", "save_s", "restored_bytes", "restore_s"}:
                self._states[name] = self._states.get(name, 0) + value

    @contextmanager
    def _environment(self, clock_s: float, release: str) -> Iterator[None]:
        """Give the daemon another clock, and the code of another release."""
        before = dict(self.device.environment)
        paths = []
        if clock_s:
            moved = self._root / "clock"
            moved.mkdir(exist_ok=True)
            (moved / "sitecustomize.py").write_text(_SITECUSTOMIZE)
            self.device.environment["TEST_CLOCK_BY_S"] = str(clock_s)
            paths.append(str(moved))
        if release:
            paths.append(str(_release(self._root / release, release)))
        self.device.environment["PYTHONPATH"] = ":".join([*paths, before["PYTHONPATH"]])
        yield
        self.device.environment = before


class PlainSide:
    """A client that only appends, with a model server of its own."""

    def __init__(self, root: Path, gguf: Path, *, slots: int = 1) -> None:
        self.model = ModelProcess(root / "m.sock", gguf, root / "home", slots=slots)
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(root / "m.sock")), base_url="http://model", timeout=PATIENCE_S
        )
        self._system, self._tools = DEFAULT_SYSTEM_PROMPT, [*DEFINITIONS]
        self._messages: dict[str, list[dict[str, str]]] = {}
        self._left: dict[str, int] = {}
        self._turns: list[float] = []
        self._found = Outcome()

    def say(self, session: str, text: str) -> None:
        began = perf_counter()
        messages = self._messages.setdefault(session, [])
        messages.append({"role": "user", "content": text})
        body = {
            "messages": [{"role": "system", "content": self._system}, *messages],
            "tools": self._tools,
            "max_tokens": 24,
            "temperature": 0,
        }
        answer = self._http.post("/v1/chat/completions", json=body).raise_for_status().json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        self._turns.append(perf_counter() - began)
        usage = answer["usage"]
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        if session in self._left:
            expected = min(self._left[session], prompt - 1)
            self._found.evaluated += prompt - cached
            self._found.floor += prompt - expected
            self._found.max_loss = max(self._found.max_loss, expected - cached)
        self._left[session] = prompt + usage["completion_tokens"] - 1

    def fork(self, source: str, target: str) -> None:
        self._messages[target], self._left[target] = [*self._messages[source]], self._left[source]

    def restart(self, *, system_prompt: str = "", tools: int = 2, clock_s: float = 0, release: str = "") -> None:
        """Take the configuration into use; a program that only appends still makes its system prompt from it."""
        self._system = system_prompt or DEFAULT_SYSTEM_PROMPT

    def restart_model(self, *, planned: bool) -> None:
        self.model.stop()
        self.model.start()

    def start(self) -> None:
        pass

    def outcome(self) -> Outcome:
        self._found.turns, self._found.turn_s = len(self._turns), sum(self._turns) / len(self._turns)
        return self._found

    def close(self) -> None:
        self._http.close()


def _release(place: Path, version: str) -> Path:
    """Make a copy of this release that calls itself another one."""
    if not place.exists():
        package = Path(loopd.__file__).parent
        shutil.copytree(package, place / "loopd", ignore=shutil.ignore_patterns("__pycache__"))
        init = place / "loopd" / "__init__.py"
        init.write_text(init.read_text().replace(loopd.__version__, version))
    return place


@contextmanager
def on_loopd(root: Path, gguf: Path, *, slots: int = 1, **model: Any) -> Iterator[LoopdSide]:
    """Run the appliance for the time of a block."""
    side = LoopdSide(root, gguf, slots=slots, **model)
    side.model.start()
    try:
        side.start()
        yield side
    finally:
        side.hang_up()
        if side.device.daemon is not None:
            side.device.stop(signal.SIGKILL)
        side.model.stop()


@contextmanager
def on_plain(root: Path, gguf: Path, *, slots: int = 1) -> Iterator[PlainSide]:
    """Run the client without loopd for the time of a block."""
    side = PlainSide(root, gguf, slots=slots)
    side.model.start()
    try:
        yield side
    finally:
        side.close()
        side.model.stop()


# --- the situations -------------------------------------------------------------------------------------------


def registry_of(count: int) -> Registry:
    """Return a registry of so many tools."""
    tools = (tool(f"tool_{number}", f"Do thing {number}.", place={"type": "string"}) for number in range(count))
    return Registry(planned(FakePort("many", *tools)), ToolsTable())


def inlined(registry: Registry) -> list[dict[str, Any]]:
    """Return the tools as a client sends them that hides none behind find_tool."""
    return [
        {
            "type": "function",
            "function": {"name": item["name"], "description": item["description"], "parameters": _PARAMETERS},
        }
        for port in registry.describe()
        for item in port["tools"]
    ]


def _text(session: str, number: int) -> str:
    return f"Please tell {session} one short fact about the number {number}, and why it is so."


def restarts(side: Side, *, turns: int = 30, every: int = 5) -> None:
    """One session; the client restarts again and again."""
    for number in range(turns):
        if number and number % every == 0:
            side.restart()
        side.say("a", _text("a", number))


def alternating(side: Side, *, sessions: int, rounds: int) -> None:
    """Sessions take turns."""
    for number in range(rounds):
        for session in "abcdefgh"[:sessions]:
            side.say(session, _text(session, number))


def forked(side: Side, *, rounds: int = 4) -> None:
    """A fork and its parent take turns."""
    for number in range(3):
        side.say("a", _text("a", number))
    side.fork("a", "f")
    for number in range(rounds):
        for session in "fa":
            side.say(session, _text(session, number))


def server_restarted(side: Side, *, planned: bool = True) -> None:
    """Two sessions; the model server is restarted between turns."""
    for number in range(3):
        for session in "ab":
            side.say(session, _text(session, number))
    for number in range(3, 6):
        side.restart_model(planned=planned)
        for session in "ab":
            side.say(session, _text(session, number))


def cold_start(side: Side) -> None:
    """A session, a planned restart of everything, and then another session."""
    side.say("a", "Good morning to you all.")
    side.restart_model(planned=True)
    side.say("b", "How warm is it in the cellar today?")


def changed(side: Side) -> None:
    """Configuration, system prompt, tool set and day change between turns."""
    side.say("a", _text("a", 0))
    for number, change in enumerate(
        (
            {"system_prompt": PIRATE},
            {"tools": 1},
            {"clock_s": DAY_S},
            {"clock_s": 365 * DAY_S},
            {"clock_s": -HOUR_S},
            {"system_prompt": PIRATE, "tools": 0, "clock_s": 2 * DAY_S},
        ),
        start=1,
    ):
        side.restart(**change)  # type: ignore[arg-type]
        side.say("a", _text("a", number))


def upgraded(side: Side) -> None:
    """A new release and back, and again."""
    for number in range(5):
        if number:
            side.restart(release="9.9.9" if number % 2 else "")
        side.say("a", _text("a", number))


SITUATIONS: dict[str, tuple[int, Callable[[Side], None]]] = {
    "30 turns, restarted every 5": (1, restarts),
    "2 sessions on 1 slot": (1, lambda side: alternating(side, sessions=2, rounds=8)),
    "8 sessions on 1 slot": (1, lambda side: alternating(side, sessions=8, rounds=4)),
    "2 sessions on 2 slots": (2, lambda side: alternating(side, sessions=2, rounds=8)),
    "8 sessions on 2 slots": (2, lambda side: alternating(side, sessions=8, rounds=4)),
    "fork and parent on 1 slot": (1, forked),
    "fork and parent on 2 slots": (2, forked),
    "model server restarted": (1, server_restarted),
    "prompt, tools and day changed": (1, changed),
    "upgrade and back": (1, upgraded),
}
"""What must cost nothing: slots of the server, and what happens."""
