"""`loopd backup FILE` and `loopd restore FILE` (SPEC 9)."""

import os
from pathlib import Path

import click

from loopd.cli.context import Context
from loopd.session import backup as backups
from loopd.session.store import sweep


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def backup(ctx: Context, file: Path) -> None:
    """Write every session to FILE, which must not exist; the daemon may go on serving."""
    # Opened before we become the home's owner, who may not write where root wants the file.
    with open(file, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as target:
        ctx.home.become_owner()
        contents = backups.backup(ctx.home, target)
    _say("saved", contents)


@click.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.pass_obj
def restore(ctx: Context, file: Path) -> None:
    """Put the sessions of FILE into the home. The daemon must be stopped; sessions that are there already stay."""
    with file.open("rb") as source:
        ctx.home.become_owner()
        ctx.home.make()
        lock = ctx.home.lock()
        try:
            sweep(ctx.home)
            contents = backups.restore(ctx.home, source)
        finally:
            os.close(lock)
    _say("restored", contents)


def _say(what: str, contents: backups.Contents) -> None:
    click.echo(f"{what}: {len(contents.sessions)} sessions")
    for session_id in contents.refused:
        click.echo(f"note: {session_id} is refused as it is; loopd session verify {session_id}", err=True)
