"""`loopd backup FILE` and `loopd restore FILE` (SPEC 9)."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO, cast

import click

from loopd.cli.context import Context
from loopd.session import backup as backups
from loopd.session.files import sync_directory
from loopd.session.store import sweep


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.pass_obj
def backup(ctx: Context, file: Path) -> None:
    """Write every session and the audit log to FILE, which must not exist; the daemon may go on serving."""
    # The file is root's where root asks for it: the home's owner may not write there.
    with _appearing(file) as target, ctx.home.as_owner():
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


@contextmanager
def _appearing(file: Path) -> Iterator[BinaryIO]:
    """Give a file to write to that has its name only once the block has ended well and its entry is on disk."""
    if os.path.lexists(file):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
    with NamedTemporaryFile(dir=file.parent, prefix=f".{file.name}.", delete=False) as target:
        try:
            yield cast("BinaryIO", target)
            Path(target.name).rename(file)
        except BaseException:
            Path(target.name).unlink()
            raise
    sync_directory(file.parent)


def _say(what: str, contents: backups.Contents) -> None:
    click.echo(f"{what}: {len(contents.sessions)} sessions")
    for session_id in contents.refused:
        click.echo(f"note: {session_id} is refused as it is; loopd session verify {session_id}", err=True)
