import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from loopd.cli.session_commands import audit, session
from loopd.errors import AuditError, LoopdError, SessionError, SessionNotFound, SessionRefused, TornLog, UsageError
from loopd.home import Home
from loopd.session import reader
from loopd.session.store import dir_for
from tests.session.builders import CLOCK, create, log_of, make_home, say, step


@dataclass
class Settings:
    home: Home


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = make_home(tmp_path / "home")
    live = create(home)
    say(live)
    live.close()
    return home


@pytest.fixture
def torn(home: Home) -> Path:
    path = log_of(home)
    path.write_bytes(path.read_bytes()[:-1])
    return path


def run(home: Home, *arguments: str) -> Result:
    group = audit if arguments[0] == "audit" else session
    return CliRunner().invoke(group, arguments[1:], obj=Settings(home))


def fault_of(result: Result) -> LoopdError:
    assert isinstance(result.exception, LoopdError), result.output
    return result.exception


def audited(home: Home) -> list[str]:
    paths = sorted(home.audit.iterdir())
    return [json.loads(line)["event"] for path in paths for line in path.read_bytes().splitlines()]


def test_verify_says_what_is_good(home: Home) -> None:
    result = run(home, "session", "verify", "s1")
    assert result.exit_code == 0
    assert result.output.startswith("s1: good: 5 lines, ")


def test_verify_says_that_a_turn_has_no_end(home: Home) -> None:
    live = create(home, "s2")
    live.append(*step(live, "open", CLOCK))
    live.close()
    assert "no end" in run(home, "session", "verify", "s2").output


def test_verify_without_an_id_checks_all_and_names_each_fault(home: Home, torn: Path) -> None:
    for session_id in ("s2", "s3"):
        create(home, session_id).close()
    (dir_for(home, "s3") / "0.baseline.json").write_bytes(b"{}")
    result = run(home, "session", "verify")
    assert "s2: good" in result.output
    told = result.output + str(fault_of(result))
    assert f"{torn}:5: " in told
    assert "0.baseline.json" in told


def test_verify_of_a_torn_log_tells_where_and_the_ways_out(home: Home, torn: Path) -> None:
    fault = fault_of(run(home, "session", "verify", "s1"))
    assert isinstance(fault, TornLog)
    assert fault.exit_code == 4
    assert str(fault).startswith(f"{torn}:5: ")
    assert "loopd session repair s1" in fault.hint
    assert "fork s1 --upto 4" in fault.hint


def test_verify_goes_on_after_a_session_that_it_cannot_look_at(home: Home, torn: Path) -> None:
    dir_for(home, "a").write_bytes(b"")
    create(home, "z").close()
    dir_for(home, "b").mkdir()
    result = run(home, "session", "verify")
    assert "z: good" in result.output
    assert f"there is no log in {dir_for(home, 'b')}" in result.output
    assert fault_of(result).exit_code == 4


def test_verify_of_nothing_is_not_found(home: Home) -> None:
    assert isinstance(fault_of(run(home, "session", "verify", "s9")), SessionNotFound)
    assert isinstance(fault_of(run(home, "session", "verify", "S9")), UsageError)


def test_repair_says_what_was_wrong_and_where_the_original_is_and_audits_it(home: Home, torn: Path) -> None:
    result = run(home, "session", "repair", "s1")
    assert result.exit_code == 0
    (kept,) = home.refused.iterdir()
    assert f"{torn}:5: " in result.output
    assert f"kept in {kept}" in result.output
    assert "goes on after line 4 of epoch 0" in result.output
    assert audited(home) == ["audit_opened", "session_repaired"]
    assert run(home, "session", "verify", "s1").exit_code == 0


def test_repair_of_a_good_session_says_so_and_changes_nothing(home: Home) -> None:
    before = log_of(home).read_bytes()
    result = run(home, "session", "repair", "s1")
    assert (result.exit_code, result.output) == (0, "s1: nothing is wrong, nothing was changed\n")
    assert log_of(home).read_bytes() == before


def test_repair_of_a_session_without_anything_good_says_that_it_is_gone(home: Home) -> None:
    log_of(home).write_bytes(b"")
    assert "gone from the list" in run(home, "session", "repair", "s1").output
    assert not dir_for(home, "s1").exists()


def test_repair_says_when_no_cut_helps(home: Home) -> None:
    lines = log_of(home).read_bytes().splitlines(keepends=True)
    digest = json.loads(lines[3])["request_sha256"].encode()
    log_of(home).write_bytes(b"".join(lines).replace(digest, b"sha256:" + b"0" * 64))
    before = log_of(home).read_bytes()
    verified = fault_of(run(home, "session", "verify", "s1"))
    assert isinstance(verified, SessionRefused)
    fault = fault_of(run(home, "session", "repair", "s1"))
    assert isinstance(fault, SessionError)
    assert "no cut repairs" in str(fault)
    assert log_of(home).read_bytes() == before


def test_repair_leaves_what_a_newer_release_wrote(home: Home) -> None:
    newer = log_of(home).read_bytes().replace(b'"version":1', b'"version":9')
    log_of(home).write_bytes(newer)
    fault = fault_of(run(home, "session", "repair", "s1"))
    assert "format version 9" in str(fault)
    assert "newer release" in fault.hint
    assert log_of(home).read_bytes() == newer


def test_nothing_is_repaired_that_cannot_be_audited(home: Home, torn: Path) -> None:
    before = torn.read_bytes()
    home.audit.rmdir()
    assert isinstance(fault_of(run(home, "session", "repair", "s1")), AuditError)
    assert torn.read_bytes() == before


def test_fork_says_its_id_and_audits_it(home: Home) -> None:
    result = run(home, "session", "fork", "s1", "--to", "s2", "--upto", "4")
    assert result.output == "s2: a fork of s1 up to line 4\n"
    assert reader.verify(home, "s2").lines == 4
    assert audited(home) == ["audit_opened", "session_created"]
    assert {it.id: it.owner_uid for it in reader.summaries(home)}["s2"] == os.getuid()


def test_fork_makes_up_an_id(home: Home) -> None:
    assert run(home, "session", "fork", "s1").exit_code == 0
    assert len(reader.summaries(home)) == 2


def test_fork_refuses_a_line_that_ends_no_batch(home: Home) -> None:
    assert isinstance(fault_of(run(home, "session", "fork", "s1", "--upto", "3")), UsageError)
    assert run(home, "session", "fork", "s1", "--upto", "0").exit_code == 2


def test_the_home_of_another_user_is_refused(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: home.path.stat().st_uid + 1)
    for command in (("session", "verify"), ("session", "repair", "s1"), ("session", "fork", "s1"), ("audit", "verify")):
        assert fault_of(run(home, *command)).code == "home"


def test_audit_verify_counts_or_names_the_fault(home: Home) -> None:
    run(home, "session", "fork", "s1")
    assert run(home, "audit", "verify").output == "good: 2 records in 1 files\n"
    path = home.audit / "1.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    result = run(home, "audit", "verify")
    assert result.exit_code == 0
    assert "middle of a line" in result.output
    path.write_bytes(b"nonsense\nnonsense\n")
    result = run(home, "audit", "verify")
    assert f"{path}:1: " in result.output
    assert f"{path}:2: " in str(fault_of(result))
