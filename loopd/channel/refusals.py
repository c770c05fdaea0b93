"""Which sessions are refused and why: found by one pass at start, then at each open (SPEC 2.2/8)."""

import asyncio
import logging

from loopd.errors import SessionError, SessionNotFound
from loopd.home import Home
from loopd.session import reader

logger = logging.getLogger(__name__)


class Refusals:
    """The reasons by session id. One torn log refuses one session; the daemon serves the rest."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._reasons: dict[str, str] = {}
        self._checked = asyncio.Event()

    @property
    def checked(self) -> bool:
        """Whether the pass at start has been through all sessions."""
        return self._checked.is_set()

    async def check_all(self) -> None:
        """Verify every session, one after another in a thread."""
        try:
            for summary in await asyncio.to_thread(reader.summaries, self._home):
                await self.check(summary.id)
        except Exception:  # the end of a task: the sessions are checked again as they are opened
            logger.exception("check_failed")
        self._checked.set()

    async def check(self, session_id: str) -> None:
        """Verify one session and remember what is found."""
        try:
            verdict = await asyncio.to_thread(reader.verify, self._home, session_id)
        except SessionNotFound:
            self.forget(session_id)
        except SessionError as error:
            self.note(session_id, error)
        else:
            if verdict.faults:
                self.note(session_id, verdict.faults[0])
            else:
                self.forget(session_id)

    def note(self, session_id: str, error: SessionError) -> None:
        """Remember a refusal; it is logged once."""
        if self._reasons.get(session_id) != error.message:
            logger.warning("session_refused session=%s why=%s", session_id, error.message)
        self._reasons[session_id] = error.message

    def forget(self, session_id: str) -> None:
        """The session is good again, or gone."""
        self._reasons.pop(session_id, None)

    async def current(self, *, wait_s: float) -> dict[str, str]:
        """Return the reasons by id, after at most `wait_s` for the pass at start; the refused are looked at anew."""
        try:
            await asyncio.wait_for(self._checked.wait(), wait_s)
        except TimeoutError:
            pass
        else:
            for session_id in list(self._reasons):
                await self.check(session_id)
        return dict(sorted(self._reasons.items()))

    def known(self, session_id: str) -> str | None:
        """Return why the session is refused, as far as that is known; None if it is not."""
        return self._reasons.get(session_id)
