"""The `bxctl` commands that change something: fork, compact, delete, cancel."""

import sys

import click

from loopd.cli.context import Context
from loopd.cli.daemon import ask, json_option, print_json, session_argument
from loopd.errors import UsageError
from loopd.proto import frames
from loopd.proto.ids import check_session_id


@click.command()
@session_argument
@click.option("--to", metavar="ID", help="Id of the fork; a fresh one where not given.")
@click.option("--upto", metavar="LINE", type=click.IntRange(min=1), help="The last line to take; all where not given.")
@click.option("--new-baseline", is_flag=True, help="Go on with today's model, template, system prompt and tools.")
@json_option
@click.pass_obj
def fork(ctx: Context, session_id: str, to: str | None, *, upto: int | None, new_baseline: bool, as_json: bool) -> None:
    """Make a new session from the first lines of this one."""
    target = check_session_id(to) if to is not None else None
    frame = frames.Fork(session=check_session_id(session_id), to=target, upto=upto, new_baseline=new_baseline)
    data = ask(ctx, frame)
    if as_json:
        print_json(data)
    else:
        click.echo(data["session"])


@click.command()
@session_argument
@json_option
@click.pass_obj
def compact(ctx: Context, session_id: str, *, as_json: bool) -> None:
    """Close the epoch and go on from a summary."""
    data = ask(ctx, frames.Compact(session=check_session_id(session_id)))
    if as_json:
        print_json(data)


@click.command()
@session_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def delete(ctx: Context, session_id: str, *, yes: bool, as_json: bool) -> None:
    """Remove a session for good. Only its owner and root may."""
    check_session_id(session_id)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError(f"deleting {session_id} needs a yes, and there is no terminal to ask", hint="give --yes")
        click.confirm(f"Remove session {session_id} for good?", abort=True, err=True)
    data = ask(ctx, frames.Delete(session=session_id))
    if as_json:
        print_json(data)
    else:
        click.echo(f"{session_id} was removed")


@click.command()
@session_argument
@json_option
@click.pass_obj
def cancel(ctx: Context, session_id: str, *, as_json: bool) -> None:
    """Cancel the turn in flight. Nothing of the request in flight is recorded."""
    data = ask(ctx, frames.Cancel(session=check_session_id(session_id)))
    if as_json:
        print_json(data)
    else:
        click.echo("cancelled" if data["cancelled"] else f"{session_id} has no turn in flight")
