"""What a client that joins in mid-turn must be told besides the records: the step so far. Pure (SPEC 8)."""

from loopd.proto.frames import (
    Accepted,
    Compacting,
    Delta,
    Prefill,
    Queued,
    Reasoning,
    RecordFrame,
    ServerFrame,
    ToolStarted,
)


class Progress:
    """Folds the live frames of one turn into the few that bring a newcomer to the same view.

    What a record holds is dropped when the record comes: from then on it is part of the history.
    """

    def __init__(self) -> None:
        self._accepted: Accepted | None = None
        self._waiting: Queued | Compacting | Prefill | None = None
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self._calls: dict[int, ToolStarted] = {}

    def note(self, frame: ServerFrame) -> None:
        """Take one frame of the turn, in the order in which clients see them."""
        match frame:
            case Accepted():
                self._accepted = frame
            case Queued() | Compacting() | Prefill():
                self._waiting = frame
            case Reasoning():
                self._reasoning.append(frame.text)
            case Delta():
                self._text.append(frame.text)
            case ToolStarted():
                self._calls[frame.call] = frame
            case RecordFrame():
                self._recorded(frame)
            case _:
                pass

    def frames(self, session: str) -> list[ServerFrame]:
        """Return the frames that show the turn as far as it has come and is not recorded yet."""
        found: list[ServerFrame] = [frame for frame in (self._accepted, self._waiting) if frame is not None]
        if self._reasoning:
            found.append(Reasoning(session=session, text="".join(self._reasoning)))
        if self._text:
            found.append(Delta(session=session, text="".join(self._text)))
        return [*found, *self._calls.values()]

    def _recorded(self, frame: RecordFrame) -> None:
        kind = frame.record.get("type")
        if kind == "tool_result":
            self._calls.pop(frame.record["call"], None)
        elif kind in {"assistant", "session_start"}:
            self._waiting = None
            self._reasoning.clear()
            self._text.clear()
