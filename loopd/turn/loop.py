"""The turn loop: say -> step -> (tool calls -> results -> step)* -> turn_end (SPEC 5).

A turn writes only what is final: a request's batch when the server finished it, a tool's result when it ended. At
any end - completed, a limit, a cancel, an error - the log is good for the next turn: every call has a result, and
the template accepts a user message.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

from loopd.audit import may_have_begun
from loopd.clock import monotonic_s, now
from loopd.errors import ContextOverflow, LoopdError, ModelChanged, ModelError, SessionError
from loopd.model.account import account
from loopd.model.client import Completion, CompletionRequest, Event, Loading, Progress, ReasoningDelta, TextDelta
from loopd.model.slots import SlotCondition
from loopd.proto.frames import (
    Delta,
    Prefill,
    Queued,
    Reasoning,
    RecordFrame,
    ToolResultFrame,
    TurnEndFrame,
    UsageFrame,
)
from loopd.proto.records import Assistant, Record, ToolCall, ToolResult, TurnEnd, TurnEndReason, Usage, User
from loopd.proto.usage import usage_record
from loopd.session.replay import Request, tool_call
from loopd.session.store import Session
from loopd.tools.port import Outcome, doubt
from loopd.tools.text import clean
from loopd.turn.approvals import Approvals
from loopd.turn.calls import Calls, Job
from loopd.turn.history import history_of
from loopd.turn.limits import Stop, TurnLimits, answer_cut, context_stop, surely_fits
from loopd.turn.parts import Emit, Parts, uninterrupted

log = logging.getLogger("loopd.turn")

_UNKNOWN_OUTCOME = (
    "The outcome of this call is unknown: loopd stopped while it ran, and it may have had its effect, wholly or in"
    " part. It was not run again: look at what is there before you repeat it."
)
_NEVER_BEGAN = "Not run: loopd stopped before this call began. It had no effect."


class Ended(Exception):
    """A turn's way out of its steps: why it is over, and the facts for a person. Not an error."""

    def __init__(self, reason: TurnEndReason, *, code: str | None = None, message: str = "", hint: str = "") -> None:
        super().__init__(reason)
        self.reason: TurnEndReason = reason
        self.code, self.message, self.hint = code, message, hint

    @classmethod
    def by_limit(cls, stop: Stop) -> "Ended":
        """Return the end that a limit demands."""
        return cls(stop.reason, code=stop.reason, message=stop.message)

    @classmethod
    def by_error(cls, error: LoopdError) -> "Ended":
        """Return the end that an error demands."""
        reason: TurnEndReason = "interrupted"
        if isinstance(error, ContextOverflow):
            reason = "context_full"
        elif isinstance(error, ModelError):
            reason = "model_error"
        return cls(reason, code=error.code, message=error.message, hint=error.hint)


