"""The summary request and what becomes of it, over the scripted model."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from loopd.errors import LoopdError, ModelChanged, ModelError, NotCompacted
from loopd.proto.frames import Compacting, Delta, Prefill, RecordFrame
from loopd.session import reader
from loopd.turn.compact import QUESTION
from tests.turn.conftest import Bench, MakeBench, call

SUMMARY = {"text": "They said hello."}


async def compact(b: Bench) -> dict[str, Any]:
    return await b.engine.compact(b.session, b.frames.append, uid=5, pid=6)


def audited(b: Bench) -> list[dict[str, Any]]:
    log = b.parts.home.audit / "1.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()]


async def test_the_summary_request_extends_the_history_and_the_next_epoch_begins_with_its_answer(
    bench: MakeBench,
) -> None:
    b = await bench({"text": "Hi."}, SUMMARY, {"text": "Fine."}, {"text": "Good."})
    await b.say("Hello.", key="k1")
    done = await compact(b)
    assert (done["epoch"], done["summary"], done["cut"], done["left_out_messages"]) == (1, SUMMARY["text"], False, 0)
    await b.say("How are you?", key="k2")
    await b.say("And now?", key="k3")
    first, asked, second, third = (body["messages"] for body in b.server.requests)
    assert asked[: len(first)] == first
    assert asked[-1] == {"role": "user", "content": QUESTION}
    assert second == [asked[0], asked[-1], {"role": "assistant", "content": SUMMARY["text"]}, second[-1]]
    assert second[-1]["content"] == "How are you?"
    assert third[: len(second)] == second
    assert all(before["tools"] == after["tools"] for before, after in pairwise(b.server.requests))
    usages = reader.usages(b.parts.home, "s")
    assert [(epoch, usage.loss) for epoch, _, usage in usages] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    summary_usage, next_usage = usages[1][2], usages[2][2]
    assert (summary_usage.cached_tokens, next_usage.expected) == (summary_usage.expected, 0)
    assert reader.verify(b.parts.home, "s").faults == ()


async def test_watchers_see_the_progress_and_the_new_epoch_and_none_of_the_text(bench: MakeBench) -> None:
    b = await bench({"text": "Hi."}, {**SUMMARY, "reasoning": "Hm."})
    await b.say()
    b.frames.clear()
    await compact(b)
    kinds = [frame.type for frame in b.frames]
    assert (kinds[0], kinds[-2:]) == ("compacting", ["usage", "record"])
    assert any(isinstance(frame, Prefill) for frame in b.frames)
    assert not any(isinstance(frame, Delta) for frame in b.frames)
    record = b.frames[-1]
    assert isinstance(record, RecordFrame)
    assert (record.epoch, record.line, record.record["summary"]["text"]) == (1, 1, SUMMARY["text"])
    assert b.session.start.summary is not None, "the reasoning is left out of it"
    assert b.session.start.summary.text == SUMMARY["text"]


async def test_it_is_audited_with_who_asked_for_it(bench: MakeBench) -> None:
    b = await bench({"text": "Hi."}, SUMMARY)
    await b.say()
    await compact(b)
    (event,) = (line for line in audited(b) if line["event"] == "session_compacted")
    assert (event["session"], event["epoch"], event["uid"], event["pid"]) == ("s", 1, 5, 6)


async def test_the_estimate_is_what_it_then_costs(bench: MakeBench) -> None:
    b = await bench(
        {"text": "Hi there, how are you today?"}, SUMMARY, {"text": "Fine."}, loop={"max_summary_tokens": 64}
    )
    await b.say()
    requests = len(b.server.requests)
    cost = await b.engine.estimate(b.session)
    assert (len(b.server.requests), b.session.epoch) == (requests, 0)
    assert (cost["summary_tokens"], cost["left_out_messages"], cost["context_tokens"]) == (64, 0, 8192)
    assert cost["seconds"] is not None
    await compact(b)
    usage = b.session.start.summary_usage
    assert usage is not None
    assert usage.prompt_tokens == cost["prompt_tokens"]
    assert (usage.prompt_tokens or 0) - (usage.cached_tokens or 0) == cost["evaluated_tokens"]
    await b.say("x", key="k2")
    after = b.session.last_usage
    assert after is not None
    assert (after.prompt_tokens or 0) <= cost["next_prompt_tokens"] + 10


async def test_a_summary_that_reached_its_limit_is_taken_and_said_to_be_cut(bench: MakeBench) -> None:
    b = await bench({"text": "Hi."}, {"text": "one two three " * 20}, loop={"max_summary_tokens": 16})
    await b.say()
    done = await compact(b)
    assert done["cut"]
    assert b.server.requests[-1]["max_tokens"] == 16


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        ({"text": " \n"}, NotCompacted, "asked for a summary and wrote nothing"),
        ({"tool_calls": [call("nothing")]}, NotCompacted, "asked for a summary and called a tool"),
        ({"error": {"status": 500, "message": "out of memory"}}, ModelError, "out of memory"),
        ({"text": "half a summary", "drop_after_chunks": 1, "chunk_chars": 4}, ModelError, "mid-stream"),
    ],
)
async def test_what_comes_to_no_summary_changes_nothing(
    bench: MakeBench, step: dict[str, Any], error: type[LoopdError], text: str
) -> None:
    b = await bench({"text": "Hi."}, step, SUMMARY)
    await b.say()
    before = b.log()
    with pytest.raises(error, match=text):
        await compact(b)
    assert (b.log(), b.session.epoch) == (before, 0)
    assert (await compact(b))["epoch"] == 1


async def test_a_cancel_changes_nothing_and_the_next_turn_loses_nothing(bench: MakeBench) -> None:
    b = await bench({"text": "Hi."}, {"text": "A summary. " * 9, "gate": "g"})
    await b.say()
    task = asyncio.ensure_future(compact(b))
    await asyncio.wait_for(b.server.gate("g").reached.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert b.session.epoch == 0
    await b.say(key="k2")
    usage = b.session.last_usage
    assert usage is not None
    assert usage.loss == 0


async def test_it_takes_no_longer_than_a_turn(bench: MakeBench) -> None:
    b = await bench({"text": "Hi."}, {"text": "A summary. " * 9, "gate": "g"}, loop={"turn_timeout_s": 1.0})
    await b.say()
    with pytest.raises(NotCompacted, match="turn_timeout_s = 1"):
        await compact(b)


async def test_there_must_be_something_to_summarise(bench: MakeBench) -> None:
    b = await bench({"text": "Hi."}, SUMMARY)
    for _ in range(2):
        for refused in (b.engine.estimate(b.session), compact(b)):
            with pytest.raises(NotCompacted, match="nothing was said"):
                await refused
        if b.session.epoch == 0:
            await b.say()
            await compact(b)


async def test_another_model_is_not_asked_for_a_summary(bench: MakeBench) -> None:
    b = await bench({"text": "Hi."})
    await b.say()
    b.server.script = b.server.script.model_copy(update={"alias": "another"})
    with pytest.raises(ModelChanged, match="another"):
        await b.engine.estimate(b.session)


# --- a history that does not fit ----------------------------------------------------------------------------------


async def test_of_a_history_that_is_too_long_the_first_part_is_summarised(bench: MakeBench) -> None:
    small: dict[str, Any] = {
        "script": {"context_tokens": 900},
        "loop": {"max_summary_tokens": 64, "max_result_bytes": 2000},
    }
    b = await bench(
        {"text": "First."}, {"text": "Second."}, {"tool_calls": [call("x " * 450)]}, SUMMARY, {"text": "On."}, **small
    )
    await b.say("one", key="k1")
    await b.say("two", key="k2")
    assert (await b.say("three", key="k3")).reason == "context_full"
    assert "bxctl compact s" in (await b.say("four", key="k4")).hint
    cost = await b.engine.estimate(b.session)
    done = await compact(b)
    assert done["left_out_messages"] == cost["left_out_messages"] > 0
    asked = b.server.requests[-1]["messages"]
    assert [message["content"] for message in asked[1:]] == ["one", "First.", "two", "Second.", QUESTION]
    usage = b.session.start.summary_usage
    assert usage is not None
    assert (usage.prompt_tokens or 0) + 64 <= 900
    assert (usage.loss, usage.cause) == (0, None)
    assert (await b.say("five", key="k5")).reason == "completed"


async def test_where_not_even_the_beginning_fits_it_says_so(bench: MakeBench) -> None:
    b = await bench({"text": "word " * 150}, script={"context_tokens": 900})
    b.parts.config = b.parts.config.model_copy(
        update={"loop": b.parts.config.loop.model_copy(update={"max_summary_tokens": 100})}
    )
    await b.say("hello " * 200)
    with pytest.raises(NotCompacted, match="context of 900 tokens"):
        await compact(b)


# --- by itself ----------------------------------------------------------------------------------------------------

AUTO: dict[str, Any] = {"loop": {"auto_compact": True, "max_summary_tokens": 32}}


async def test_a_turn_without_room_begins_in_a_new_epoch(bench: MakeBench) -> None:
    b = await bench(script={"context_tokens": 800, "default": {"text": "word " * 60}}, **AUTO)
    ends = [await b.say(f"text {number}", key=f"k{number}") for number in range(12)]
    assert {end.reason for end in ends} == {"completed"}
    assert b.session.epoch >= 2
    assert sum(isinstance(frame, Compacting) for frame in b.frames) == b.session.epoch
    assert [f"k{number}" for number in range(12)] == list(b.session.keys)
    assert {usage.loss for _, _, usage in reader.usages(b.parts.home, "s")} == {0}
    assert reader.verify(b.parts.home, "s").faults == ()


async def test_without_the_setting_the_context_fills_up(bench: MakeBench) -> None:
    b = await bench(script={"context_tokens": 800, "default": {"text": "word " * 60}})
    ends = [await b.say(f"text {number}", key=f"k{number}") for number in range(12)]
    assert ends[-1].reason == "context_full"
    assert "auto_compact" in ends[-1].hint
    assert b.session.epoch == 0


async def test_a_text_that_would_not_fit_begins_in_a_new_epoch(bench: MakeBench) -> None:
    b = await bench({"text": "word " * 110}, SUMMARY, {"text": "Yes."}, script={"context_tokens": 800}, **AUTO)
    await b.say()
    assert (await b.say("hello " * 115, key="k2")).reason == "completed"
    assert b.session.epoch == 1


async def test_a_compaction_that_fails_does_not_keep_the_turn_from_running(bench: MakeBench) -> None:
    b = await bench(
        {"text": "word " * 230},
        {"text": ""},
        {"text": "Still here."},
        script={"context_tokens": 1000},
        **AUTO,
    )
    await b.say()
    assert (await b.say("next", key="k2")).reason == "completed"
    assert b.server.requests[1]["messages"][-1]["content"] == QUESTION
    assert b.session.epoch == 0


async def test_a_cancel_while_the_summary_is_written_gives_the_text_back(bench: MakeBench) -> None:
    b = await bench({"text": "word " * 230}, {"text": "Summary.", "gate": "g"}, script={"context_tokens": 1000}, **AUTO)
    await b.say()
    turn = asyncio.ensure_future(b.say("next", key="k2"))
    await asyncio.wait_for(b.server.gate("g").reached.wait(), 30)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn
    assert (b.session.epoch, "k2" in b.session.keys) == (0, False)
