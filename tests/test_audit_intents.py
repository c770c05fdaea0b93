"""Which calls may have had an effect, as the audit log tells after a crash (SPEC 2.2/9, 7)."""

from pathlib import Path
from typing import Any

import pytest

from loopd.audit import AuditLog, may_have_begun


def began(directory: Path, *calls: int) -> set[int]:
    return set(may_have_begun(directory, "s", calls))


def write(directory: Path, *records: tuple[str, dict[str, Any]]) -> Path:
    """Write a file of its own, as one run of the daemon does."""
    log = AuditLog.open(directory)
    for event, facts in records:
        log.append(event, **facts)
    log.close()
    return max(directory.iterdir(), key=lambda path: int(path.stem))


CREATED = ("session_created", {"session": "s"})


def intent(call: int, session: str = "s") -> tuple[str, dict[str, Any]]:
    return "tool_call", {"session": session, "call": call}


def test_only_a_call_with_an_intent_has_begun(tmp_path: Path) -> None:
    write(tmp_path, CREATED, intent(1), ("tool_end", {"session": "s", "call": 1}), ("approval", intent(2)[1]))
    write(tmp_path, intent(3), intent(4, session="other"))
    assert began(tmp_path, 1, 2, 3, 4) == {1, 3}
    assert began(tmp_path) == set()


@pytest.mark.parametrize(
    "beginning",
    [CREATED, ("session_forked", {"session": "parent", "to": "s"})],
    ids=["created", "forked"],
)
def test_that_a_call_has_not_begun_is_sure_only_where_the_sessions_beginning_is_in_the_log(
    tmp_path: Path, beginning: tuple[str, dict[str, Any]]
) -> None:
    write(tmp_path, intent(1), ("session_forked", {"session": "s", "to": "child"}))
    assert began(tmp_path, 1, 2) == {1, 2}
    write(tmp_path, beginning)
    assert began(tmp_path, 1, 2) == {1}


def test_a_torn_end_is_no_intent_and_a_damaged_file_leaves_nothing_sure(tmp_path: Path) -> None:
    path = write(tmp_path, CREATED, intent(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert began(tmp_path, 1) == set()
    path.write_bytes(whole.replace(b'"tool_call"', b"tool_call"))
    assert began(tmp_path, 1, 2) == {1, 2}


def test_an_audit_log_that_is_gone_leaves_nothing_sure(tmp_path: Path) -> None:
    assert began(tmp_path / "nowhere", 1) == {1}
