"""What both kinds of chat do and say the same way: Ctrl-C, errors, ends, new sessions."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

from loopd.channel.conversation import Conversation
from loopd.errors import DaemonError, LoopdError
from loopd.proto.frames import ErrorFrame, ServerFrame, TurnEndFrame

_GOOD_ENDS = ("completed", "length")


@contextmanager
def interrupts(conversation: Conversation, on_first: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """Make the first Ctrl-C cancel the turn; the second leaves at once, and the turn goes on without us.

    Yields what a Ctrl-C does, for whoever reads the keys itself.
    """
    loop = asyncio.get_running_loop()
    pressed = False

    def press() -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        on_first()
        conversation.cancel()

    loop.add_signal_handler(signal.SIGINT, press)
    try:
        yield press
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def say_new(session: str) -> None:
    """Tell that a session was made just now."""
    click.echo(f"new session {session}", err=True)


def show_error(error: LoopdError) -> None:
    """Print an error that does not end the chat."""
    click.echo(f"error: {error.message}", err=True)
    if error.hint:
        click.echo(f"hint: {error.hint}", err=True)


def show_end(end: TurnEndFrame) -> bool:
    """Tell whether the turn ended well; say on stderr why not."""
    good = end.reason in _GOOD_ENDS
    if not good or end.message:
        what = end.message or f"the turn ended: {end.reason}"
        click.echo(f"{'note' if good else 'error'}: {what}", err=True)
        if end.hint:
            click.echo(f"hint: {end.hint}", err=True)
    return good


def check_answer(frame: ServerFrame, key: str | None) -> None:
    """Raise what the daemon answered to our `open` or `say`, if it is an error.

    Raises:
        DaemonError: it is.
    """
    if isinstance(frame, ErrorFrame) and frame.ref in {"open", key}:
        raise DaemonError(frame.code, frame.message, hint=frame.hint)
