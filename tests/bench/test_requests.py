from pathlib import Path

import pytest

from tests.bench.requests import OWN, Request, answerable, fingerprint, read, reworded, wilson


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('Please delete the file "a b.txt" from my Drive', "delete file drive"),
        ("what's 17.5% of 2340", "what's 17.5% of 2340"),
        ("show me all the photos of May", "show all photos"),
    ],
)
def test_a_request_is_reworded_by_what_it_says_alone(text: str, left: str) -> None:
    assert reworded(text) == left


def test_a_right_tool_without_a_server_is_that_of_any() -> None:
    request = Request("x", frozenset({".read", "git.log"}))
    assert [request.met_by(name) for name in ("a.read", "git.log", "a.log", "read")] == [True, True, False, False]
    assert answerable([request, Request("y", frozenset({".none"}))], ["b.read"]) == [request]


def test_the_halves_depend_on_the_texts_alone() -> None:
    requests = [Request(text, frozenset()) for text in ("a", "b", "c", "d", "e")]
    assert [request.held_out for request in requests] == [False, False, False, False, True]
    assert fingerprint(requests) == fingerprint(requests[::-1]) == "3f79bb7b435b0532"


def test_the_interval_is_wilsons() -> None:
    assert [round(end, 1) for end in wilson(19, 20)] == [76.4, 99.1]
    assert [round(end, 1) for end in wilson(0, 10)] == [0.0, 27.8]
    assert [round(end, 1) for end in wilson(10, 10)] == [72.2, 100.0]


def test_the_projects_own_requests_are_well_formed() -> None:
    own = read(OWN)
    assert len({request.text for request in own}) == len(own)
    assert all(request.right and request.model_words for request in own)
    assert Path(OWN).name == "requests.json"
