"""Where a session stands, as the keeper of slots needs it."""

from collections.abc import Iterator

from loopd.model.states import Ancestor, History, Mark
from loopd.proto.records import Parent, Usage
from loopd.session.store import Session


def history_of(session: Session) -> History:
    """Return the line of history that the session's next request extends. Reads a record or two of a fork.

    Raises:
        SessionIoError: the log cannot be read.
    """
    before, start = session.last_usage, session.start
    parent = start.parent if start.parent and start.parent.id != session.id else None
    inherited = _usage_before(session, parent.line) if parent else None
    fresh = parent is not None and before is not None and before == inherited
    return History(
        mark=Mark(session=session.id, epoch=session.epoch, line=session.lines, baseline=start.baseline),
        expected=left_by(before),
        slot=before.slot if before else start.slot,
        parent=_ancestor(parent, left_by(inherited)) if parent else None,
        kin=parent.id if parent and fresh else "",
        rebased=_rebased(parent) if parent and fresh else "",
    )


def left_by(usage: Usage | None) -> int:
    """Return how many tokens a request left in its slot (SPEC 4.3); 0 where it is not known."""
    if usage is None or usage.prompt_tokens is None or usage.completion_tokens is None:
        return 0
    return usage.prompt_tokens + usage.completion_tokens - 1


def _ancestor(parent: Parent, tokens: int) -> Ancestor:
    return Ancestor(session=parent.id, epoch=parent.epoch, line=parent.line, tokens=tokens)


def _rebased(parent: Parent) -> str:
    if parent.baseline is None:
        return ""
    return f"it was forked from {parent.id}:{parent.line} with another baseline, under which nothing was evaluated yet"


def _usage_before(session: Session, line: int) -> Usage | None:
    """Return the last usage with numbers up to a line."""

    def backwards() -> Iterator[Usage]:
        for number in range(line, 1, -1):
            for _, record in session.records(number, number + 1):
                if isinstance(record, Usage) and left_by(record):
                    yield record

    return next(backwards(), None)
