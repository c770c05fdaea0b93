"""`loopd session verify / repair / fork` and `loopd audit verify`: on the files, without the daemon (SPEC 9)."""

import os
from typing import Protocol

import click

from loopd import audit as audit_log
from loopd.errors import AuditError, SessionError, SessionRefused, TornLog
from loopd.home import Home
from loopd.proto.ids import new_session_id
from loopd.session import reader
from loopd.session.repair import fork as fork_session
from loopd.session.repair import repair as repair_session


class _Settings(Protocol):
    """What `loopd` gives its commands."""

    home: Home


@click.group()
def session() -> None:
    """Check and repair the files of sessions."""


@session.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.pass_obj
def verify(settings: _Settings, ids: tuple[str, ...]) -> None:
    """Check every line of the sessions, or of all of them. Changes nothing; works on a full disk."""
    home = settings.home
    home.become_owner()
    faults: list[SessionError] = []
    for session_id in ids or [summary.id for summary in reader.summaries(home)]:
        try:
            faults += _verify(home, session_id)
        except SessionError as error:
            faults.append(error)
    faults.sort(key=lambda fault: fault.exit_code)
    for fault in faults[:-1]:
        click.echo(f"error: {fault}\nhint: {fault.hint}", err=True)
    if faults:
        raise faults[-1]


@session.command()
@click.argument("session_id", metavar="ID")
@click.pass_obj
def repair(settings: _Settings, session_id: str) -> None:
    """Keep the whole original under refused/, then cut the log before its bad batch."""
    home = settings.home
    home.become_owner()
    faults = reader.verify(home, session_id).faults
    if not faults:
        click.echo(f"{session_id}: nothing is wrong, nothing was changed")
        return
    log = audit_log.AuditLog.open(home.audit)
    try:
        repaired = repair_session(home, session_id)
        if repaired is None:
            raise SessionError(
                session_id,
                f"no cut repairs this: {faults[-1]}",
                hint="a newer release may read it; bxctl export gives what can be read",
            )
        log.append(
            "session_repaired", session=session_id, why=repaired.fault, kept=str(repaired.kept), lines=repaired.lines
        )
    finally:
        log.close()
    click.echo(f"{session_id}: {repaired.fault}\nthe whole original is kept in {repaired.kept}")
    if repaired.epoch is None:
        click.echo("nothing of the session was good: it is gone from the list")
    else:
        click.echo(f"the session goes on after line {repaired.lines} of epoch {repaired.epoch}")


@session.command()
@click.argument("session_id", metavar="ID")
@click.option("--to", "target", metavar="ID", help="Id of the fork; a fresh one by default.")
@click.option("--upto", metavar="LINE", type=click.IntRange(min=1), help="Last line to copy; it must end a batch.")
@click.pass_obj
def fork(settings: _Settings, session_id: str, target: str | None, upto: int | None) -> None:
    """Make a new session from the first lines of one; that one stays as it is."""
    home, person = settings.home, os.getuid()
    home.become_owner()
    target = target or new_session_id()
    log = audit_log.AuditLog.open(home.audit)
    try:
        lines = fork_session(home, session_id, target, upto=upto, owner_uid=person)
        log.append("session_created", session=target, parent=session_id, line=lines, owner_uid=person)
    finally:
        log.close()
    click.echo(f"{target}: a fork of {session_id} up to line {lines}")


@click.group()
def audit() -> None:
    """Check the audit log."""


@audit.command("verify")
@click.pass_obj
def verify_audit(settings: _Settings) -> None:
    """Check each file of the audit log, and that each line which another file names is there."""
    home = settings.home
    home.become_owner()
    faults: list[str] = []
    files = records = 0
    # What a restore brought tells about another home, so each of these is a chain of its own.
    for directory in [home.audit, *sorted(home.audit.glob("restored-*"))]:
        verdict = audit_log.verify(directory)
        for path in verdict.torn:
            click.echo(
                f"{path}: ends in the middle of a line, as after a power cut; that record was never acknowledged"
            )
        faults += verdict.faults
        files += verdict.files
        records += verdict.records
    for fault in faults[:-1]:
        click.echo(f"error: {fault}", err=True)
    if faults:
        raise AuditError(faults[-1])
    click.echo(f"good: {records} records in {files} files")


def _verify(home: Home, session_id: str) -> tuple[SessionRefused, ...]:
    """Print what is good, return what is not with the ways out as hints."""
    verdict = reader.verify(home, session_id)
    if not verdict.faults:
        end = "; the last turn has no end, the next message ends it" if verdict.open_turn else ""
        click.echo(
            f"{session_id}: good: {verdict.lines} lines, {verdict.size_bytes} bytes, {verdict.epochs} epoch(s){end}"
        )
    for fault in verdict.faults:
        if isinstance(fault, TornLog) and fault.good_lines:
            fault.hint = (
                f"loopd session repair {session_id} keeps the original and cuts the log after line "
                f"{fault.good_lines}; bxctl fork {session_id} --upto {fault.good_lines} goes on in a copy"
            )
        else:
            fault.hint = f"loopd session repair {session_id} keeps the original and removes what cannot be read"
    return verdict.faults
