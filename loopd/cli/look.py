"""The `bxctl` commands that look and change nothing: sessions, show, usage, why, tools, status, doctor."""

import os
import platform
import shutil
import sys
from typing import Any

import click

from loopd import __version__
from loopd.cli.context import Context
from loopd.cli.daemon import ask, epoch_option, json_option, print_json, session_argument, socket_path
from loopd.cli.render import number, plain, print_facts, print_record, print_table, short, size
from loopd.errors import DaemonUnreachable, LoopdError
from loopd.proto import frames
from loopd.proto.ids import check_session_id


@click.command()
@json_option
@click.pass_obj
def sessions(ctx: Context, *, as_json: bool) -> None:
    """List the sessions, the last used first; a refused one with its reason."""
    data = ask(ctx, frames.List())
    if as_json:
        print_json(data)
        return
    if not data["sessions"]:
        click.echo("there is no session yet; bxctl chat begins one", err=True)
        return
    print_table(
        ("ID", "CHANGED", "SIZE", "STATE", "TITLE"),
        [
            (
                row["session"],
                row["modified"][:16].replace("T", " "),
                size(row["size_bytes"]),
                _state(row),
                f"refused: {row['refused']}" if row["refused"] else row["title"],
            )
            for row in data["sessions"]
        ],
        right=("SIZE",),
    )


def _state(row: dict[str, Any]) -> str:
    if row["refused"]:
        return "refused"
    if row.get("asking"):
        return "asks"
    return "running" if row["running"] else "open" if row["open"] else ""


@click.command()
@session_argument
@epoch_option
@json_option
@click.pass_obj
def show(ctx: Context, session_id: str, epoch: int | None, *, as_json: bool) -> None:
    """Print a session's records, epoch after epoch; of a refused one what is good, then why it is refused."""
    records: list[dict[str, Any]] = []

    def take(frame: frames.RecordFrame) -> None:
        if as_json:
            records.append({"epoch": frame.epoch, "line": frame.line, **frame.record})
        else:
            print_record(frame.line, frame.record)

    refused: LoopdError | None = None
    try:
        ask(ctx, frames.Read(session=check_session_id(session_id), epoch="all" if epoch is None else epoch), take)
    except LoopdError as error:
        if not records:
            raise
        refused = error
    if as_json:
        print_json({"session": session_id, "records": records, "refused": str(refused) if refused else None})
    if refused:
        raise refused


@click.command()
@session_argument
@json_option
@click.pass_obj
def usage(ctx: Context, session_id: str, *, as_json: bool) -> None:
    """Print the tokens of each request: what was cached, what was evaluated, what was lost."""
    data = ask(ctx, frames.UsageOf(session=check_session_id(session_id)))
    if as_json:
        print_json(data)
        return
    columns = ("EPOCH", "LINE", "PROMPT", "CACHED", "EVALUATED", "FLOOR", "LOSS", "COMPLETION", "CAUSE")
    keys = ("epoch", "line", "prompt_tokens", "cached_tokens", "evaluated", "floor", "loss", "completion_tokens")
    print_table(
        columns,
        [(*(number(row[key]) for key in keys), _cause(row)) for row in data["requests"]],
        right=columns[:-1],
    )
    total = data["total"]
    ratio = "-" if total["ratio"] is None else f"{total['ratio']:.3f}"
    click.echo(
        f"evaluated {total['evaluated']:,} · floor {total['floor']:,} · ratio {ratio} · loss {total['loss']:,}"
        f" · max loss {total['max_loss']:,} · left out {total['left_out']}"
    )


def _cause(row: dict[str, Any]) -> str:
    if row["cause"]:
        return str(row["cause"]["name"])
    return "" if row["counted"] else "(not in the totals)"


@click.command()
@session_argument
@json_option
@click.pass_obj
def why(ctx: Context, session_id: str, *, as_json: bool) -> None:
    """Explain, for each request, what was found in the cache and why it was less than expected."""
    data = ask(ctx, frames.Why(session=check_session_id(session_id)))
    if as_json:
        print_json(data)
        return
    for request in data["requests"]:
        click.echo(f"line {request['line']}: {request['text']}")
        if request["evidence"]:
            click.echo(f"  found: {plain(request['evidence'])}")
        if request["advice"]:
            click.echo(f"  to do: {request['advice']}")


@click.command()
@json_option
@click.pass_obj
def tools(ctx: Context, *, as_json: bool) -> None:
    """List the tools that the model can find, by port."""
    ports = ask(ctx, frames.Tools())
    if as_json:
        print_json({"ports": ports})
        return
    print_table(
        ("PORT", "STATE", "TOOL", "EFFECT", "DESCRIPTION"),
        [
            (port["port"], port["state"], tool["name"], tool["effect"], short(tool["description"]))
            for port in ports
            for tool in port["tools"] or [{"name": "-", "effect": "-", "description": "no tools"}]
        ],
    )


@click.command()
@json_option
@click.pass_obj
def status(ctx: Context, *, as_json: bool) -> None:
    """Describe the daemon: release, sessions, refused ones, disk, model, slots."""
    data = ask(ctx, frames.Status())
    if as_json:
        print_json(data)
    else:
        print_facts(data)


@click.command()
@json_option
@click.pass_obj
def doctor(ctx: Context, *, as_json: bool) -> None:
    """Print one page for a bug report: versions, machine, paths, the daemon's status. It holds no texts."""
    page: dict[str, Any] = {
        "bxctl": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": _distribution(),
        "cores": os.cpu_count(),
        "uid": os.getuid(),
        "terminal": sys.stdout.isatty(),
        "home": str(ctx.home.path),
        "config": f"{ctx.config_path}{'' if ctx.config_path.exists() else ' (not there: defaults)'}",
        "socket": str(socket_path(ctx)),
        "installed": shutil.which("loopd"),
    }
    unreachable: LoopdError | None = None
    try:
        page["daemon"] = ask(ctx, frames.Status())
    except DaemonUnreachable as error:
        page["daemon"] = None
        unreachable = error
    if as_json:
        print_json(page)
    else:
        print_facts(page)
    if unreachable:
        raise unreachable


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "unknown"
