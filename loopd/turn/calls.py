"""The calls of one answer: may it run, who says so, then the tool; each step is audited before the next (SPEC 6, 7)."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from loopd.errors import AuditError
from loopd.proto.canonical import sha256
from loopd.proto.frames import ApprovalRequest, ToolStarted
from loopd.proto.records import ToolCall
from loopd.tools.call import Call, Prepared
from loopd.tools.policy import Verdict, decide
from loopd.tools.port import Outcome
from loopd.tools.text import clean
from loopd.turn.approvals import Answer, Approvals
from loopd.turn.parts import Emit, Parts

log = logging.getLogger("loopd.calls")

_SHOWN_BYTES = 4096
_AUDITED_BYTES = 512


@dataclass(slots=True)
class Job:
    """One call on its way.

    Attributes:
        number: of the call in its session.
        call: as the model made it.
        what: what it means.
        allowed_by: the rule or the answer that allows it to run.
        approval: what the result says about that, where somebody was asked.
        begun: its intent is in the audit log: from here on it may have had an effect.
        outcome: its result, once it has one.
    """

    number: int
    call: ToolCall
    what: Call
    allowed_by: str | None = None
    approval: str | None = None
    begun: bool = False
    outcome: Outcome | None = None

    @property
    def reads(self) -> bool:
        """Whether it may run beside others."""
        return not isinstance(self.what, Prepared) or self.what.effect == "read"

    @property
    def tool(self) -> str:
        """The tool's full name; where the call means none, what the model has called."""
        return self.what.name if isinstance(self.what, Prepared) else clean(self.call.name, _AUDITED_BYTES).text

    def facts(self) -> dict[str, Any]:
        """Return what the audit log says about the call."""
        text, effect = self.call.arguments, "read"
        if isinstance(self.what, Prepared):
            text, effect = self.what.arguments_text, self.what.effect
        return {
            "call": self.number,
            "tool": self.tool,
            "effect": effect,
            "arguments": clean(text, _AUDITED_BYTES).text,
            "arguments_sha256": sha256(text.encode("utf-8", "surrogatepass")),
        }


class Calls:
    """Runs the calls of a session's turn.

    Args:
        parts: policy, registry and audit log, read anew at each call.
        session_id: whose calls they are.
        model: the alias of the model that makes them.
        emit: is given every frame.
        approvals: answers for what must be asked.
    """

    def __init__(self, parts: Parts, session_id: str, model: str, emit: Emit, approvals: Approvals) -> None:
        self._parts, self._session_id, self._model = parts, session_id, model
        self._emit, self._approvals = emit, approvals

    def prepare(self, number: int, call: ToolCall) -> Job:
        """Return what a call means now; counts how it was written."""
        what = self._parts.registry.prepare(call.name, call.arguments)
        self._parts.mends.add(self._model, what)
        return Job(number, call, what)

    async def permit(self, job: Job) -> None:
        """Find out whether the call may run, and ask somebody where the policy wants it; if not, it has its outcome.

        Who has allowed it, and for how long, is in the audit log when this returns.

        Raises:
            CancelledError: the turn was cancelled meanwhile; the call has its outcome.
        """
        if not isinstance(job.what, Prepared):
            return
        verdict = self._verdict(job.what)
        if verdict.decision == "ask":
            await self._ask(job, job.what, verdict)
        else:
            job.allowed_by = verdict.rule

    async def run(self, job: Job) -> None:
        """Run one call; whatever happens is its outcome.

        One that is not permitted, or whose intent cannot be audited, is not run (SPEC 7). A deny that has come into
        the policy since it was permitted stands.
        """
        if job.outcome is None and isinstance(job.what, Prepared):
            await self._hold_to_denies(job, job.what)
        if job.outcome is not None:
            return
        try:
            await self._audit("tool_call", job, rule=job.allowed_by)
        except AuditError as error:
            job.outcome = _unaudited(job, error)
            return
        job.begun = True
        name, arguments = job.call.name, job.call.arguments
        self._emit(ToolStarted(session=self._session_id, call=job.number, name=name, arguments=arguments))
        limits = self._parts.config.loop
        outcome = await self._parts.registry.run(
            job.what, timeout_s=limits.tool_timeout_s, max_bytes=limits.max_result_bytes
        )
        job.outcome = replace(outcome, approval=job.approval)
        try:
            await self._parts.audit("tool_end", session=self._session_id, call=job.number, tool=job.tool, ok=outcome.ok)
        except AuditError as error:
            self._log(job, error)

    # --- permission ---------------------------------------------------------------------------------------------

    def _verdict(self, what: Prepared) -> Verdict:
        return decide(self._parts.config.tools.policy, self._session_id, what.name, what.effect)

    async def _hold_to_denies(self, job: Job, what: Prepared) -> None:
        """Give the call its outcome where the policy denies it now."""
        verdict = self._verdict(what)
        if verdict.decision != "deny":
            return
        job.approval = f"denied by policy: {verdict.rule}"
        text = f"Not run: the policy of this device denies {job.tool} ({verdict.rule}). Do not call it again:"
        job.outcome = Outcome(ok=False, content=f"{text} go on without it.", approval=job.approval)
        try:
            await self._audit("tool_denied", job, rule=verdict.rule)
        except AuditError as error:
            self._log(job, error)

    async def _ask(self, job: Job, what: Prepared, verdict: Verdict) -> None:
        if known := self._approvals.granted(what.name, what.tool):
            job.allowed_by = job.approval = str(known)
            return
        answer = Answer("deny", "the turn was cancelled")
        try:
            answer = await self._approvals.ask(
                ApprovalRequest(
                    session=self._session_id,
                    call=job.number,
                    name=what.name,
                    arguments=clean(what.arguments_text, _SHOWN_BYTES).text,
                    effect=what.effect,
                    rule=verdict.rule,
                    seconds=self._parts.config.loop.approval_timeout_s,
                ),
                self._emit,
            )
        finally:
            await self._settle(job, what, verdict, answer)

    async def _settle(self, job: Job, what: Prepared, verdict: Verdict, answer: Answer) -> None:
        """Take an answer into effect; one that allows counts only when it is in the audit log."""
        job.approval = str(answer)
        if not answer.allows:
            text = f"Not run: {job.tool} must be allowed by a person, and it was {answer}. Do not repeat the call:"
            job.outcome = Outcome(
                ok=False, content=f"{text} ask what to do instead, or go on without it.", approval=job.approval
            )
        facts = {"decision": answer.choice, "reason": answer.reason, "uid": answer.uid, "pid": answer.pid}
        try:
            await self._audit("approval", job, rule=verdict.rule, **facts)
        except AuditError as error:
            self._log(job, error)
            job.outcome = job.outcome or _unaudited(job, error)
            return
        job.allowed_by = job.approval
        if answer.choice == "session":
            self._approvals.grant(what.name, what.tool, answer)

    # --- the audit log ------------------------------------------------------------------------------------------

    async def _audit(self, event: str, job: Job, **more: Any) -> None:  # noqa: ANN401 - any JSON value
        await self._parts.audit(event, session=self._session_id, **job.facts(), **more)

    def _log(self, job: Job, error: AuditError) -> None:
        log.error("audit session=%s call=%d error=%r", self._session_id, job.number, error.message)


def _unaudited(job: Job, error: AuditError) -> Outcome:
    return Outcome(ok=False, content=f"Not run: {error.message}.", approval=job.approval)
