"""`bxctl export`: the conversation as the model gets it, or for people to read."""

from typing import Any

import click

from loopd.cli.context import Context
from loopd.cli.daemon import ask, epoch_option, json_option, session_argument
from loopd.proto.canonical import canonical
from loopd.proto.frames import Read, RecordFrame
from loopd.proto.ids import check_session_id
from loopd.proto.records import Assistant, Record, SessionStart, ToolResult, User, record_from
from loopd.session.baseline import Baseline
from loopd.session.replay import replay


@click.command()
@session_argument
@epoch_option
@json_option
@click.pass_obj
def export(ctx: Context, session_id: str, epoch: int | None, *, as_json: bool) -> None:
    """Print a session as Markdown; with --json as the OpenAI messages and tools of its next request.

    With --epoch the same of one epoch: of an earlier one, with --json, the messages that it ended with.
    """
    records: list[Record] = []

    def take(frame: RecordFrame) -> None:
        records.append(record_from(frame.record))

    wanted = epoch if epoch is not None else "newest" if as_json else "all"
    data = ask(ctx, Read(session=check_session_id(session_id), epoch=wanted), take)
    baseline = Baseline.model_validate(data["baseline"], strict=False)
    click.echo(request_json(baseline, records) if as_json else markdown(session_id, records))


def request_json(baseline: Baseline, records: list[Record]) -> str:
    """Return messages, tools and template options exactly as a request carries them, e.g. for `/apply-template`.

    The messages are spliced in as bytes: the order of keys inside a call's arguments is the model's.
    """
    messages = b",".join(replay(baseline, records))
    options: dict[str, Any] = baseline.template.options
    kwargs = b',"chat_template_kwargs":' + canonical(options) if options else b""
    return (b'{"messages":[' + messages + b'],"tools":' + baseline.tools_json + kwargs + b"}").decode()


def markdown(session_id: str, records: list[Record]) -> str:
    """Return the conversation as Markdown."""
    parts = [f"# Session {session_id}"]
    for record in records:
        match record:
            case SessionStart() if record.summary:
                parts += [f"## Summary (epoch {record.epoch} begins)", record.summary.text]
            case User():
                parts += ["## User", record.text]
            case Assistant():
                parts += ["## Assistant"] if record.text or record.tool_calls else []
                parts += [record.text] if record.text else []
                parts += [_block(f"{call.name} {call.arguments}") for call in record.tool_calls]
            case ToolResult():
                parts += [f"### Result of {record.name}{'' if record.ok else ' (failed)'}", _block(record.content)]
            case _:
                pass
    return "\n\n".join(parts)


def _block(text: str) -> str:
    """Return text as a code block whose fence is longer than any in it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}\n{text}\n{fence}"
