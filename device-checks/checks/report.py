"""What a run prints and leaves: a table, a JSON file, and one self-contained page with the cache chart."""

import html
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLOURS = {"ok": "green", "FAILED": "red", "skipped": "yellow"}


@dataclass(slots=True)
class Outcome:
    """One check: the claim it makes, and whether it held."""

    check: str
    claim: str
    result: str
    seconds: float
    why: str = ""


@dataclass(slots=True)
class Report:
    """Everything a run found out."""

    device: str
    facts: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

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
        counts = {result: sum(o.result == result for o in self.outcomes) for result in _COLOURS}
        console.print(", ".join(f"{count} {result}" for result, count in counts.items()))

    def write(self, folder: Path) -> None:
        """Write report.json and report.html."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        (folder / "report.html").write_text(self._page(), encoding="utf-8")

    def _page(self) -> str:
        rows = "".join(
            f'<tr class="{o.result.lower()}"><td>{_text(o.check)}<td>{_text(o.claim)}<td>{o.result}'
            f"<td>{o.seconds:.1f}<td><pre>{_text(o.why)}</pre>"
            for o in self.outcomes
        )
        facts = "".join(f"<tr><th>{_text(name)}<td>{_text(str(value))}" for name, value in self.facts.items())
        charts = "".join(f"<h2>{_text(title)}</h2>{_drawn(rows)}" for title, rows in self.tables.items())
        return (
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>loopd on {_text(self.device)}</title>'
            "<style>body{font:15px system-ui;margin:2em auto;max-width:70em}table{border-collapse:collapse}"
            "td,th{padding:.25em .7em;text-align:left;border-bottom:1px solid #ddd;vertical-align:top}"
            "tr.failed td{background:#fdd}pre{white-space:pre-wrap;margin:0;font-size:12px}</style>"
            f"<h1>loopd on {_text(self.device)}</h1><table>{facts}</table>{charts}"
            f"<h2>Checks</h2><table><tr><th>check<th>claim<th>result<th>s<th>{rows}</table></html>\n"
        )


def _drawn(rows: list[dict[str, Any]]) -> str:
    """Return a chart of a table of tokens, and any other table as it is."""
    if "prompt" in rows[0]:
        return _chart(rows)
    head = "".join(f"<th>{_text(name)}" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{_text(str(value))}" for value in row.values()) for row in rows)
    return f"<table><tr>{head}{body}</table>"


def _chart(rows: list[dict[str, Any]]) -> str:
    """Return one bar for each request: what was cached, what was new, what was lost."""
    widest = max((row["prompt"] for row in rows), default=1) or 1
    scale = 800 / widest
    bars = []
    for number, row in enumerate(rows):
        lost = row["loss"]
        parts = ((row["cached"], "#4a7"), (row["evaluated"] - lost, "#48c"), (lost, "#c33"))
        x = 60.0
        for tokens, colour in parts:
            width = max(tokens, 0) * scale
            bars.append(f'<rect x="{x:.1f}" y="{number * 26}" width="{width:.1f}" height="20" fill="{colour}"/>')
            x += width
        bars.append(f'<text x="0" y="{number * 26 + 15}">turn {number + 1}</text>')
        bars.append(f'<text x="{x + 6:.1f}" y="{number * 26 + 15}">{row["prompt"]} tokens, loss {lost}</text>')
    legend = "green: from the cache; blue: new; red: lost"
    return f'<svg width="1060" height="{len(rows) * 26}" font-size="13">{"".join(bars)}</svg><p>{legend}</p>'


def _text(value: str) -> str:
    return html.escape(value)
