"""Short ways to make records and sessions for the tests of the store."""

from pathlib import Path
from typing import Any

from loopd.config import LoopTable
from loopd.home import Home
from loopd.proto.model_identity import ModelIdentity, TemplateIdentity
from loopd.proto.records import (
    Assistant,
    Record,
    Summary,
    ToolCall,
    ToolResult,
    TurnEnd,
    TurnEndReason,
    Usage,
    User,
)
from loopd.session.baseline import Baseline
from loopd.session.replay import Request, tool_call
from loopd.session.store import Session, dir_for

AT = "2026-12-01T14:00:00.000000Z"
LIMITS = LoopTable()
QUESTION = "Write a summary."
CLOCK = tool_call("call_0", "call_tool", '{"name":"clock","arguments":{}}')
FIND = tool_call("call_1", "find_tool", '{"query":"read the clock"}')


def make_baseline(**changes: Any) -> Baseline:
    values: dict[str, Any] = {
        "system_prompt": "You are brief. Grüezi, 你好.",
        "tools": ({"type": "function", "function": {"name": "find_tool", "parameters": {"type": "object"}}},),
        "model": ModelIdentity(alias="small", sha256="sha256:" + "1" * 64, size=98_362_432),
        "template": TemplateIdentity(name="chatml-tools", sha256="sha256:" + "2" * 64, options={}),
    }
    return Baseline(**(values | changes))


def make_home(path: Path) -> Home:
    home = Home(path)
    home.make()
    return home


def create(home: Home, session_id: str = "s1", **changes: Any) -> Session:
    return Session.create(home, session_id, make_baseline(**changes), owner_uid=1000, slot=0, limits=LIMITS)


def reopen(session: Session, home: Home) -> Session:
    session.close()
    return Session.open(home, session.id, limits=LIMITS)


def log_of(home: Home, session_id: str = "s1") -> Path:
    return dir_for(home, session_id) / "0.jsonl"


def user(text: str, key: str) -> User:
    return User(at=AT, text=text, key=key)


def answer(text: str, *calls: ToolCall, reasoning: str = "") -> Assistant:
    finish_reason = "tool_calls" if calls else "stop"
    return Assistant(
        at=AT, text=text, reasoning=reasoning, tool_calls=calls, finish_reason=finish_reason, origin="model"
    )


def closing(text: str = "(The turn was interrupted.)") -> Assistant:
    return Assistant(at=AT, text=text, finish_reason="stop", origin="loopd")


def end(reason: TurnEndReason = "completed") -> TurnEnd:
    return TurnEnd(at=AT, reason=reason)


def result(call: int, of: ToolCall, content: str = "ok") -> ToolResult:
    return ToolResult(at=AT, call=call, id=of.id, name=of.name, ok=True, content=content)


def usage(request: Request, prompt_tokens: int | None = 20, completion_tokens: int | None = 5) -> Usage:
    return Usage(
        at=AT,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=0,
        expected=0,
        loss=0,
        cause=None,
        prefill_ms=1.5,
        decode_ms=2.0,
        first_token_ms=None,
        slot=0,
        request_bytes=request.request_bytes,
        request_sha256=request.request_sha256,
    )


def step(session: Session, text: str | None, *calls: ToolCall, key: str = "", reply: str = "Yes.") -> list[Record]:
    """Return the batch of one finished request."""
    asked: list[Record] = [user(text, key or _key(session))] if text is not None else []
    return [*asked, answer(reply, *calls), usage(session.request(text))]


def _key(session: Session) -> str:
    return f"key-{session.lines}" if session.epoch == 0 else f"key-{session.epoch}-{session.lines}"


def compact(session: Session, text: str = "They asked for the time.") -> None:
    """Go on in the next epoch from a summary."""
    summary = Summary(request=QUESTION, text=text)
    session.begin_epoch(summary, usage(session.request(QUESTION), 99, 7))


def say(session: Session, text: str = "What time is it?", *, key: str = "") -> None:
    """Append a whole turn without tools."""
    session.append(*step(session, text, key=key), end())


def say_with_tool(session: Session, text: str = "What time is it?", call: ToolCall = CLOCK) -> None:
    """Append a whole turn with one tool call."""
    session.append(*step(session, text, call))
    give(session)
    session.append(*step(session, None), end())


def give(session: Session, content: str = "ok") -> None:
    """Append the result of the first pending call."""
    turn = session.open_turn
    assert turn is not None
    number, call = turn.pending[0]
    session.append(result(number, call, content))


def records_of(session: Session) -> list[Record]:
    return [record for _, record in session.records()]