class Turn:
    """One turn of one session. It owns the session while it runs; `emit` gets every frame in order.

    `approvals` answers for calls that must be asked about; without it they are denied.
    """

    def __init__(self, parts: Parts, session: Session, emit: Emit, approvals: Approvals | None = None) -> None:
        self._parts = parts
        self._session = session
        self._emit = emit
        self._limits = TurnLimits(parts.config.loop, monotonic_s())
        approvals = approvals or Approvals(lambda: False)
        self._calls = Calls(parts, session.id, session.baseline.model.alias, emit, approvals)
        self._jobs: dict[int, Job] = {}
        self._usages: list[Usage] = []

    async def run(self, text: str, key: str) -> TurnEndFrame:
        """Run the turn to its end and return its last frame (not emitted).

        Cancelling the task that runs it cancels the turn: the request in flight is dropped unrecorded, calls
        without a result get one, and the frame says `cancelled`. `recorded` tells whether the text is on disk; if
        it is, and the reason is `interrupted`, the turn's end is not.
        """
        began_s = monotonic_s()
        try:
            ended = await self._steps(User(at=now(), text=sound(text), key=key))
        except asyncio.CancelledError:
            _absorb_cancel()
            ended = Ended("cancelled")
        except Ended as by_limit:
            ended = by_limit
        except LoopdError as error:
            ended = Ended.by_error(error)
        try:
            await uninterrupted(self._close(ended.reason, lambda number: self._not_run(number, ended)))
        except asyncio.CancelledError:
            _absorb_cancel()
        except SessionError as error:
            ended = Ended.by_error(error)
        recorded = key in self._session.keys
        self._summarise(ended, monotonic_s() - began_s)
        return TurnEndFrame(
            session=self._session.id,
            key=key,
            reason=ended.reason,
            recorded=recorded,
            text=None if recorded else text,
            code=ended.code,
            message=ended.message,
            hint=ended.hint,
        )

    async def recover(self) -> None:
        """End a turn that a crash left without an end; nothing is run again (SPEC 2.2/9).

        What a call without a result has done is unknown, but for one that the audit log shows not to have begun.

        Raises:
            SessionError: the records cannot be written.
        """
        turn = self._session.open_turn
        calls = [number for number, _ in turn.pending] if turn else []
        begun = await asyncio.to_thread(may_have_begun, self._parts.home.audit, self._session.id, calls)
        end = self._close("interrupted", lambda number: _UNKNOWN_OUTCOME if number in begun else _NEVER_BEGAN)
        await uninterrupted(end)

    # --- steps --------------------------------------------------------------------------------------------------

    async def _steps(self, user: User) -> Ended:
        """Ask and run tools until an answer calls none; return how the turn ended, its end recorded."""
        await self._model_ready()
        asked: User | None = user
        form = self._session.baseline.arguments
        while True:
            if stop := self._limits.step(monotonic_s()):
                raise Ended.by_limit(stop)
            completion, usage = await self._request(asked.text if asked else None)
            answer = Assistant(
                at=now(),
                text=sound(completion.text),
                reasoning=sound(completion.reasoning),
                tool_calls=tuple(
                    tool_call(sound(call.id), sound(call.name), sound(call.arguments), form)
                    for call in completion.tool_calls
                ),
                finish_reason=completion.finish_reason,
                origin="model",
            )
            batch: list[Record] = [asked, answer, usage] if asked else [answer, usage]
            asked = None
            ended = self._ended_by(completion)
            if ended and not answer.tool_calls:
                batch.append(TurnEnd(at=now(), reason=ended.reason))
            await self._append(*batch)
            self._usages.append(usage)
            self._emit(usage_frame(self._session.id, usage))
            if ended:
                return ended
            await self._run_calls()

    def _ended_by(self, completion: Completion) -> Ended | None:
        """Return how this answer ends the turn; None if it calls tools that are to be run."""
        if completion.finish_reason == "length":
            return Ended.by_limit(answer_cut(self._parts.config.loop, completion.reported.completion_tokens))
        return None if completion.tool_calls else Ended("completed")

    async def _model_ready(self) -> None:
        """Wait until the server has its model, and hold it against the baseline.

        Raises:
            ModelChanged: it is another model or template.
            ModelError: it does not answer.
        """
        with self._waiting():
            check = await self._parts.watch.current(self._on_event)
        session = self._session
        if difference := session.baseline.difference(check.model, check.template):
            raise ModelChanged(
                f"session {session.id} cannot go on: {difference}",
                hint=f"bxctl fork {session.id} --new-baseline goes on with the new one; bxctl export reads it as it is",
            )

    async def _request(self, text: str | None) -> tuple[Completion, Usage]:
        """Send one request; return the finished answer and its account. Nothing is recorded yet."""
        request = self._session.request(text)
        await self._check_room(request)
        return await self._ask(request, self._session.last_usage, self._parts.config.loop.max_completion_tokens)

    async def _ask(self, request: Request, before: Usage | None, max_tokens: int) -> tuple[Completion, Usage]:
        """Send a request; `before` is the one that it extends, whose tokens should be cached."""
        parts, session = self._parts, self._session
        history = await asyncio.to_thread(history_of, session)
        async with AsyncExitStack() as held:
            with self._waiting():
                hold = parts.keeper.hold(history, on_place=self._on_place)
                slot, condition = await held.enter_async_context(hold)
            async with self._in_time():
                completion = await parts.client.complete(self._asked(request, slot, max_tokens), self._on_event)
        return completion, await self._account(request, before, completion, slot, condition)

    def _asked(self, request: Request, slot: int | None, max_tokens: int) -> CompletionRequest:
        config, baseline = self._parts.config, self._session.baseline
        return CompletionRequest(
            messages=request.messages,
            tools=baseline.tools_json,
            slot=slot,
            max_tokens=max_tokens,
            sampling=config.model.sampling(),
            template_options=baseline.template.options,
        )

    async def _check_room(self, request: Request) -> None:
        """Refuse a step that would not fit before it is sent, with the numbers (SPEC 5).

        Raises:
            Ended: it would not fit.
        """
        room = self._parts.watch.context_tokens
        last, baseline = self._session.last_usage, self._session.baseline
        new_bytes = request.request_bytes - (last.request_bytes if last else -len(baseline.tools_json))
        if room is None or surely_fits(last, new_bytes, room):
            return
        if stop := context_stop(await self._count(request.messages), room):
            hint = f"bxctl compact {self._session.id} goes on from a summary; auto_compact in [loop] does so by itself"
            raise Ended(stop.reason, code=stop.reason, message=stop.message, hint=hint)

    async def _count(self, messages: Sequence[bytes]) -> int:
        """Return how many tokens a request of these messages has."""
        client, baseline = self._parts.client, self._session.baseline
        prompt = await client.render(messages, baseline.tools_json, options=baseline.template.options)
        return len(await client.tokenize(prompt))

    async def _account(
        self,
        request: Request,
        before: Usage | None,
        completion: Completion,
        slot: int | None,
        condition: SlotCondition,
    ) -> Usage:
        """Return the record of the request's tokens: what it should have cost, what it did, and why (SPEC 4.3)."""
        session, reported = self._session, completion.reported
        expected, loss, cause = await account(
            self._parts.client, session.baseline, before, request.messages, reported, condition
        )
        if cause:
            log.warning("loss session=%s tokens=%s cause=%s evidence=%r", session.id, loss, cause.name, cause.evidence)
        usage = usage_record(
            reported,
            at=now(),
            expected=expected,
            loss=loss,
            cause=cause,
            slot=slot,
            request_bytes=request.request_bytes,
            request_sha256=request.request_sha256,
        )
        self._parts.keeper.account(usage, condition)
        self._parts.tally.add(usage)
        return usage

    # --- tools --------------------------------------------------------------------------------------------------

    async def _run_calls(self) -> None:
        """Run the calls of the last answer, side by side where all only read; record each result, in call order.

        What must be asked is asked in call order too; no slot is held meanwhile, and the wall time stands still.

        Raises:
            Ended: a limit was reached; what was allowed before it has its result.
        """
        turn = self._session.open_turn
        assert turn is not None
        stop: Stop | None = None
        jobs: list[Job] = []
        for number, call in turn.pending:
            if stop := self._limits.call(call.name, call.arguments):
                break
            job = self._jobs[number] = self._calls.prepare(number, call)
            jobs.append(job)
        side_by_side = all(job.reads for job in jobs)
        for some in [jobs] if side_by_side else [[job] for job in jobs]:
            with self._waiting():
                for job in some:
                    await self._calls.permit(job)
            async with self._in_time(), asyncio.TaskGroup() as group:
                for job in some:
                    group.create_task(self._calls.run(job))
            for job in some:
                assert job.outcome is not None
                await self._record(job.number, job.call, job.outcome)
        if stop:
            raise Ended.by_limit(stop)

    async def _record(self, number: int, call: ToolCall, outcome: Outcome) -> None:
        self._emit(
            ToolResultFrame(
                session=self._session.id, call=number, name=call.name, ok=outcome.ok, content=outcome.content
            )
        )
        await self._append(
            ToolResult(
                at=now(),
                call=number,
                id=call.id,
                name=call.name,
                ok=outcome.ok,
                content=outcome.content,
                cut=outcome.cut,
                lossy=outcome.lossy,
                approval=outcome.approval,
            )
        )

    # --- the end ------------------------------------------------------------------------------------------------

    async def _close(self, reason: TurnEndReason, unfinished: Callable[[int], str]) -> None:
        """Make the log good for the next turn: a result for every call, the closing record, `turn_end`."""
        session = self._session
        while (turn := session.open_turn) and turn.pending:
            number, call = turn.pending[0]
            job = self._jobs.get(number)
            outcome = job.outcome if job else None
            await self._record(number, call, outcome or Outcome(ok=False, content=unfinished(number)))
        if turn is None or session.read_only:
            return
        end: list[Record] = [TurnEnd(at=now(), reason=reason)]
        if turn.after_result and not self._parts.watch.user_after_tool:
            text = f"(The turn ended: {reason}.)"
            end.insert(0, Assistant(at=now(), text=text, finish_reason="stop", origin="loopd"))
        await self._append(*end)

    def _not_run(self, number: int, ended: Ended) -> str:
        """Return the result of a call that the end of the turn left without one."""
        job = self._jobs.get(number)
        why = ended.message or f"the turn was {ended.reason}"
        if job is None or not job.begun:
            return f"Not run: {why}."
        return f"Not run to its end: {why}.{doubt('read' if job.reads else 'write')}"

    async def _append(self, *records: Record) -> None:
        """Write one batch; durable, and shown to the clients, on return."""
        await uninterrupted(self._append_and_show(records))

    async def _append_and_show(self, records: tuple[Record, ...]) -> None:
        session = self._session
        first = session.lines + 1
        await asyncio.to_thread(session.append, *records)
        for line, record in enumerate(records, first):
            value = record.model_dump(mode="json")
            self._emit(RecordFrame(session=session.id, epoch=session.epoch, line=line, record=value))

    def _summarise(self, ended: Ended, seconds: float) -> None:
        log.info(
            "turn session=%s reason=%s requests=%d prompt=%d evaluated=%d loss=%d seconds=%.3f%s",
            self._session.id,
            ended.reason,
            len(self._usages),
            self._usages[-1].prompt_tokens or 0 if self._usages else 0,
            sum((usage.prompt_tokens or 0) - (usage.cached_tokens or 0) for usage in self._usages),
            sum(usage.loss or 0 for usage in self._usages),
            seconds,
            f" error={ended.message!r}" if ended.message else "",
        )

    # --- waiting ------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Bound what is awaited by the turn's wall time.

        Raises:
            Ended: the time was over.
        """
        try:
            async with asyncio.timeout(self._limits.remaining_s(monotonic_s())) as deadline:
                yield
        except TimeoutError:
            stop = self._limits.time(monotonic_s())
            if not deadline.expired() or stop is None:
                raise
            raise Ended.by_limit(stop) from None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Leave what is waited for out of the turn's wall time."""
        self._limits.wait(monotonic_s())
        try:
            yield
        finally:
            self._limits.resume(monotonic_s())

    def _on_place(self, place: int) -> None:
        self._emit(Queued(session=self._session.id, place=place, reason="other conversations are answered first"))

    def _on_event(self, event: Event) -> None:
        session = self._session.id
        match event:
            case TextDelta(text):
                self._emit(Delta(session=session, text=sound(text)))
            case ReasoningDelta(text):
                self._emit(Reasoning(session=session, text=sound(text)))
            case Progress(cached, processed, total):
                self._emit(Prefill(session=session, cached=cached, processed=processed, total=total))
            case Loading(message):
                self._emit(Queued(session=session, place=0, reason=message))


def usage_frame(session_id: str, usage: Usage) -> UsageFrame:
    """Return what clients are shown of a request's account."""
    prompt, cached = usage.prompt_tokens, usage.cached_tokens
    known = usage.prefill_ms is not None and usage.decode_ms is not None
    return UsageFrame(
        session=session_id,
        prompt_tokens=prompt,
        cached_tokens=cached,
        evaluated=prompt - cached if prompt is not None and cached is not None else None,
        loss=usage.loss,
        cause=usage.cause.name if usage.cause else None,
        seconds=((usage.prefill_ms or 0) + (usage.decode_ms or 0)) / 1000 if known else None,
    )


def sound(text: str) -> str:
    """Return text that a log can hold: lone surrogates and NULs are replaced (SPEC 6)."""
    return clean(text, sys.maxsize).text


def _absorb_cancel() -> None:
    """Take back the cancel of this task: it has been answered by ending the turn."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
