"""What the daemon has cost since it started."""

from loopd.model.tally import Tally
from tests.channel.test_why import usage


def test_nothing_is_a_tally_without_a_rate() -> None:
    assert Tally().describe()["hit_rate"] is None


def test_hits_and_losses_are_added_up_by_cause() -> None:
    tally = Tally()
    for one in (
        usage(100, 0, 0),
        usage(200, 150, 150),
        usage(300, 100, 250, "slot_taken"),
        usage(300, 50, 250, "slot_taken"),
        usage(None, None, None),
    ):
        tally.add(one)
    shown = tally.describe()
    assert (shown["requests"], shown["without_numbers"]) == (5, 1)
    assert (shown["prompt_tokens"], shown["cached_tokens"], shown["evaluated_tokens"]) == (900, 300, 600)
    assert (shown["expected_tokens"], shown["lost_tokens"], shown["hit_rate"]) == (650, 350, 0.4615)
    assert shown["losses"] == [{"cause": "slot_taken", "requests": 2, "tokens": 350, "seconds": 3.1}]
