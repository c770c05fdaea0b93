"""Questions to people about calls: the turn asks, clients answer, and the first answer counts (SPEC 6, 8).

Data flows one way: the turn emits the question and awaits its answer here; whoever takes the clients' frames puts
the answer in. A question outlives the clients that it was shown to; it ends by an answer, its time, or the turn.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from loopd.clock import monotonic_s
from loopd.errors import NotPending
from loopd.proto.frames import ApprovalDecided, ApprovalRequest, Choice, ServerFrame
from loopd.tools.port import Tool

_WORDS: dict[Choice, str] = {"once": "allowed once", "session": "allowed for the session", "deny": "denied"}


@dataclass(frozen=True, slots=True)
class Answer:
    """How a question ended.

    Attributes:
        choice: once and session allow; `deny` also where nobody has answered.
        reason: who or what decided, in words for a person.
        uid: who answered, as the kernel says; None where nobody did.
        pid: by which process.
    """

    choice: Choice
    reason: str
    uid: int | None = None
    pid: int | None = None

    @property
    def allows(self) -> bool:
        """Whether the call may run."""
        return self.choice != "deny"

    def __str__(self) -> str:
        return f"{_WORDS[self.choice]}: {self.reason}" if self.uid is None else f"{_WORDS[self.choice]} {self.reason}"


@dataclass(slots=True)
class _Question:
    request: ApprovalRequest
    ends_at_s: float
    answer: asyncio.Future[Answer]


class Approvals:
    """What waits for an answer in one open session, and which tools it may use until it is closed.

    Args:
        reachable: tells whether somebody is attached who can answer.
    """

    def __init__(self, reachable: Callable[[], bool]) -> None:
        self._reachable = reachable
        self._pending: dict[int, _Question] = {}
        self._decided: dict[int, Answer] = {}
        self._granted: dict[str, tuple[Tool, Answer]] = {}

    # --- the turn's side ----------------------------------------------------------------------------------------

    async def ask(self, request: ApprovalRequest, emit: Callable[[ServerFrame], None]) -> Answer:
        """Ask about a call and return the answer, after at most `request.seconds`.

        Args:
            request: the question.
            emit: is given it for the clients, and how it ended.

        Raises:
            CancelledError: the turn was cancelled; that denies the call.
        """
        if not self._reachable():
            return Answer("deny", "nobody was there who could allow it")
        question = _Question(request, monotonic_s() + request.seconds, asyncio.get_running_loop().create_future())
        self._pending[request.call] = question
        answer = Answer("deny", "the turn was cancelled")
        try:
            emit(request)
            await asyncio.wait({question.answer}, timeout=request.seconds)
            if question.answer.done():
                answer = question.answer.result()
            else:
                answer = Answer("deny", f"nobody answered within {request.seconds:g} s (approval_timeout_s)")
        finally:
            del self._pending[request.call]
            self._decided[request.call] = answer
            emit(
                ApprovalDecided(
                    session=request.session,
                    call=request.call,
                    name=request.name,
                    decision=answer.choice,
                    uid=answer.uid,
                    reason=answer.reason,
                )
            )
        return answer

    def granted(self, name: str, tool: Tool) -> Answer | None:
        """Return the answer that allows this tool until the session is closed; None where there is none.

        A tool that has become another one under the same name is not the one that was allowed.
        """
        known, answer = self._granted.get(name, (None, None))
        return answer if known == tool else None

    def grant(self, name: str, tool: Tool, answer: Answer) -> None:
        """Allow a tool until the session is closed."""
        self._granted[name] = (tool, answer)

    # --- the clients' side --------------------------------------------------------------------------------------

    def pending(self) -> list[ApprovalRequest]:
        """Return the questions that wait for an answer, with the time that is left."""
        now_s = monotonic_s()
        return [
            question.request.model_copy(update={"seconds": max(0.0, round(question.ends_at_s - now_s, 1))})
            for question in self._pending.values()
            if not question.answer.done()
        ]

    def answer(self, call: int, choice: Choice, *, uid: int, pid: int) -> None:
        """Answer a question.

        Args:
            call: the number of the call.
            choice: what is decided.
            uid: who decides.
            pid: by which process.

        Raises:
            NotPending: the call waits for no answer; where somebody was quicker, it says who and what.
        """
        question = self._pending.get(call)
        if question is not None and not question.answer.done():
            question.answer.set_result(Answer(choice, f"by user {uid}", uid, pid))
            return
        known = question.answer.result() if question else self._decided.get(call)
        why = f"was already {known}" if known else "waits for no approval"
        raise NotPending(f"call {call} {why}", hint="bxctl approve SESSION shows what waits")
