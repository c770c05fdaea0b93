"""`bxctl approve`: a second terminal's way to see and answer what a session asks (SPEC 6, 9)."""

import click

from loopd.cli.context import Context
from loopd.cli.daemon import ask, json_option, print_json, session_argument
from loopd.errors import UsageError
from loopd.proto import frames
from loopd.proto.ids import check_session_id


@click.command()
@session_argument
@click.argument("call", type=click.IntRange(min=1), required=False)
@click.argument("decision", type=click.Choice(["once", "session", "deny"]), required=False)
@json_option
@click.pass_obj
def approve(ctx: Context, session_id: str, call: int | None, decision: frames.Choice | None, *, as_json: bool) -> None:
    """Show what the session asks, or answer: allow CALL once or for the session, or deny it.

    The first answer counts. For the session means: this tool, until the daemon closes the session.
    """
    check_session_id(session_id)
    if call is None:
        _show(ctx, session_id, as_json=as_json)
        return
    if decision is None:
        raise UsageError(f"what about call {call}?", hint=f"bxctl approve {session_id} {call} once|session|deny")
    data = ask(ctx, frames.Approve(session=session_id, call=call, decision=decision), can_approve=True)
    if as_json:
        print_json(data)
    else:
        from loopd.cli.questions import DECIDED

        click.echo(f"call {call}: {DECIDED[decision]}")


def _show(ctx: Context, session_id: str, *, as_json: bool) -> None:
    """Print what waits for an answer; attaching tells it, and the reply to `close` comes behind it."""
    waiting: list[frames.ApprovalRequest] = []

    def take(frame: frames.ServerFrame) -> None:
        if isinstance(frame, frames.ApprovalRequest):
            waiting.append(frame)

    ask(ctx, frames.Close(session=session_id), opening=session_id, can_approve=True, on_other=take)
    if as_json:
        print_json(
            {"session": session_id, "requests": [frame.model_dump(exclude={"ref", "type"}) for frame in waiting]}
        )
        return
    if not waiting:
        click.echo(f"{session_id} asks nothing", err=True)
    from loopd.cli.questions import described

    for frame in waiting:
        click.echo(f"call {frame.call}, {frame.seconds:.0f} s left:")
        for line in described(frame):
            click.echo(line)
