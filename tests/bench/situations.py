"""What each situation between two turns costs in tokens: on loopd, and for a client that only appends messages.

Both have a model server of their own with the same flags; the other client lets it choose the slots.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from loopd.config import DEFAULT_SYSTEM_PROMPT
from tests.bench.harness import Row, at_most
from tests.integration.appliance import ServerNumbers
from tests.model.tiny_gguf import make_tiny_gguf
from tests.servers import model_file
from tests.situations import (
    SITUATIONS,
    Outcome,
    alternating,
    cold_start,
    inlined,
    on_loopd,
    on_plain,
    registry_of,
    server_restarted,
)

_COLUMNS = (
    "situation",
    "client",
    "evaluated",
    "floor",
    "ratio",
    "max loss",
    "saved MB",
    "save s",
    "restored MB",
    "restore s",
    "s/turn",
)
_BESIDE = "appends, server chooses"


def run() -> list[Row]:
    table = Table(title="situations between turns")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in {"situation", "client"} else "right")
    rows: list[Row] = []
    with TemporaryDirectory() as directory:
        tiny = Path(directory) / "tiny.gguf"
        make_tiny_gguf(model_file(), tiny, answer=("It", "Ġworks", "."))
        for name, (slots, play) in SITUATIONS.items():
            with TemporaryDirectory() as root, on_loopd(Path(root), tiny, slots=slots) as ours:
                play(ours)
                found = ours.outcome()
            with TemporaryDirectory() as root, on_plain(Path(root), tiny, slots=slots) as plain:
                play(plain)
                beside = plain.outcome()
            rows += _rows(table, name, found, beside)
    rows += _with_the_small_model(table)
    rows += _cold_start(table)
    screen = Console()
    (screen if screen.is_terminal else Console(width=150)).print(table)
    return rows


def _with_the_small_model(table: Table) -> list[Row]:
    with TemporaryDirectory() as root, on_loopd(Path(root), model_file()) as ours:
        alternating(ours, sessions=2, rounds=6)
        found = ours.outcome()
    with TemporaryDirectory() as root, on_plain(Path(root), model_file()) as plain:
        alternating(plain, sessions=2, rounds=6)
        beside = plain.outcome()
    rows = _rows(table, "small model, 2 sessions on 1 slot", found, beside)
    with TemporaryDirectory() as root, on_loopd(Path(root), model_file()) as ours:
        server_restarted(ours, planned=False)
        killed = ours.outcome()
    _show(table, "small model, server killed", "loopd", killed)
    causes = ", ".join(sorted(set(killed.causes)))
    rows.append(
        Row(
            "small model, server killed 3 times: largest single loss",
            killed.max_loss,
            "tokens",
            reference=f"each loss has its cause: {causes}; evaluated over floor {killed.ratio:.2f}",
        )
    )
    return rows


def _cold_start(table: Table) -> list[Row]:
    """The first request of a new session after a planned reboot, its baseline seen before."""
    with TemporaryDirectory() as root, on_loopd(Path(root), model_file()) as ours:
        cold_start(ours)
        evaluated, own_text = ours.first_evaluated("b"), ours.behind_the_baseline("b")
        cold = ours.first_evaluated("a")
        ten, thousand, few, many = _first_requests(ours.model.url)
    return [
        at_most(
            "new session on a cold server: evaluated",
            evaluated,
            "tokens",
            own_text + 5,
            reference=f"{own_text} tokens behind the baseline; without a saved state: {cold}",
        ),
        at_most(
            "first request with 1,000 tools over 10",
            thousand / ten,
            "ratio",
            1.0,
            reference=f"{thousand} tokens; each tool inlined: 10 {few:,}, 1,000 {many:,}",
        ),
    ]


def _first_requests(url: str) -> tuple[int, int, int, int]:
    """Return the tokens of a first request with 10 and 1,000 tools: behind loopd's two, and inlined."""
    server = ServerNumbers(url)
    asked = [{"role": "system", "content": DEFAULT_SYSTEM_PROMPT}, {"role": "user", "content": "Hello."}]
    ten, thousand = registry_of(10), registry_of(1000)
    lists = [[*ten.definitions], [*thousand.definitions], inlined(ten), inlined(thousand)]
    try:
        a, b, c, d = (server.prompt_tokens(asked, tools) for tools in lists)
    finally:
        server.close()
    return a, b, c, d


def _rows(table: Table, name: str, found: Outcome, beside: Outcome) -> list[Row]:
    _show(table, name, "loopd", found)
    _show(table, "", _BESIDE, beside)
    table.add_section()
    seconds = f"{found.turn_s:.2f} s a turn, beside it {beside.turn_s:.2f}"
    reference = f"{_BESIDE}: {beside.ratio:.2f} ({beside.evaluated} of {beside.floor}); {seconds}"
    return [
        at_most(f"{name}: evaluated over floor", found.ratio, "ratio", 1.01, reference=reference),
        at_most(f"{name}: largest single loss", found.max_loss, "tokens", 3, reference=f"{beside.max_loss}"),
    ]


def _show(table: Table, name: str, client: str, found: Outcome) -> None:
    numbers = (found.evaluated, found.floor)
    states = (found.saved_bytes / 1e6, found.save_s, found.restored_bytes / 1e6, found.restore_s)
    table.add_row(
        name,
        client,
        *(f"{number:,}" for number in numbers),
        f"{found.ratio:.2f}",
        f"{found.max_loss:,}",
        *(f"{number:.2f}" for number in states),
        f"{found.turn_s:.3f}",
    )
