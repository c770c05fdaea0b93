"""A log that ends anywhere: cut at every byte, with zeros behind a cut, with a cut and a whole line fused to it."""

from collections.abc import Iterator

import pytest

from loopd.errors import TornLog
from loopd.home import Home
from loopd.session import reader
from loopd.session.store import Session
from tests.session.builders import (
    CLOCK,
    FIND,
    LIMITS,
    closing,
    create,
    end,
    give,
    log_of,
    make_home,
    records_of,
    say,
    step,
)

pytestmark = pytest.mark.usefixtures("no_sync")


def every_kind_of_batch(session: Session) -> Iterator[None]:
    """Append one batch of each form, in each place where it may stand, pausing after each."""
    session.append(*step(session, "Two things, bitte: ü", CLOCK, FIND))
    yield
    give(session)
    yield
    give(session, "found\n")
    yield
    session.append(*step(session, None))
    yield
    session.append(*step(session, None), end())
    yield
    session.append(*step(session, "One thing"))
    yield
    session.append(end("interrupted"))
    yield
    session.append(*step(session, "Another"))
    session.append(closing(), end("deadline"))
    yield
    say(session, "A whole turn")
    yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[int, int]]:
    """The bytes of a log, and where it may end: offset -> lines."""
    home = make_home(tmp_path_factory.mktemp("whole"))
    session = create(home)
    ends = {session.size_bytes: session.lines}
    for _ in every_kind_of_batch(session):
        ends[session.size_bytes] = session.lines
    offset = 0
    data = log_of(home).read_bytes()
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        offset += len(line)
        if b'"type":"usage"' in line:
            ends[offset] = number
    session.close()
    return data, ends


def test_a_log_cut_at_every_byte_is_the_log_before_the_batch_or_is_refused(
    home: Home, whole: tuple[bytes, dict[int, int]]
) -> None:
    data, ends = whole
    session = create(home)
    session.close()
    path = log_of(home)
    expected: list[object] = []
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        if cut in ends:
            session = Session.open(home, "s1", limits=LIMITS)
            assert session.lines == ends[cut]
            found = records_of(session)
            assert found[: len(expected)] == expected
            expected = list(found)
            assert session.size_bytes == cut
            session.close()
            continue
        good = max((offset for offset in ends if offset < cut), default=0)
        with pytest.raises(TornLog) as caught:
            Session.open(home, "s1", limits=LIMITS)
        fault = caught.value
        at_line_end = data[:cut].endswith(b"\n")
        assert fault.kind == ("incomplete_step" if at_line_end or cut == 0 else "no_newline")
        assert (fault.good_bytes, fault.good_lines) == (good, ends.get(good, 0))
        assert fault.line == max(1, data[:cut].count(b"\n") + (0 if at_line_end else 1))
        assert fault.offset == data.rfind(b"\n", 0, max(0, cut - 1)) + 1
        assert str(fault).startswith(f"{path}:{fault.line}: ")


def test_a_turn_that_was_cut_between_usage_and_turn_end_is_open(
    home: Home, whole: tuple[bytes, dict[int, int]]
) -> None:
    create(home).close()
    data, _ = whole
    log_of(home).write_bytes(b"".join(data.splitlines(keepends=True)[:-1]))
    session = Session.open(home, "s1", limits=LIMITS)
    turn = session.open_turn
    assert turn is not None
    assert turn.pending == ()
    session.append(end("interrupted"))
    say(session)
    session.close()


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda lines: [*lines, b"\0" * 4096], "nul"),
        (lambda lines: [*lines[:-1], lines[-1][:10] + b"\0" * 30], "nul"),
        (lambda lines: [*lines[:6], lines[6][:20] + b"\n", *lines[7:]], "not_json"),
        (lambda lines: [*lines[:6], lines[6][:20] + lines[7], *lines[8:]], "not_json"),
        (lambda lines: [*lines[:6], lines[6].replace(b"Yes", b"\xff\xfe"), *lines[7:]], "not_utf8"),
        (lambda lines: [*lines[:5], *lines[6:]], "wrong_order"),
        (lambda lines: [*lines[:5], lines[4], *lines[5:]], "wrong_order"),
        (lambda lines: [*lines, lines[1]], "wrong_order"),
        (lambda lines: [*lines, b'{"type":"dream"}\n'], "unknown_record"),
        (lambda lines: lines[1:], "wrong_order"),
    ],
)
def test_damage_anywhere_is_refused_and_verify_says_the_same(
    home: Home, whole: tuple[bytes, dict[int, int]], damage: object, kind: str
) -> None:
    assert callable(damage)
    create(home).close()
    data, _ = whole
    damaged = b"".join(damage(data.splitlines(keepends=True)))
    log_of(home).write_bytes(damaged)
    with pytest.raises(TornLog) as caught:
        Session.open(home, "s1", limits=LIMITS)
    assert caught.value.kind == kind
    assert [str(fault) for fault in reader.verify(home, "s1").faults] == [str(caught.value)]
    assert log_of(home).read_bytes() == damaged


def test_a_line_longer_than_any_release_writes_is_refused_unread(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loopd.session.files.MAX_LINE_BYTES", 4096)
    create(home).close()
    with log_of(home).open("ab") as file:
        file.write(b" " * 5000 + b"\n")
    with pytest.raises(TornLog, match="longer than 4096 bytes"):
        Session.open(home, "s1", limits=LIMITS)
