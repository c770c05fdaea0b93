"""What a run prints and leaves: a table, a JSON file, and one self-contained page with the cache chart."""

import html
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLOURS = {"ok": "green", "FAILED": "red", "not tried": "yellow", "skipped": "yellow"}
_BAR_PX = 800
_STYLE = (
    "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:66em;padding:0 1em}"
    "table{border-collapse:collapse;margin:.5em 0}svg{width:100%}"
    "td,th{padding:.25em .7em;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}"
    ".n{text-align:right}tr.failed td{background:#fdd}tr.skipped td,tr.not td{background:#ffd}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font-size:12px}"
    ".cached{fill:#4a7;color:#4a7}.new{fill:#48c;color:#48c}.lost{fill:#c33;color:#c33}"
)


@dataclass(slots=True)
class Outcome:
    """One check: the claim it makes, whether it held, and what pytest said where it did not."""

    check: str
    claim: str
    result: str
    seconds: float
    why: str = ""

    @property
    def fault(self) -> str:
        """What was found wrong, in a line."""
        said = [line[1:].strip() for line in self.why.splitlines() if line.startswith("E ")] or self.why.splitlines()
        return said[0].removeprefix("AssertionError: ") if said else ""


@dataclass(slots=True)
class Report:
    """Everything a run found out."""

    device: str
    facts: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> str:
        """How many checks had which result."""
        return ", ".join(f"{sum(o.result == result for o in self.outcomes)} {result}" for result in _COLOURS)

    def show(self, console: Console) -> None:
        """Print the table of checks, the token tables and the figures."""
        checks = Table(title=f"checks of {self.device}", title_justify="left")
        for name in ("check", "claim", "result", "time"):
            checks.add_column(name, overflow="fold", justify="right" if name == "time" else "left")
        for outcome in self.outcomes:
            result = Text(outcome.result, style=_COLOURS[outcome.result])
            checks.add_row(Text(outcome.check), Text(outcome.claim), result, f"{outcome.seconds:.1f} s")
        console.print(checks)
        for title, rows in self.tables.items():
            tokens = Table(title=title, title_justify="left")
            for name in rows[0]:
                tokens.add_column(name.replace("_", " "), justify="right")
            for row in rows:
                tokens.add_row(*(str(value) for value in row.values()))
            console.print(tokens)
        for name, value in self.figures.items():
            console.print(f"{name}: {value:g} s")
        for note in self.notes:
            console.print(f"note: {note}")
        console.print(self.counts)
        for outcome in self.outcomes:
            if outcome.result == "FAILED":
                fault = Text(f"FAILED {outcome.check}: {outcome.fault}", style=_COLOURS["FAILED"])
                console.print(fault, soft_wrap=True)

    def write(self, folder: Path) -> None:
        """Write report.json and report.html."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        (folder / "report.html").write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        rows = "".join(
            f'<tr class="{o.result.split()[0].lower()}"><td>{_text(_spaced(o.check))}<td>{_text(o.claim)}<td>{o.result}'
            f'<td class="n">{o.seconds:.1f}' + (f'<tr><td colspan="4"><pre>{_text(o.why)}</pre>' if o.why else "")
            for o in self.outcomes
        )
        facts = "".join(f"<tr><th>{_text(_spaced(name))}<td>{_value(value)}" for name, value in self.facts.items())
        figures = "".join(f"<tr><th>{_text(name)}<td>{value:g} s" for name, value in self.figures.items())
        notes = "".join(f"<p>{_text(note)}" for note in self.notes)
        charts = "".join(f"<h2>{_text(title)}</h2>{_drawn(rows)}" for title, rows in self.tables.items())
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>loopd on {_text(self.device)}</title><style>{_STYLE}</style>"
            f"<h1>loopd on {_text(self.device)}</h1><p>{self.counts}{notes}<table>{facts}{figures}</table>{charts}"
            f'<h2>Checks</h2><table><tr><th>check<th>claim<th>result<th class="n">s{rows}</table></html>\n'
        )


def _drawn(rows: list[dict[str, Any]]) -> str:
    """Return a table, with a chart above it where it is one of tokens."""
    return (_chart(rows) if "prompt" in rows[0] else "") + _table(rows)


def _chart(rows: list[dict[str, Any]]) -> str:
    """Return one bar for each request: what was cached, what was new, what was lost."""
    scale = _BAR_PX / max(1, *(row["prompt"] for row in rows))
    bars = []
    for number, row in enumerate(rows):
        y, x = number * 26, 60.0
        for tokens, name in ((row["cached"], "cached"), (row["evaluated"] - row["loss"], "new"), (row["loss"], "lost")):
            width = max(tokens, 0) * scale
            bars.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" class="{name}"/>')
            x += width
        bars.append(f'<text x="0" y="{y + 15}">turn {number + 1}</text>')
        bars.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{row["prompt"]} tokens, loss {row["loss"]}</text>')
    legend = " ".join(f'<span class="{name}">&#9632;</span> {name}' for name in ("cached", "new", "lost"))
    return f'<svg viewBox="0 0 {60 + _BAR_PX + 160} {len(rows) * 26}" font-size="13">{"".join(bars)}</svg><p>{legend}'


def _table(rows: list[dict[str, Any]]) -> str:
    head = "".join(f'<th class="n">{_text(_spaced(name))}' for name in rows[0])
    body = "".join("<tr>" + "".join(f'<td class="n">{_text(str(value))}' for value in row.values()) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def _value(value: Any) -> str:  # noqa: ANN401 - any JSON value
    """Return a fact as it reads: what has parts is folded away."""
    if not isinstance(value, dict):
        return _text(str(value))
    shown = json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True)
    return f"<details><summary>{len(value)} entries</summary><pre>{_text(shown)}</pre></details>"


def _spaced(name: str) -> str:
    """Return a name of code as words, which wrap."""
    return name.removeprefix("test_").replace("_", " ")


def _text(value: str) -> str:
    return html.escape(value)
