"""Compaction: the model writes a summary, and the session goes on from it in its next epoch (SPEC 2.1).

The summary is asked for as one more request of the old epoch, so that all before it is cached; nothing of it is
written there. Where the history does not fit into the context any more, its first part that does is summarised.
The new epoch's first request holds the same system prompt and tools, and the summary in place of the history.
"""

import asyncio
import logging
from typing import Any

from loopd.clock import monotonic_s
from loopd.errors import LoopdError, ModelRejected, NotCompacted
from loopd.model.client import Completion, Event, ReasoningDelta, TextDelta
from loopd.proto.frames import Compacting, RecordFrame
from loopd.proto.records import Summary, Usage
from loopd.proto.usage import expected_tokens
from loopd.session.replay import Request, request_of
from loopd.turn.limits import nearly_full, summary_tokens
from loopd.turn.loop import Ended, Turn, sound, usage_frame
from loopd.turn.parts import uninterrupted

log = logging.getLogger("loopd.compact")

QUESTION = (
    "Our conversation has become too long to be kept. Write a summary from which you can go on without it: what I"
    " wanted and why, what was decided, the names, numbers and other facts that may be needed, what was tried, and"
    " what is still open. Write the summary and nothing else."
)


class Compaction(Turn):
    """The one request of a session that no turn makes. It owns the session while it runs, between two turns."""

    async def estimate(self) -> dict[str, Any]:
        """Return what a compaction would cost, in tokens and, from the last request's speed, in seconds.

        `evaluated_tokens` is what the summary request adds to what is cached, `next_prompt_tokens` at most what the
        first request of the new epoch has before the person's text; `left_out_messages` do not fit any more and
        would not be in the summary. What is not known is None.

        Raises:
            NotCompacted: there is nothing to summarise, or nothing that fits.
            ModelError: the model server does not answer, or has another model.
        """
        await self._model_ready()
        request, left_out = await self._question()
        session, most = self._session, self._most()
        before = session.last_usage if not left_out else None
        prompt = await self._counted(request)
        expected = expected_tokens(before, prompt) if before else None
        evaluated = prompt - (expected or 0) if prompt is not None else None
        head = await self._counted(request_of([*request.messages[: self._heads()], request.messages[-1]]))
        return {
            "session": session.id,
            "epoch": session.epoch,
            "prompt_tokens": prompt,
            "evaluated_tokens": evaluated,
            "summary_tokens": most,
            "next_prompt_tokens": head + most if head is not None else None,
            "context_tokens": self._parts.watch.context_tokens,
            "left_out_messages": left_out,
            "seconds": _seconds(session.last_usage, evaluated, most),
        }

    async def run_to_next_epoch(self, **who: Any) -> dict[str, Any]:  # noqa: ANN401 - facts for the audit log
        """Have the summary written and begin the next epoch; when it returns, that survives a power cut.

        Until then nothing is changed; a cancel, an error or a crash leaves the epoch as it is.

        Args:
            who: asked for it.

        Raises:
            NotCompacted: there is nothing to summarise, it does not fit, took too long, or no text came of it.
            SessionError: the new epoch cannot be written.
            AuditError: it cannot be audited.
            ModelError: the model server failed, or has another model.
        """
        began_s = monotonic_s()
        session = self._session
        try:
            await self._model_ready()
            request, left_out = await self._question()
            self._emit(Compacting(session=session.id, epoch=session.epoch + 1))
            before = None if left_out else session.last_usage
            completion, usage = await self._ask(request, before, self._most())
        except Ended as ended:
            raise NotCompacted(f"session {session.id}: {ended.message}", hint=ended.hint) from None
        summary = Summary(request=QUESTION, text=_text_of(session.id, completion))
        await self._parts.audit("session_compacted", session=session.id, epoch=session.epoch + 1, **who)
        await uninterrupted(self._begin(summary, usage))
        seconds = monotonic_s() - began_s
        log.info(
            "compacted session=%s epoch=%d prompt=%s completion=%s loss=%s left_out=%d seconds=%.3f",
            session.id,
            session.epoch,
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.loss,
            left_out,
            seconds,
        )
        return {
            "session": session.id,
            "epoch": session.epoch,
            "summary": summary.text,
            "cut": completion.finish_reason == "length",
            "left_out_messages": left_out,
            "seconds": round(seconds, 3),
        }

    async def make_room(self, text: str) -> None:
        """Compact if the context is nearly full, or would not take the next text. A failure is logged, and no more.

        The turn that follows meets the same model server and the same context, and says what is wrong with them.
        """
        try:
            await self._model_ready()
            if await self._is_short_of_room(text):
                await self.run_to_next_epoch()
        except NotCompacted as error:
            log.info("not_compacted session=%s reason=%r", self._session.id, error.message)
        except LoopdError as error:
            log.warning("not_compacted session=%s reason=%r", self._session.id, error.message)

    async def _is_short_of_room(self, text: str) -> bool:
        session, room = self._session, self._parts.watch.context_tokens
        if room is None or session.lines == 1:
            return False
        if nearly_full(session.last_usage, room):
            return True
        try:
            await self._check_room(session.request(text))
        except Ended:
            return True
        return False

    # --- the request ----------------------------------------------------------------------------------------------

    async def _question(self) -> tuple[Request, int]:
        """Return the request for a summary, and how many messages at the end of the history it leaves out.

        Raises:
            NotCompacted: nothing was said in this epoch, or not even its beginning fits.
        """
        session = self._session
        whole = session.request(QUESTION)
        if session.lines == 1:
            raise NotCompacted(f"nothing was said in session {session.id} since its last summary")
        *history, question = whole.messages
        if await self._fits(whole):
            return whole, 0
        ends = [end for end in range(self._heads() + 1, len(history)) if self._may_end(history, end)]
        good, bad = -1, len(ends)
        while bad - good > 1:
            middle = (good + bad) // 2
            if await self._fits(request_of([*history[: ends[middle]], question])):
                good = middle
            else:
                bad = middle
        if good < 0:
            raise NotCompacted(
                f"not even the beginning of session {session.id} leaves room for a summary in the model's context of"
                f" {self._parts.watch.context_tokens} tokens",
                hint="serve the model with a larger context_tokens in [model]",
            )
        end = ends[good]
        return request_of([*history[:end], question]), len(history) - end

    async def _fits(self, request: Request) -> bool:
        room = self._parts.watch.context_tokens
        tokens = await self._counted(request) if room is not None else None
        return room is None or tokens is None or tokens + self._most() <= room

    async def _counted(self, request: Request) -> int | None:
        """Return the request's tokens; None where the server cannot tell."""
        try:
            return await self._count(request.messages)
        except ModelRejected:
            return None

    def _may_end(self, history: list[bytes], end: int) -> bool:
        """Tell whether a user message may follow the first `end` messages, in any template."""
        last, following = history[end - 1], history[end]
        if last.endswith(b',"role":"assistant"}'):
            return True
        is_result = b'"role":"tool"' in last and b'"role":"tool"' not in following
        return is_result and self._parts.watch.user_after_tool

    def _heads(self) -> int:
        """Return how many messages stand before the first one of a person."""
        baseline = self._session.baseline
        return 1 if baseline.system_prompt and baseline.system == "message" else 0

    def _most(self) -> int:
        return summary_tokens(self._parts.config.loop, self._parts.watch.context_tokens)

    async def _begin(self, summary: Summary, usage: Usage) -> None:
        session = self._session
        await asyncio.to_thread(session.begin_epoch, summary, usage)
        self._emit(usage_frame(session.id, usage))
        value = session.start.model_dump(mode="json")
        self._emit(RecordFrame(session=session.id, epoch=session.epoch, line=1, record=value))

    def _on_event(self, event: Event) -> None:
        """Show the progress and not the text: it is no answer of the conversation."""
        if not isinstance(event, TextDelta | ReasoningDelta):
            super()._on_event(event)


def _text_of(session_id: str, completion: Completion) -> str:
    """Return the summary that the model wrote.

    Raises:
        NotCompacted: it wrote none.
    """
    text = sound(completion.text).strip()
    if not text:
        wrote = "called a tool" if completion.tool_calls else "wrote nothing"
        raise NotCompacted(
            f"session {session_id}: the model was asked for a summary and {wrote}",
            hint="try it once more, or after another message",
        )
    return text


def _seconds(last: Usage | None, evaluated: int | None, summary: int) -> float | None:
    """Return about how long the request takes, at the speed of the last one; None where that is not known."""
    if last is None or None in {last.prompt_tokens, last.cached_tokens, last.prefill_ms, last.decode_ms, evaluated}:
        return None
    assert last.prompt_tokens is not None
    assert last.cached_tokens is not None
    prefilled, decoded = last.prompt_tokens - last.cached_tokens, last.completion_tokens
    if not prefilled or not decoded:
        return None
    prefill_ms = (last.prefill_ms or 0) / prefilled * (evaluated or 0)
    return round((prefill_ms + (last.decode_ms or 0) / decoded * summary) / 1000, 1)
