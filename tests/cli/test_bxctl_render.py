"""What people see: nothing steers their terminal, and the usage line adds up (SPEC 9)."""

import io

import pytest
from rich.console import Console

from loopd.cli.render import UsageLine, plain, print_record, short, size, visible
from loopd.cli.view import TurnView
from loopd.proto.frames import (
    Accepted,
    Compacting,
    Delta,
    Opened,
    Prefill,
    Reasoning,
    RecordFrame,
    ServerFrame,
    ToolResultFrame,
    ToolStarted,
    TurnEndFrame,
    UsageFrame,
)

ACCEPTED = Accepted(session="s", key="k")
END = TurnEndFrame(session="s", key="k", reason="completed", recorded=True)


def account(prompt: int | None, cached: int | None, loss: int | None, seconds: float | None = 0.2) -> UsageFrame:
    evaluated = prompt - cached if prompt is not None and cached is not None else None
    cause = "slot_taken" if loss else None
    return UsageFrame(
        session="s", prompt_tokens=prompt, cached_tokens=cached, evaluated=evaluated, loss=loss, cause=cause,
        seconds=seconds,
    )  # fmt: skip


def answer(line: int, text: str) -> RecordFrame:
    return RecordFrame(session="s", epoch=0, line=line, record={"type": "assistant", "text": text, "tool_calls": []})


def shown(*frames: ServerFrame) -> str:
    out = io.StringIO()
    view = TurnView(Console(file=out, markup=False, emoji=False, highlight=False, width=200))
    view.others = False
    for frame in frames:
        view.show(frame)
    return out.getvalue()


@pytest.mark.parametrize(
    ("accounts", "line"),
    [
        ([account(1272, 1257, 0)], "1,272 prompt · 1,257 cached · 15 evaluated · loss 0 · 0.2 s"),
        (
            [account(100, 0, 0), account(200, 90, 30)],
            "2 requests · 300 prompt · 90 cached · 210 evaluated · loss 30 · 0.4 s",
        ),
        ([account(None, None, None, None)], "the model server reported no tokens · 0.0 s"),
    ],
)
def test_the_usage_line_adds_up_the_requests_of_a_turn(accounts: list[UsageFrame], line: str) -> None:
    usage = UsageLine()
    for frame in accounts:
        usage.add(frame)
    assert str(usage) == line


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\x00\x9b", "ab\\x00\\x9b"),
        ("\u202eevil", "\\u202eevil"),
        ("grüße 😀", "grüße 😀"),
    ],
)
def test_control_characters_are_shown_and_not_obeyed(text: str, safe: str) -> None:
    assert plain(text) == safe


def test_a_long_text_is_one_short_line() -> None:
    assert short("a\n b\t c") == "a b c"
    assert len(short("x" * 1000)) == 200


@pytest.mark.parametrize(
    ("size_bytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 40, "1024.0 GiB")]
)
def test_sizes_are_for_people(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


def test_a_streamed_answer_is_printed_once_and_exactly() -> None:
    text = "**bold** :smile: [red]\tx"
    frames: list[ServerFrame] = [
        ACCEPTED,
        Delta(session="s", text=text[:9]),
        Delta(session="s", text=text[9:]),
        answer(3, text),
        END,
    ]
    assert shown(*frames) == text + "\n"


def test_an_answer_that_was_not_streamed_is_printed_from_its_record_once() -> None:
    assert shown(answer(3, "whole"), answer(3, "whole"), END) == "whole\n"


def test_after_a_lost_connection_the_answer_begins_on_a_new_line() -> None:
    opened = Opened(session="s", epoch=0, lines=1, created=False, running=True)
    assert shown(Delta(session="s", text="HEL"), opened, Delta(session="s", text="HELLO"), END) == "HEL\nHELLO\n"


def test_a_turn_with_thoughts_tools_and_a_loss_is_shown_in_order() -> None:
    text = shown(
        ACCEPTED,
        Reasoning(session="s", text="hm"),
        Delta(session="s", text="I look."),
        ToolStarted(session="s", call=1, name="call_tool", arguments='{"name":"clock"}'),
        ToolResultFrame(session="s", call=1, name="call_tool", ok=False, content="no\nclock"),
        account(100, 70, 30),
        Delta(session="s", text="Late."),
        END,
    )
    assert text == (
        "hm\nI look.\n"
        '→ call_tool {"name":"clock"}\n'
        "← failed: no clock\n"
        "lost 30 cached tokens: slot_taken\n"
        "Late.\n"
        "100 prompt · 70 cached · 30 evaluated · loss 30 · 0.2 s\n\n"
    )


def on_terminal(*frames: ServerFrame) -> str:
    out = io.StringIO()
    view = TurnView(Console(file=out, force_terminal=True, color_system=None, highlight=False, width=120))
    view.others = False
    for frame in frames:
        view.show(frame)
    view.rest()
    return out.getvalue()


def test_a_summary_is_announced_and_then_shown() -> None:
    start = {"type": "session_start", "epoch": 1, "summary": {"request": "Sum up.", "text": "They \x1b[31mspoke."}}
    out = shown(ACCEPTED, Compacting(session="s", epoch=1), RecordFrame(session="s", epoch=1, line=1, record=start))
    assert "writing a summary" in on_terminal(ACCEPTED, Compacting(session="s", epoch=1))
    assert out.endswith("the conversation goes on in epoch 1, from this summary:\nThey \\x1b[31mspoke.\n\n")


def test_a_long_prefill_has_a_bar_and_a_short_one_has_none() -> None:
    long = on_terminal(ACCEPTED, Prefill(session="s", cached=100, processed=1100, total=4100))
    assert "reading 1,100 of 4,100 tokens, 100 cached" in long
    assert "━━━━━━━" in long
    short_one = on_terminal(ACCEPTED, Prefill(session="s", cached=4000, processed=4050, total=4100))
    assert "reading 4,050 of 4,100 tokens, 4,000 cached" in short_one
    assert "━" not in short_one


def test_a_record_of_a_call_says_who_allowed_it(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"type": "tool_result", "at": "2026-12-01T14:00:00.000000Z", "call": 3, "name": "call_tool"}
    print_record(7, {**record, "ok": False, "content": "Not run.", "approval": "denied by user 7"})
    print_record(8, {**record, "ok": True, "content": "Done.", "approval": None})
    out = capsys.readouterr().out
    assert "tool_result 3 call_tool failed, denied by user 7\n" in out
    assert "tool_result 3 call_tool\n" in out


@pytest.mark.parametrize(
    ("text", "seen"),
    [("\x1b[2J", r"\x1b[2J"), ("a\u202eb\u200bc", r"a\u202eb\u200bc"), ("\n\t", r"\n\t"), ("ü 漢字 🙂", "ü 漢字 🙂")],
)
def test_what_a_person_judges_shows_every_character(text: str, seen: str) -> None:
    assert visible(text) == seen
