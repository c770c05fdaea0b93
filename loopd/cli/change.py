"""The `bxctl` commands that change something: fork, compact, delete, cancel."""

import sys
from typing import Any

import click
from rich.console import Console

from loopd.cli.context import Context
from loopd.cli.daemon import ask, json_option, print_json, session_argument
from loopd.cli.render import number, plain
from loopd.cli.view import TurnView
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
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def compact(ctx: Context, session_id: str, *, yes: bool, as_json: bool) -> None:
    """Have the model write a summary, and go on from it in a new epoch. Only the owner and root may.

    What it costs is shown first. The old epoch stays as it is: show and export read it.
    """
    check_session_id(session_id)
    cost = ask(ctx, frames.Compact(session=session_id, estimate=True), opening=session_id)
    for line in _cost_lines(cost):
        click.echo(line, err=True)
    if not yes:
        _confirm(f"compacting {session_id}", f"Compact session {session_id}?")
    view = TurnView(Console(stderr=True, highlight=False))
    view.others = False

    def show(frame: frames.ServerFrame) -> None:
        if isinstance(frame, frames.Queued | frames.Compacting | frames.Prefill):
            view.show(frame)

    try:
        data = ask(ctx, frames.Compact(session=session_id), opening=session_id, on_other=show)
    finally:
        view.rest()
    if as_json:
        print_json({**data, "estimate": cost})
        return
    click.echo(plain(data["summary"]))
    cut = " (it was cut: max_summary_tokens in [loop])" if data["cut"] else ""
    click.echo(f"{session_id} goes on in epoch {data['epoch']}, after {data['seconds']:.1f} s{cut}", err=True)


def _cost_lines(cost: dict[str, Any]) -> list[str]:
    """Return the estimate in words."""
    time = f", about {cost['seconds']:,.0f} s" if cost["seconds"] is not None else ""
    prompt, evaluated, most = (number(cost[f"{name}_tokens"]) for name in ("prompt", "evaluated", "summary"))
    lines = [
        f"the summary: {evaluated} of {prompt} prompt tokens to evaluate, at most {most} to write{time}",
        f"the next message then evaluates at most {number(cost['next_prompt_tokens'])} tokens once, besides its own",
    ]
    if left_out := cost["left_out_messages"]:
        lines.append(
            f"the last {left_out} messages do not fit into the model's context: the summary will not have them"
        )
    return lines


def _confirm(what: str, question: str) -> None:
    """Ask a person.

    Raises:
        UsageError: there is no terminal.
        click.Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"{what} needs a yes, and there is no terminal to ask", hint="give --yes")
    click.confirm(question, abort=True, err=True)


@click.command()
@session_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@click.pass_obj
def delete(ctx: Context, session_id: str, *, yes: bool, as_json: bool) -> None:
    """Remove a session for good. Only its owner and root may."""
    check_session_id(session_id)
    if not yes:
        _confirm(f"deleting {session_id}", f"Remove session {session_id} for good?")
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
