"""`loopd tools`: the runner of tool processes as a service of its own, and the check of executables (SPEC 6, 9)."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loopd.cli.context import Context

if TYPE_CHECKING:
    import socket


@click.group()
def tools() -> None:
    """Run the processes of tools; check executables."""


@tools.command()
@click.option(
    "--socket",
    "path",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Unix socket to listen on; without it, the one that systemd hands over.",
)
@click.option(
    "--allow-uid",
    "allowed",
    metavar="NAME|UID",
    multiple=True,
    help="A user whose loopd is served, instead of the own; may be given again.",
)
def serve(path: Path | None, allowed: tuple[str, ...]) -> None:
    """Run the processes of tools until SIGTERM: [tools] runner = "unix:PATH" makes loopd use it.

    They get nothing of loopd's and may do what this command may: its user, its sandbox. The working directory is
    their home.
    """
    import os

    from systemd_watchdog.systemd_watchdog import WatchDog

    from loopd.tools import runner

    uids = {_uid(name) for name in allowed} or {os.geteuid()}
    with _listening(path.absolute(), to_others=uids != {os.geteuid()}) if path else _handed_over() as listener:
        runner.serve(listener, uids, on_ready=WatchDog().ready)


@contextmanager
def _listening(path: Path, *, to_others: bool) -> Iterator["socket.socket"]:
    """Listen at the path; its file goes at the end."""
    from loopd.channel.socketfile import bind, unlink
    from loopd.errors import ConfigError, LoopdError

    hint = "give another path: --socket PATH"
    if not path.parent.is_dir():
        raise ConfigError(f"cannot listen on {path}: there is no directory {path.parent}", hint=f"make it, or {hint}")
    try:
        listener = bind(path, group="")
    except LoopdError as error:
        raise type(error)(error.message, hint=hint) from error
    with listener:
        inode = path.stat().st_ino
        if to_others:
            path.chmod(0o666)  # whoever connects is asked for the user, and anybody else is refused
        click.echo(f"listening on unix:{path}")
        try:
            yield listener
        finally:
            unlink(path, inode)


def _handed_over() -> "socket.socket":
    """Return the one socket that systemd listens on for this unit (sd_listen_fds(3)); its rights are the unit's."""
    import os
    import socket

    if (os.environ.get("LISTEN_PID"), os.environ.get("LISTEN_FDS")) != (str(os.getpid()), "1"):
        raise click.UsageError("give a socket: --socket PATH (systemd has handed over none)")
    return socket.socket(fileno=3)


def _uid(name: str) -> int:
    import pwd

    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid
    except KeyError as error:
        raise click.UsageError(f"there is no user {name!r}") from error


@tools.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.pass_obj
def check(ctx: Context, directory: Path | None) -> None:
    """Check the executables in DIRECTORY, or in [tools] executables, and their manifests."""
    from loopd.errors import ConfigError, ToolError
    from loopd.tools.executables import read

    ctx.home.become_owner()
    directory = directory or Path(ctx.config.tools.executables)
    if directory == Path():
        raise ConfigError("[tools] executables names no directory", hint="loopd tools check DIRECTORY")
    try:
        listing = read(directory.absolute())
    except ToolError as error:
        raise ConfigError(error.message) from error
    for path, tool in listing.programs.values():
        click.echo(f"{path}: ok: {tool.name} ({tool.effect})")
    if not listing.programs and not listing.faults:
        click.echo(f"{directory}: there is no manifest (NAME.toml) in it, so there are no tools", err=True)
    for path in listing.without:
        click.echo(f"note: {path} has no manifest {path.name}.toml beside it, so it is no tool", err=True)
    for fault in listing.faults[:-1]:
        click.echo(f"error: {fault}", err=True)
    if listing.faults:
        raise ConfigError(listing.faults[-1])
