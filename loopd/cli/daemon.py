"""How `bxctl` reaches the daemon: the socket's path, one request, and data on the screen."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from loopd.channel.client import ChannelClient
from loopd.cli.context import Context
from loopd.errors import ConfigError, DaemonUnreachable
from loopd.home import default_channel
from loopd.proto.frames import ClientFrame, Open, RecordFrame, ServerFrame

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
epoch_option = click.option(
    "--epoch", metavar="N", type=click.IntRange(min=0), help="Of this epoch only; 0 is the first."
)
session_argument = click.argument("session_id", metavar="ID")


def socket_path(ctx: Context) -> Path:
    """Return the channel's path: the variable, else the configuration's, else the default.

    People may connect to a device's daemon without being allowed to read its configuration. A file that is refused
    must not keep them from a daemon that goes on with the one it had: that is a warning.

    Raises:
        ConfigError: a file that is asked for is not there.
    """
    if "LOOPD_SOCKET" in os.environ or (ctx.config_path.exists() and not os.access(ctx.config_path, os.R_OK)):
        return default_channel(ctx.home.path)
    try:
        return ctx.config.channel_socket(ctx.home.path)
    except ConfigError as error:
        if not ctx.config_path.exists():
            raise
        if not ctx.config_fault:
            click.echo(f"warning: {error.message}; the default socket is used", err=True)
        ctx.config_fault = error.message
        return default_channel(ctx.home.path)


@contextmanager
def reaching(ctx: Context) -> Iterator[None]:
    """Name the configuration's fault where no daemon is found at the socket that was used in its stead."""
    try:
        yield
    except DaemonUnreachable as error:
        if not ctx.config_fault:
            raise
        hint = f"the configuration is refused ({ctx.config_fault}): mend it, or name the socket with LOOPD_SOCKET"
        raise DaemonUnreachable(error.message, hint=hint) from error


def ask(
    ctx: Context,
    frame: ClientFrame,
    on_record: Callable[[RecordFrame], None] = lambda _frame: None,
    *,
    opening: str | None = None,
    can_approve: bool = False,
    on_other: Callable[[ServerFrame], None] = lambda _frame: None,
) -> Any:  # noqa: ANN401 - any JSON value
    """Connect, send one request and return what its reply holds.

    Args:
        ctx: of the command.
        frame: the request.
        on_record: takes the records before the reply.
        opening: a session that must be open on the connection for it.
        can_approve: approval requests are shown to a person.
        on_other: takes all other frames before the reply.

    Raises:
        LoopdError: the daemon is not there, or it refused.
    """

    async def once() -> Any:  # noqa: ANN401 - any JSON value
        client, _ = await ChannelClient.connect(socket_path(ctx), can_approve=can_approve)
        try:
            if opening is not None:
                await client.send(Open(session=opening, start=0))
            return await client.ask(frame, on_record, on_other)
        finally:
            await client.close()

    with reaching(ctx):
        return asyncio.run(once())


def print_json(data: Any) -> None:  # noqa: ANN401 - any JSON value
    """Print a value as one line of JSON."""
    click.echo(json.dumps(data, ensure_ascii=False))
