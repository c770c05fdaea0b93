"""Durable appends: a turn's batch through the session against one bare write and fdatasync of the same bytes."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from loopd.home import Home
from loopd.proto.records import encode_record
from loopd.session.store import Session
from tests.bench.conversation import BASELINE, LIMITS, turns
from tests.bench.harness import BUILD, Row, alternating, at_least

ROUNDS = 500


def run() -> list[Row]:
    BUILD.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=BUILD) as directory:
        home = Home(Path(directory))
        home.make()
        session = Session.create(home, "bench", BASELINE, owner_uid=0, limits=LIMITS)
        bare = os.open(home.path / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        batches = list(turns(ROUNDS))
        ours, theirs = iter(batches), iter([b"".join(map(encode_record, batch)) for batch in batches])

        def write() -> None:
            os.write(bare, next(theirs))
            os.fdatasync(bare)

        ours_s, bare_s = alternating(lambda: session.append(*next(ours)), write, ROUNDS)
        session.close()
        os.close(bare)
    return [
        at_least(
            "durable appends, share of bare",
            bare_s / ours_s,
            "ratio",
            0.8,
            reference=f"write + fdatasync of the same bytes: {1 / bare_s:,.0f}/s, appends: {1 / ours_s:,.0f}/s",
        )
    ]
