"""A conversation of any length, as the daemon would have recorded it."""

from collections.abc import Iterator
from pathlib import Path

from loopd.clock import now
from loopd.config import DEFAULT_SYSTEM_PROMPT, LoopTable
from loopd.home import Home
from loopd.proto.model_identity import ModelIdentity, TemplateIdentity
from loopd.proto.records import Assistant, Record, TurnEnd, Usage, User, encode_record
from loopd.session.baseline import Baseline
from loopd.session.replay import Replay
from loopd.session.store import Session, dir_for
from loopd.tools.meta import DEFINITIONS

RECORDS_A_TURN = 4
LIMITS = LoopTable()
BASELINE = Baseline(
    system_prompt=DEFAULT_SYSTEM_PROMPT,
    tools=DEFINITIONS,
    model=ModelIdentity(alias="bench", sha256=None, size=None),
    template=TemplateIdentity(name="bench", sha256="sha256:" + "0" * 64, options={}),
)


def turns(count: int) -> Iterator[tuple[Record, ...]]:
    """The batches of `count` turns without tools: each some 1,100 bytes, the answer about a hundred words."""
    replay = Replay(BASELINE)
    for number in range(count):
        user = User(
            at=now(), text=f"Question {number}: how warm is the cellar, and is that usual?", key=f"key-{number}"
        )
        request = replay.request(user.text)
        answer = Assistant(
            at=now(),
            text=f"Answer {number}. " + "The cellar is at twelve degrees, as it mostly is in winter. " * 6,
            reasoning="",
            tool_calls=(),
            finish_reason="stop",
            origin="model",
        )
        usage = Usage(
            at=now(),
            prompt_tokens=100 * number,
            completion_tokens=90,
            cached_tokens=100 * number,
            expected=100 * number,
            loss=0,
            cause=None,
            prefill_ms=12.5,
            decode_ms=900.25,
            first_token_ms=20.0,
            slot=0,
            request_bytes=request.request_bytes,
            request_sha256=request.request_sha256,
        )
        batch = (user, answer, usage, TurnEnd(at=now(), reason="completed"))
        for record in batch:
            replay.add(record)
        yield batch


def recorded(home: Home, session_id: str, count: int) -> Path:
    """Make a session of `count` turns and return its log."""
    home.make()
    Session.create(home, session_id, BASELINE, owner_uid=0, limits=LIMITS).close()
    log = dir_for(home, session_id) / "0.jsonl"
    with log.open("ab") as file:
        file.writelines(encode_record(record) for batch in turns(count) for record in batch)
    return log
