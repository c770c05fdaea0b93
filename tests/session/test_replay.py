import hashlib
import json
from typing import Any, Literal

import pytest

from loopd.errors import ReplayViolation
from loopd.proto.canonical import canonical
from loopd.proto.records import FORMAT_VERSION, Parent, Record, SessionStart
from loopd.session.replay import Replay, replay, serialisation, tool_call
from tests.session.builders import AT, CLOCK, FIND, answer, closing, end, make_baseline, result, usage, user

HASH = "sha256:" + "0" * 64


def start(**changes: Any) -> SessionStart:
    values: dict[str, Any] = {
        "at": AT, "version": FORMAT_VERSION, "epoch": 0, "slot": None, "baseline": HASH, "owner_uid": 0
    }  # fmt: skip
    return SessionStart(**(values | changes))


def decoded(*records: Record, **changes: Any) -> list[Any]:
    return [json.loads(message) for message in replay(make_baseline(system_prompt="Be brief.", **changes), records)]


def test_each_record_becomes_the_message_of_an_openai_request() -> None:
    records = (
        start(),
        user("What time is it?", "k1"),
        answer("Let me look.", CLOCK, reasoning="A tool knows."),
        result(1, CLOCK, "noon"),
        answer("Noon."),
        end(),
        user("Danke, 谢谢", "k2"),
        closing("(interrupted)"),
    )
    assert decoded(*records) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "reasoning_content": "A tool knows.",
            "tool_calls": [
                {
                    "id": "call_0",
                    "type": "function",
                    "function": {"name": "call_tool", "arguments": '{"name":"clock","arguments":{}}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0", "name": "call_tool", "content": "noon"},
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "Danke, 谢谢"},
        {"role": "assistant", "content": "(interrupted)"},
    ]


def test_every_message_is_canonical() -> None:
    messages = replay(make_baseline(), (user("é\u2028\n", "k"), answer("", CLOCK, FIND), result(1, CLOCK, "\x01")))
    assert messages == [canonical(json.loads(message)) for message in messages]


def test_arguments_go_back_to_the_letter_as_a_string_and_in_the_order_of_the_model_as_an_object() -> None:
    produced = '{ "z": 1, "a": {"y": 2.50, "b": "ü"} }'
    as_string = decoded(answer("", tool_call("c", "call_tool", produced)))[1]["tool_calls"][0]["function"]["arguments"]
    assert as_string == produced
    call = tool_call("c", "call_tool", produced, "object")
    as_object = replay(make_baseline(arguments="object"), (answer("", call),))[1]
    assert '"arguments":{"z":1,"a":{"y":2.5,"b":"ü"}},'.encode() in as_object


@pytest.mark.parametrize("arguments", ['{"a":', "null", "[1]", '"text"', "{'a': 1}", '{"a": NaN}', '{"a":"\\ud800"}'])
@pytest.mark.parametrize("form", ["string", "object"])
def test_arguments_that_are_no_object_are_sent_as_an_empty_one_with_their_text_in_the_message(
    arguments: str, form: Literal["string", "object"]
) -> None:
    call = tool_call("c", "call_tool", arguments, form)
    assert (call.arguments, call.sent) == (arguments, "{}")
    message = decoded(answer("Let me see.", call), arguments=form)[1]
    sent = message["tool_calls"][0]["function"]["arguments"]
    assert sent == ("{}" if form == "string" else {})
    assert message["content"].startswith("Let me see.\n\n")
    assert arguments in message["content"]


@pytest.mark.parametrize("arguments", ["", "  ", "{}", "{ }", "{\n\t}"])
def test_empty_arguments_need_no_note(arguments: str) -> None:
    assert decoded(answer("", tool_call("c", "device", arguments)))[1]["content"] == ""


def test_very_deep_arguments_replay_alike_at_any_depth_of_the_stack() -> None:
    call = tool_call("c", "call_tool", '{"a":' * 5000 + "1" + "}" * 5000)
    shallow = replay(make_baseline(), (answer("", call),))

    def deeper(levels: int) -> list[bytes]:
        return deeper(levels - 1) if levels else replay(make_baseline(), (answer("", call),))

    assert deeper(300) == shallow


def test_reasoning_is_left_out_where_the_baseline_says_so_and_where_there_is_none() -> None:
    assert "reasoning_content" not in decoded(answer("Yes.", reasoning="Hm."), reasoning="dropped")[1]
    assert "reasoning_content" not in decoded(answer("Yes."))[1]


def test_a_system_prompt_in_the_user_form_stands_before_the_first_text_only() -> None:
    messages = decoded(user("one", "k1"), answer("1"), end(), user("two", "k2"), system="user")
    assert messages[0] == {"role": "user", "content": "Be brief.\n\none"}
    assert messages[2] == {"role": "user", "content": "two"}


@pytest.mark.parametrize("form", ["message", "user"])
def test_an_empty_system_prompt_sends_none(form: Literal["message", "user"]) -> None:
    messages = replay(make_baseline(system_prompt="", system=form), (user("one", "k1"),))
    assert [json.loads(message) for message in messages] == [{"role": "user", "content": "one"}]


def test_a_preview_is_what_the_record_will_add_and_changes_nothing() -> None:
    state = Replay(make_baseline(system="user"))
    for text, key in (("one", "k1"), ("two", "k2")):
        before = list(state.messages)
        preview = state.preview(text)
        assert state.messages == before
        state.add(user(text, key))
        assert state.messages == before + preview


def test_a_request_hashes_its_own_serialisation() -> None:
    state = Replay(make_baseline())
    state.add(user("one", "k1"))
    request = state.request("two")
    data = serialisation(request.messages)
    assert request.request_bytes == len(data)
    assert request.request_sha256 == f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_a_history_that_does_not_begin_with_the_last_request_is_not_sent() -> None:
    state = Replay(make_baseline())
    good = usage(state.request("one"))
    for record in (user("one", "k1"), answer("1"), good):
        state.add(record)
    state.request(None)
    state.add(answer("2"))
    state.add(good)
    with pytest.raises(ReplayViolation, match="does not begin with"):
        state.request(None)


def test_a_fork_with_another_baseline_is_checked_from_its_own_first_usage_on() -> None:
    old = Replay(make_baseline(system_prompt="old"))
    copied = (user("one", "k1"), answer("1"), usage(old.request("one")), end())
    state = Replay(make_baseline(system_prompt="new"))
    for record in (start(parent=Parent(id="s0", epoch=0, line=5, baseline=HASH)), *copied):
        state.add(record)
    own = state.request("two")
    for record in (user("two", "k2"), answer("2"), usage(own)):
        state.add(record)
    state.request(None)
    state.add(answer("3"))
    state.add(usage(own))
    with pytest.raises(ReplayViolation):
        state.request(None)
