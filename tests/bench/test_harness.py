import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench.harness import Row, at_least, at_most, show, write


@pytest.mark.parametrize(
    ("row", "goal", "met"),
    [
        (at_most("a", 2.5, "ratio", 2.5, reference="r"), "<= 2.5", True),
        (at_most("a", 2.6, "ratio", 2.5, reference="r"), "<= 2.5", False),
        (at_least("a", 0.8, "ratio", 0.8, reference="r"), ">= 0.8", True),
        (at_least("a", 0.7, "ratio", 0.8, reference="r"), ">= 0.8", False),
        (Row("a", 1.0, "%"), "", None),
    ],
)
def test_a_row_tells_its_goal_and_whether_it_is_met(row: Row, goal: str, met: bool | None) -> None:
    assert (row.goal, row.met) == (goal, met)


def test_the_file_holds_every_row_with_its_six_fields(tmp_path: Path) -> None:
    path = tmp_path / "build" / "bench.json"
    write([at_most("a", 1.0, "ms", 2, reference="r"), Row("b", 3.0, "%")], path)
    assert json.loads(path.read_text()) == [
        {"name": "a", "value": 1.0, "unit": "ms", "goal": "<= 2", "met": True, "reference": "r"},
        {"name": "b", "value": 3.0, "unit": "%", "goal": "", "met": None, "reference": ""},
    ]


def test_the_table_shows_a_goal_that_is_not_met() -> None:
    screen = io.StringIO()
    show([at_most("slow thing", 9.0, "ms", 2, reference="r")], Console(file=screen, width=120))
    line = next(line for line in screen.getvalue().splitlines() if "slow thing" in line)
    assert "NO" in line
