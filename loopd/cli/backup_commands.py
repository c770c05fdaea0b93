"""`loopd backup FILE` and `loopd restore FILE` (SPEC 9)."""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import BinaryIO, cast

import click

from loopd.cli.context import Context
from loopd.session import backup as backups
from loopd.session.files import sync_directory
from loopd.session.store import sweep

_DRAFT_PREFIX = ".loopd-backup-"


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
    """Give a file to write to that has its name only once the block has ended well and its entry is on disk.

    A process that is killed in the block leaves a draft; the next backup into the same folder removes it.
    """
    if os.path.lexists(file):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
    _sweep_drafts(file.parent)
    with _draft(file.parent) as target:
        try:
            yield target
            Path(target.name).rename(file)
        except BaseException:
            Path(target.name).unlink()
            raise
    sync_directory(file.parent)


def _draft(folder: Path) -> BinaryIO:
    """Make a draft and lock it, so that no other backup takes it for one that was left."""
    while True:
        draft = NamedTemporaryFile(dir=folder, prefix=_DRAFT_PREFIX, delete=False)  # noqa: SIM115 - the caller's
        with suppress(OSError):  # where a file system has no locks, nothing is swept either
            fcntl.flock(draft, fcntl.LOCK_EX)
        if os.path.lexists(draft.name):  # not swept between its making and its lock
            return cast("BinaryIO", draft)
        draft.close()


def _sweep_drafts(folder: Path) -> None:
    """Remove what backups that were killed left in `folder`; one that is being made is locked, and stays."""
    for draft in folder.glob(f"{_DRAFT_PREFIX}*"):
        # Somebody else's, or no file at all, may not be opened or may not go: it does not concern us.
        with suppress(OSError):
            descriptor = os.open(draft, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                facts = os.fstat(descriptor)
                if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    draft.unlink()
            finally:
                os.close(descriptor)


def _say(what: str, contents: backups.Contents) -> None:
    click.echo(f"{what}: {len(contents.sessions)} sessions")
    for session_id in contents.refused:
        click.echo(f"note: {session_id} is refused as it is; loopd session verify {session_id}", err=True)
