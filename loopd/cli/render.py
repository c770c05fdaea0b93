"""Text for people: tables, records, and the usage line. Nothing a model or a tool wrote can steer the terminal."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loopd.proto.frames import UsageFrame

_WIDE = 10_000
_SHORT_CHARS = 200
_CONTROL = {code: f"\\x{code:02x}" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"} | {
    ord("\r"): "",
    **{code: f"\\u{code:04x}" for code in [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]},
}


def plain(text: str) -> str:
    """Return text with its control and direction-changing characters made visible; newlines and tabs stay."""
    return text.translate(_CONTROL)


def visible(text: str) -> str:
    """Return text with every character escaped that is not seen as itself: controls, marks, odd spaces, newlines.

    For what a person must judge; in an answer the joiners of scripts and emoji are left alone (`plain`).
    """
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def short(text: str) -> str:
    """Return the beginning of a text as one line."""
    line = " ".join(plain(text).split())
    return line if len(line) <= _SHORT_CHARS else line[: _SHORT_CHARS - 1] + "…"


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return the screen; where it is a file or a pipe, lines are as long as they are."""
    screen = Console(highlight=False, markup=False, emoji=False, stderr=stderr, quiet=quiet)
    if not screen.is_terminal:
        screen.width = _WIDE
    return screen


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print aligned columns; those named in `right` hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    console().print(table)


def number(value: int | None) -> str:
    """Return a count with its thousands set apart, or a dash where there is none."""
    return "-" if value is None else f"{value:,}"


def size(size_bytes: int) -> str:
    """Return a size in the unit that people read."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":  # noqa: PLR2004 - the step between binary units
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


@dataclass
class UsageLine:
    """Adds up the requests of a turn for the line behind it."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0
    evaluated: int = 0
    loss: int = 0
    seconds: float = 0.0
    known: bool = True

    def add(self, frame: UsageFrame) -> None:
        """Take the account of one request."""
        self.requests += 1
        self.seconds += frame.seconds or 0.0
        if frame.prompt_tokens is None or frame.cached_tokens is None:
            self.known = False
            return
        self.prompt += frame.prompt_tokens
        self.cached += frame.cached_tokens
        self.evaluated += frame.evaluated or 0
        self.loss += frame.loss or 0

    def __str__(self) -> str:
        parts = [f"{self.requests} requests"] if self.requests > 1 else []
        if self.known:
            parts += [f"{self.prompt:,} prompt", f"{self.cached:,} cached", f"{self.evaluated:,} evaluated"]
            parts += [f"loss {self.loss:,}"]
        else:
            parts += ["the model server reported no tokens"]
        return " · ".join([*parts, f"{self.seconds:.1f} s"])


def print_record(line: int, record: dict[str, Any]) -> None:
    """Print one record for reading: who, and what was said or done."""
    kind, at = record["type"], record["at"][:19].replace("T", " ")
    head, body = _described(record)
    click.secho(f"{line:>5}  {at}  {kind}{' ' + head if head else ''}", dim=True)
    if body:
        click.echo(plain(body).rstrip("\n"))
        click.echo()


def _described(record: dict[str, Any]) -> tuple[str, str]:
    """Return what stands behind the record's type, and its text."""
    head, body = "", ""
    match record["type"]:
        case "session_start":
            parent = record.get("parent")
            head = f"epoch {record['epoch']}" + (f", from {parent['id']}:{parent['line']}" if parent else "")
            body = record["summary"]["text"] if record.get("summary") else ""
        case "user":
            body = record["text"]
        case "assistant":
            calls = [f"→ {call['name']} {call['arguments']}" for call in record["tool_calls"]]
            body = "\n".join([*([record["text"]] if record["text"] else []), *calls])
        case "tool_result":
            approval = f", {plain(record['approval'])}" if record["approval"] else ""
            head = f"{record['call']} {plain(record['name'])}{'' if record['ok'] else ' failed'}{approval}"
            body = record["content"]
        case "usage":
            prompt, cached, loss = (number(record[key]) for key in ("prompt_tokens", "cached_tokens", "loss"))
            head = f"{prompt} prompt, {cached} cached, loss {loss}"
        case "turn_end":
            head = record["reason"]
    return head, body


def print_facts(facts: dict[str, Any], indent: int = 0) -> None:
    """Print nested facts, one a line."""
    pad = "  " * indent
    for key, value in facts.items():
        if isinstance(value, dict) and value:
            click.echo(f"{pad}{key}")
            print_facts(value, indent + 1)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            click.echo(f"{pad}{key}")
            for item in value:
                text = ", ".join(f"{name} {_fact(fact)}" for name, fact in item.items())
                click.echo(f"{pad}  {plain(text)}")
        else:
            name, text = _with_unit(key, value)
            click.echo(f"{pad}{name:<16} {plain(text)}")


def _with_unit(key: str, value: Any) -> tuple[str, str]:  # noqa: ANN401 - any JSON value
    if isinstance(value, int | float) and key.endswith("_bytes"):
        return key.removesuffix("_bytes"), size(int(value))
    if isinstance(value, int | float) and key.endswith("_s"):
        return key.removesuffix("_s"), f"{value} s"
    return key, _fact(value)


def _fact(value: Any) -> str:  # noqa: ANN401 - any JSON value
    match value:
        case None | [] | {}:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value}"
        case str() | float():
            return str(value)
        case _:
            return json.dumps(value, ensure_ascii=False)
