"""A session goes on in its next epoch: whole, or not at all, and the old one is never touched."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from loopd.config import LoopTable
from loopd.errors import EncodeError, SessionIoError, SessionReadOnly
from loopd.home import Home
from loopd.proto.records import KEPT_KEYS, Summary
from loopd.session import reader
from loopd.session.repair import fork
from loopd.session.replay import replay
from loopd.session.store import Session, dir_for
from tests.session.builders import (
    CLOCK,
    LIMITS,
    QUESTION,
    compact,
    create,
    end,
    give,
    make_baseline,
    records_of,
    reopen,
    say,
    say_with_tool,
    step,
    usage,
)
from tests.session.crash import killed_at

TEXT = "They asked for the time. Grüezi, 你好."


def files_of(home: Home, session_id: str = "s1") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in dir_for(home, session_id).iterdir()}


def roles_of(session: Session) -> list[tuple[str, str]]:
    messages = [json.loads(message) for message in session.request("Next?").messages]
    return [(message["role"], message["content"]) for message in messages]


def test_the_next_epoch_has_the_same_baseline_and_the_summary_in_place_of_the_history(home: Home) -> None:
    session = create(home)
    say_with_tool(session)
    say(session, "second", key="k")
    old = files_of(home)
    asked = usage(session.request(QUESTION), 99, 7)
    session.begin_epoch(Summary(request=QUESTION, text=TEXT), asked)
    for again in (session, reopen(session, home)):
        start = again.start
        assert (again.epoch, again.lines, again.next_call, again.last_usage) == (1, 1, 2, None)
        assert (start.epoch, start.owner_uid, start.slot, start.next_call) == (1, 1000, 0, 2)
        assert (start.parent and start.parent.model_dump()) == {"id": "s1", "epoch": 0, "line": 12, "baseline": None}
        assert start.summary_usage == asked
        assert dict(again.keys) == {"key-1": 0, "k": 0}
        assert roles_of(again) == [
            ("system", make_baseline().system_prompt),
            ("user", QUESTION),
            ("assistant", TEXT),
            ("user", "Next?"),
        ]
    assert {name: data for name, data in files_of(home).items() if name[0] == "0"} == old
    assert files_of(home)["1.baseline.json"] == old["0.baseline.json"]
    say(again, "third")
    assert reader.verify(home, "s1").faults == ()
    again.close()


def test_where_the_template_has_no_system_role_the_prompt_stands_before_the_question(home: Home) -> None:
    session = create(home, system="user")
    say(session)
    compact(session, TEXT)
    first, second, third = roles_of(session)
    assert first == ("user", f"{make_baseline().system_prompt}\n\n{QUESTION}")
    assert (second, third) == (("assistant", TEXT), ("user", "Next?"))
    session.close()


def test_an_epoch_follows_an_epoch(home: Home, session: Session) -> None:
    for number in range(3):
        say(session, f"text {number}", key=f"k{number}")
        compact(session, f"summary {number}")
    assert (session.epoch, list(session.keys)) == (3, ["k0", "k1", "k2"])
    assert roles_of(session)[2] == ("assistant", "summary 2")
    assert [epoch for epoch, _, _ in reader.usages(home, "s1")] == [0, 0, 1, 1, 2, 2]
    assert (reader.verify(home, "s1").epochs, reader.summaries(home)[0].title) == (4, "text 0")


def test_the_last_thousand_keys_are_kept(home: Home, no_sync: None) -> None:
    session = create(home)
    for number in range(KEPT_KEYS + 5):
        say(session, key=f"k{number}")
    compact(session)
    say(session, key="new")
    compact(session)
    assert list(session.keys) == [*(f"k{number}" for number in range(6, KEPT_KEYS + 5)), "new"]
    session.close()


def test_the_old_epoch_stays_readable_through_the_open_session(home: Home, session: Session) -> None:
    say(session, "one", key="k1")
    say_with_tool(session, "two")
    before = list(session.records())
    reading = session.records(3)
    assert next(reading) == before[2]
    compact(session)
    assert list(reading) == before[3:], "what was being read is read to its end"
    assert list(session.records(epoch=0)) == before
    assert list(session.records(4, 6, epoch=0)) == before[3:5]
    assert [line for line, _ in session.records()] == [1]


def test_a_turn_of_an_earlier_epoch_is_found_by_its_key(home: Home, session: Session) -> None:
    say(session, "one", key="k1")
    say_with_tool(session, "two")
    compact(session)
    say(session, "three", key="k3")
    compact(session)
    found = session.earlier_turn("k1")
    assert [(epoch, line, record.type) for epoch, line, record in found] == [
        (0, 2, "user"),
        (0, 3, "assistant"),
        (0, 4, "usage"),
        (0, 5, "turn_end"),
    ]
    assert {epoch for epoch, _, _ in session.earlier_turn("k3")} == {1}
    assert session.earlier_turn("never") == []


def test_an_epoch_ends_only_between_two_turns(home: Home, session: Session) -> None:
    session.append(*step(session, "open", CLOCK))
    before = files_of(home)
    with pytest.raises(EncodeError, match="between two turns"):
        compact(session)
    assert files_of(home) == before
    give(session)
    session.append(*step(session, None), end())
    closed = files_of(home)
    compact(session)
    assert closed.items() <= files_of(home).items()


def test_a_summary_that_is_too_long_for_a_record_changes_nothing(home: Home) -> None:
    create(home).close()
    session = Session.open(home, "s1", limits=LoopTable(max_record_bytes=65_536))
    say(session)
    before = files_of(home)
    with pytest.raises(EncodeError, match="max_record_bytes = 65536"):
        compact(session, "x" * 70_000)
    with pytest.raises(EncodeError, match="surrogates"):
        compact(session, "\ud800")
    assert files_of(home) == before
    session.close()


def test_a_crash_anywhere_leaves_the_old_epoch_or_the_new_one_whole(home: Home) -> None:
    session = create(home)
    say(session, key="k1")
    session.close()
    old = files_of(home)

    def go_on() -> None:
        again = Session.open(home, "s1", limits=LIMITS)
        compact(again)
        say(again, "in the new one", key="k2")

    point, epochs = 0, set()
    while killed_at(point, go_on):
        files = files_of(home)
        assert {name: files[name] for name in old} == old
        assert reader.verify(home, "s1").faults == ()
        again = Session.open(home, "s1", limits=LIMITS)
        epochs.add(again.epoch)
        assert again.keys["k1"] == (2 if again.epoch == 0 else 0)
        assert set(files_of(home)) == {
            f"{n}.{kind}" for n in range(again.epoch + 1) for kind in ("baseline.json", "jsonl")
        }
        if again.epoch == 0:
            compact(again)
        say(again, "goes on")
        again.close()
        for path in dir_for(home, "s1").glob("1.*"):
            path.unlink()
        point += 1
    assert point > 25
    assert epochs == {0, 1}


@pytest.mark.parametrize("name", ["open", "fsync", "rename"])
def test_a_disk_that_does_not_take_the_epoch_leaves_the_old_one_in_use(
    home: Home, session: Session, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    say(session)
    before = files_of(home)
    monkeypatch.setattr(os, name, full_for("1.", getattr(os, name)))
    with pytest.raises(SessionIoError, match="No space"):
        compact(session)
    monkeypatch.undo()
    assert files_of(home) == before
    say(session, "goes on")
    compact(session)
    assert session.epoch == 1


def full_for(part: str, real: Any) -> Any:
    def full(*args: Any, **more: Any) -> Any:
        target = str(Path(f"/proc/self/fd/{args[0]}").readlink()) if isinstance(args[0], int) else str(args[0])
        if part in Path(target).name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **more)

    return full


def test_where_it_is_not_certain_that_the_epoch_is_there_the_session_must_be_opened_anew(
    home: Home, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(session)
    directory, real, seen = dir_for(home, "s1"), os.fsync, []

    def second_fails(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == directory:
            seen.append(descriptor)
            if len(seen) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", second_fails)
    with pytest.raises(SessionIoError, match="cannot sync"):
        compact(session)
    monkeypatch.undo()
    assert session.read_only
    with pytest.raises(SessionReadOnly, match="epoch 1"):
        say(session, "never")
    again = reopen(session, home)
    assert again.epoch == 1
    again.close()


@pytest.mark.parametrize("baseline", [None, make_baseline(system_prompt="Another.")])
def test_a_fork_of_a_later_epoch_takes_the_summary_along(home: Home, session: Session, baseline: Any) -> None:
    say(session, key="k1")
    compact(session, TEXT)
    say(session, "in the new one", key="k2")
    fork(home, "s1", "s2", owner_uid=7, baseline=baseline)
    other = Session.open(home, "s2", limits=LIMITS)
    assert (other.epoch, other.start.summary, other.start.summary_usage) == (0, session.start.summary, None)
    assert (other.start.parent and other.start.parent.epoch) == 1
    assert roles_of(other)[1:] == roles_of(session)[1:]
    assert dict(other.keys) == {"k1": 0, "k2": 2}
    assert other.earlier_turn("k1") == []
    say(other, "here", key="k3")
    other.close()
    assert reader.verify(home, "s2").faults == ()


def test_a_reader_meets_a_half_made_epoch_and_does_not_see_it(home: Home, session: Session) -> None:
    say(session)
    expected = list(session.records())
    directory = dir_for(home, "s1")
    (directory / "1.baseline.json").write_bytes(make_baseline().encoded())
    (directory / ".1.jsonl").write_bytes(b'{"half')
    assert reader.epochs(home, "s1") == [0]
    assert list(reader.read_records(home, "s1")) == expected
    assert reader.verify(home, "s1").faults == ()
    again = reopen(session, home)
    assert set(files_of(home)) == {"0.baseline.json", "0.jsonl"}
    again.close()


def test_a_summary_is_replayed_from_the_log_alone(home: Home, session: Session) -> None:
    say(session)
    compact(session, TEXT)
    say(session, "next")
    assert session.request(None).messages == replay(session.baseline, records_of(session))


def test_a_session_start_without_a_summary_does_not_mention_one(home: Home, session: Session) -> None:
    assert b"summary_usage" in files_of(home)["0.jsonl"]
    assert b'"summary":' not in files_of(home)["0.jsonl"]
