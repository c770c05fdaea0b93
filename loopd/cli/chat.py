"""`bxctl chat`: talk, or say the given messages one after another (SPEC 9)."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing

import click

from loopd.channel.codec import encode
from loopd.channel.conversation import Conversation
from loopd.cli.context import Context
from loopd.cli.daemon import ask, reaching, socket_path
from loopd.cli.questions import How, Questions
from loopd.cli.render import console
from loopd.cli.view import AnswerView
from loopd.cli.words import check_answer, interrupts, say_new, show_end
from loopd.errors import UsageError
from loopd.proto.frames import Accepted, CaughtUp, List, Opened, RecordFrame, ServerFrame, TurnEndFrame
from loopd.proto.ids import MAX_KEY_CHARS, check_session_id, new_key


@click.command()
@click.option("--session", metavar="ID", help="The session; made if it does not exist. A new one where not given.")
@click.option("--continue", "go_on", is_flag=True, help="The session that was used last.")
@click.option("--message", "messages", metavar="TEXT", multiple=True, help="Say this; may be given several times.")
@click.option("--key", "keys", metavar="KEY", multiple=True, help="Idempotency key of the message, one for each.")
@click.option(
    "--approve",
    type=click.Choice(["ask", "once", "none"]),
    help="With --message, for tool calls that need approval: ask (at the terminal, elsewhere wait for bxctl approve),"
    " allow each once, or none. [default: ask at a terminal, else none]",
)
@click.option("--json", "as_json", is_flag=True, help="Print every frame of the daemon as a line.")
@click.pass_obj
def chat(
    ctx: Context,
    session: str | None,
    messages: tuple[str, ...],
    keys: tuple[str, ...],
    approve: str | None,
    *,
    go_on: bool,
    as_json: bool,
) -> None:
    """Talk, or say the given messages one after another.

    Ctrl-C cancels the turn, Ctrl-D ends. With --message the exit status is 0 only if every turn ended `completed` or
    `length`; the first other end stops the list.
    """
    turns = _turns(messages, keys)
    if session is not None and go_on:
        raise UsageError("--session and --continue exclude each other")
    if session is not None:
        check_session_id(session)
    if not turns and (as_json or not (sys.stdin.isatty() and sys.stdout.isatty())):
        raise UsageError("a chat needs a terminal", hint="give what to say with --message TEXT")
    if approve and not turns:
        raise UsageError("--approve is for --message: a chat asks at its terminal")
    if go_on:
        session = _last_used(ctx)
    if turns:
        how = _how_to_approve(approve, as_json=as_json)
        conversation = Conversation(socket_path(ctx), session, can_approve=how != "none")
        show = _frame_printer() if as_json else AnswerView(console()).show
        with reaching(ctx):
            done = asyncio.run(_say_all(conversation, turns, show, how, everything=as_json))
        sys.exit(0 if done else 1)
    from loopd.cli.interactive import Interactive

    conversation = Conversation(socket_path(ctx), session, can_approve=True)
    with reaching(ctx):
        asyncio.run(Interactive(conversation).run())


def _how_to_approve(wanted: str | None, *, as_json: bool) -> How:
    """Return how this process answers approval requests."""
    at_terminal = sys.stdin.isatty() and sys.stderr.isatty() and not as_json
    match wanted or ("ask" if at_terminal else "none"):
        case "ask":
            return "key" if at_terminal else "wait"
        case "once":
            return "once"
        case _:
            return "none"


async def _say_all(
    conversation: Conversation,
    turns: list[tuple[str, str]],
    show: Callable[[ServerFrame], None],
    how: How,
    *,
    everything: bool,
) -> bool:
    """Say the texts under their keys, each when the turn before has ended; tell whether all ended well.

    Unless `everything` is wanted, what belongs to another client's turn is not shown.
    """
    try:
        async with aclosing(conversation), aclosing(conversation.frames()) as frames, asyncio.TaskGroup() as tasks:
            questions = Questions(conversation, console(stderr=True, quiet=everything), tasks, how)

            def lost() -> None:
                questions.lost()
                click.echo("note: the connection to the daemon is lost, trying again", err=True)

            conversation.on_lost = lost
            with interrupts(conversation) as questions.on_interrupt:
                await _until_caught_up(frames, show)
                for text, key in turns:
                    await conversation.say(text, key)
                    if not show_end(await _until_end(frames, show, questions, key, everything=everything)):
                        return False
                return True
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None


async def _until_caught_up(frames: AsyncIterator[ServerFrame], show: Callable[[ServerFrame], None]) -> None:
    async for frame in frames:
        show(frame)
        check_answer(frame, None)
        if isinstance(frame, Opened) and frame.created:
            say_new(frame.session)
        if isinstance(frame, CaughtUp):
            return


async def _until_end(
    frames: AsyncIterator[ServerFrame],
    show: Callable[[ServerFrame], None],
    questions: Questions,
    key: str,
    *,
    everything: bool,
) -> TurnEndFrame:
    ours = False
    async for frame in frames:
        ours = ours or _begins(frame, key)
        if ours or everything:
            show(frame)
        if ours:
            await questions.take(frame)
        check_answer(frame, key)
        if isinstance(frame, TurnEndFrame) and frame.key == key:
            return frame
    raise AssertionError("frames end only by an error")


def _begins(frame: ServerFrame, key: str) -> bool:
    """Tell whether the turn of this key begins: it runs, or what is recorded of it comes again."""
    if isinstance(frame, RecordFrame):
        return frame.record.get("key") == key
    return isinstance(frame, Accepted) and frame.key == key


def _turns(messages: tuple[str, ...], keys: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return each text with its key.

    Raises:
        UsageError: an empty text, a key that is none, or not one for each message.
    """
    if keys and len(keys) != len(messages):
        raise UsageError(f"--key is given once for each --message: found {len(keys)} for {len(messages)}")
    for key in keys:
        if not 1 <= len(key) <= MAX_KEY_CHARS:
            raise UsageError(f"a key has 1 to {MAX_KEY_CHARS} characters, found {len(key)}")
    for text in (*messages, *keys):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                "the text is not UTF-8", hint="is the terminal's or the file's encoding another one?"
            ) from error
    if not all(text.strip() for text in messages):
        raise UsageError("--message needs a text", hint="bxctl chat without --message is interactive")
    return list(zip(messages, keys or (new_key() for _ in messages), strict=False))


def _last_used(ctx: Context) -> str | None:
    rows = ask(ctx, List())["sessions"]
    return next((row["session"] for row in rows if not row["refused"]), None)


def _frame_printer() -> Callable[[ServerFrame], None]:
    def show(frame: ServerFrame) -> None:
        click.echo(encode(frame), nl=False)

    return show
