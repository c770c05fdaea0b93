"""The append-only property, over arbitrary histories (SPEC 2.3)."""

import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loopd.errors import SessionIoError
from loopd.proto.records import Record, ToolCall, TurnEndReason, User
from loopd.session.repair import fork
from loopd.session.replay import Request, replay, serialisation, tool_call
from loopd.session.store import Session
from tests.session.builders import (
    LIMITS,
    QUESTION,
    answer,
    closing,
    compact,
    end,
    make_baseline,
    make_home,
    records_of,
    reopen,
    result,
    usage,
    user,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ARGUMENTS = st.sampled_from(['{"name":"clock"}', '{"z":1,"a":[true]}', "", '{"a":', "null", "[1]", '{"ü":"\\u0000"}'])
CALLS = st.lists(st.builds(tool_call, st.sampled_from(["call_0", "call_1"]), TEXT, ARGUMENTS), max_size=3).map(tuple)
REASONS = st.sampled_from(["completed", "cancelled", "interrupted", "model_error", "step_limit"])


class Histories(RuleBasedStateMachine):
    """Any order of turns, steps, tool results, cancels, failures, limits, restarts, epochs and forks."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.home = make_home(self.directory)
        self.sent: list[bytes] = []
        self.earlier_keys: set[str] = set()
        self.forks = 0
        self.patches = [mock.patch.object(os, name, return_value=None) for name in ("fsync", "fdatasync")]
        for patch in self.patches:
            patch.start()

    @initialize(
        arguments=st.sampled_from(["string", "object"]),
        reasoning=st.sampled_from(["sent", "dropped"]),
        system=st.sampled_from(["message", "user"]),
        prompt=TEXT,
    )
    def begin(self, arguments: str, reasoning: str, system: str, prompt: str) -> None:
        baseline = make_baseline(arguments=arguments, reasoning=reasoning, system=system, system_prompt=prompt)
        self.session = Session.create(self.home, "s0", baseline, owner_uid=0, limits=LIMITS)

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.close()
        for patch in self.patches:
            patch.stop()
        shutil.rmtree(self.directory)

    @property
    def is_idle(self) -> bool:
        return self.session.open_turn is None

    @property
    def may_step(self) -> bool:
        turn = self.session.open_turn
        return turn is not None and not turn.pending

    @property
    def pending(self) -> tuple[tuple[int, ToolCall], ...]:
        turn = self.session.open_turn
        return turn.pending if turn else ()

    def request(self, text: str | None) -> Request:
        """Ask for a request as before a send, and check it against all that were recorded."""
        request = self.session.request(text)
        data = serialisation(request.messages)
        assert request.request_bytes == len(data)
        for earlier in self.sent:
            assert data.startswith(earlier)
        if self.sent:
            assert len(data) > len(self.sent[-1])
        return request

    def finish(self, text: str | None, reply: str, reasoning: str, calls: tuple[ToolCall, ...], *, ends: bool) -> None:
        request = self.request(text)
        asked: list[Record] = (
            [] if text is None else [user(text, f"{self.session.id}-{self.session.epoch}-{self.session.lines}")]
        )
        ending: list[Record] = [end()] if ends and not calls else []
        self.session.append(*asked, answer(reply, *calls, reasoning=reasoning), usage(request), *ending)
        self.sent.append(serialisation(request.messages))

    @precondition(lambda self: self.is_idle)
    @rule(text=TEXT, reply=TEXT, reasoning=TEXT, calls=CALLS, ends=st.booleans())
    def say(self, text: str, reply: str, reasoning: str, calls: tuple[ToolCall, ...], ends: bool) -> None:
        self.finish(text, reply, reasoning, calls, ends=ends)

    @precondition(lambda self: self.may_step)
    @rule(reply=TEXT, reasoning=TEXT, calls=CALLS, ends=st.booleans())
    def go_on(self, reply: str, reasoning: str, calls: tuple[ToolCall, ...], ends: bool) -> None:
        self.finish(None, reply, reasoning, calls, ends=ends)

    @precondition(lambda self: self.pending)
    @rule(content=TEXT)
    def give_a_result(self, content: str) -> None:
        number, call = self.pending[0]
        self.session.append(result(number, call, content))

    @precondition(lambda self: self.may_step)
    @rule(reason=REASONS, closes=st.booleans())
    def end_the_turn(self, reason: TurnEndReason, closes: bool) -> None:
        self.session.append(*([closing()] if closes else []), end(reason))

    @precondition(lambda self: self.is_idle)
    @rule(text=TEXT)
    def cancel_a_first_step(self, text: str) -> None:
        self.request(text)

    @precondition(lambda self: self.may_step)
    @rule()
    def cancel_a_later_step(self) -> None:
        self.request(None)

    @precondition(lambda self: self.is_idle)
    @rule(text=TEXT, part=st.integers(0, 40))
    def fail_to_write(self, text: str, part: int) -> None:
        request = self.request(text)
        real = os.write
        with (
            mock.patch.object(os, "write", lambda descriptor, data: real(descriptor, data[:part])),
            pytest.raises(SessionIoError),
        ):
            self.session.append(user(text, "never"), answer("lost"), usage(request))

    @rule()
    def restart(self) -> None:
        self.session = reopen(self.session, self.home)

    @precondition(lambda self: self.is_idle and self.session.lines > 1)
    @rule(text=TEXT)
    def go_on_from_a_summary(self, text: str) -> None:
        self.request(QUESTION)
        self.earlier_keys |= set(self.session.keys)
        compact(self.session, text)
        self.sent = []

    @precondition(lambda self: self.session.lines > 1)
    @rule()
    def go_on_in_a_fork(self) -> None:
        self.forks += 1
        self.session.close()
        name = f"s{self.forks}"
        fork(self.home, self.session.id, name, owner_uid=0)
        self.session = Session.open(self.home, name, limits=LIMITS)

    @invariant()
    def memory_is_what_replay_makes_of_the_disk(self) -> None:
        if hasattr(self, "session"):
            records = records_of(self.session)
            assert self.session.request(None).messages == replay(self.session.baseline, records)
            assert self.session.keys == dict.fromkeys(self.earlier_keys, 0) | {
                record.key: line for line, record in enumerate(records, 1) if isinstance(record, User)
            }


TestHistories = Histories.TestCase
TestHistories.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
