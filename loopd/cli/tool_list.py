"""`bxctl tools`: the ports, how they are, and the tools that a model can find."""

from collections.abc import Sequence
from typing import Any

import click
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from loopd.cli.context import Context
from loopd.cli.daemon import ask, json_option, print_json
from loopd.cli.render import console, number, short
from loopd.proto import frames
from loopd.proto.ids import check_session_id

_FEW = 40
_LEAST = 10
_GAP = 2
_NUMBERS = frozenset({"TOOLS", "CALLS", "FAILED"})
_STYLES = {"down": "red", "ask": "yellow", "deny": "red"}


@click.command()
@click.argument("words", nargs=-1)
@click.option("--all", "all_tools", is_flag=True, help=f"List the tools also where there are more than {_FEW}.")
@click.option("--port", metavar="NAME", help="Of this port only.")
@click.option("--session", metavar="ID", help="With what the policy decides in this session.")
@json_option
@click.pass_obj
def tools(
    ctx: Context, words: tuple[str, ...], *, all_tools: bool, port: str | None, session: str | None, as_json: bool
) -> None:
    """List the ports and their tools; with WORDS, the tools that the model finds for them, the best first.

    Calls are counted since the daemon started. POLICY is what [tools.policy] says about a call: allow, ask or deny.
    """
    session = check_session_id(session) if session else ""
    ports = ask(ctx, frames.Tools(query=" ".join(words), session=session))
    if port is not None:
        ports = [one for one in ports if one["port"] == port]
        if not ports:
            raise click.UsageError(f"there is no port named {port!r}")
    if as_json:
        print_json({"ports": ports})
        return
    listed = [(one, tool) for one in ports for tool in one["tools"]]
    if words:
        _print_found(listed)
        return
    _print_ports(ports)
    if len(listed) <= _FEW or all_tools or port is not None:
        click.echo()
        _print_tools(listed)
    else:
        click.echo(f"\n{len(listed):,} tools: add --all or --port NAME to list them, or words to see what is found.")


def _print_found(listed: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    if listed:
        _print_tools(sorted(listed, key=lambda pair: int(pair[1]["rank"])))
    else:
        click.echo("nothing is found; find_tool wants verb, object and service", err=True)


def _print_ports(ports: list[dict[str, Any]]) -> None:
    rows = []
    for port in ports:
        calls, failed = (sum(tool[key] for tool in port["tools"]) for key in ("calls", "failed"))
        note = port["reason"] or _last_failure(port["tools"])
        rows.append(
            (port["port"], port["state"], number(len(port["tools"])), number(calls), number(failed), short(note))
        )
    _print(("PORT", "STATE", "TOOLS", "CALLS", "FAILED", "NOTE"), rows)


def _last_failure(tools: list[dict[str, Any]]) -> str:
    """Return which tool failed last, when and how."""
    failed = [tool for tool in tools if tool["failed_at"]]
    if not failed:
        return ""
    last = max(failed, key=lambda tool: str(tool["failed_at"]))
    return f"{last['name']} {last['failed_at'][:16].replace('T', ' ')}: {last['last_failure']}"


def _print_tools(listed: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    rows = [
        (
            short(f"{port['port']}.{tool['name']}"),
            tool["effect"],
            tool["decision"],
            number(tool["calls"]),
            number(tool["failed"]),
            short(f"{'' if port['state'] == 'up' else '(unavailable now) '}{tool['description']}"),
        )
        for port, tool in listed
    ]
    _print(("TOOL", "EFFECT", "POLICY", "CALLS", "FAILED", "DESCRIPTION"), rows)


def _print(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns; on a terminal the first is cut at half a line, and the last one where the line ends."""
    screen = console()
    widths = [max(cell_len(row[n]) for row in (columns, *rows)) for n in range(len(columns))]
    widths[0] = min(widths[0], screen.width // 2)
    widths[-1] = max(_LEAST, screen.width - sum(widths[:-1]) - _GAP * len(columns))
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, _GAP, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in _NUMBERS else "left", no_wrap=True)
    for row in rows:
        cells = [Text(cell, _STYLES.get(cell, "")) for cell in row]
        for cell, width in zip(cells, widths, strict=True):
            cell.truncate(width, overflow="ellipsis")
        table.add_row(*cells)
    screen.print(table)
