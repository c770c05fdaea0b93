import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopd.proto.canonical import canonical, object_text, sha256

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_what_is_written_is_read_again(value: Any) -> None:
    assert json.loads(canonical(value)) == value


@given(JSON)
def test_writing_what_was_read_gives_the_same_bytes(value: Any) -> None:
    data = canonical(value)
    assert canonical(json.loads(data)) == data


@given(st.lists(st.tuples(TEXT, JSON), unique_by=lambda item: item[0], max_size=6), st.randoms())
def test_the_order_of_insertion_does_not_matter(items: list[tuple[str, Any]], shuffler: Any) -> None:
    shuffled = list(items)
    shuffler.shuffle(shuffled)
    assert canonical(dict(shuffled)) == canonical(dict(items))


@given(JSON)
def test_it_is_one_line_of_utf8(value: Any) -> None:
    data = canonical(value)
    assert b"\n" not in data
    assert b"\0" not in data
    data.decode("utf-8")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"b": 1, "a": [True, None]}, b'{"a":[true,null],"b":1}'),
        ({"é": "✓\u2028"}, '{"é":"✓\u2028"}'.encode()),
        ({"Z": 0, "a": 0, "É": 0, "𝕫": 0, "\ufffd": 0}, '{"Z":0,"a":0,"É":0,"\ufffd":0,"𝕫":0}'.encode()),
        ('\x00\x1f\x7f"\\/', b'"\\u0000\\u001f\x7f\\"\\\\/"'),
        ([1.0, 0.1, 1e16, 1e-7, -0.0, 10**30], b"[1.0,0.1,1e+16,1e-07,-0.0,1000000000000000000000000000000]"),
    ],
)
def test_the_bytes_are_these_for_ever(value: Any, expected: bytes) -> None:
    assert canonical(value) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "\ud800", {"\udfff": 1}])
def test_what_utf8_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"JSON|surrogate"):
        canonical([value])


def test_what_is_no_json_value_is_refused() -> None:
    with pytest.raises(TypeError):
        canonical({1, 2})


def test_a_hash_names_its_algorithm() -> None:
    assert sha256(b"") == "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", "{}"),
        (' { "z" : 1 , "a" : { "y" : 2.50 } } \n', '{"z":1,"a":{"y":2.5}}'),
        ('{"ü":"\\u00fc\\ud83d\\ude00"}', '{"ü":"ü😀"}'),
        ('{"a":1,"a":2}', '{"a":2}'),
        ('{"a":\u00a01}', None),
        ("", None),
        ("null", None),
        ("[{}]", None),
        ('"{}"', None),
        ('{"a":', None),
        ('{"a":1}}', None),
        ('{"a":NaN}', None),
        ('{"a":-Infinity}', None),
        ('{"a":1e999}', None),
        ('{"a":"\\ud800"}', None),
        ('{"a":' + "9" * 5000 + "}", None),
        ("{" * 100_000, None),
    ],
)
def test_arguments_are_one_object_in_the_order_of_the_model_or_nothing(text: str, expected: str | None) -> None:
    assert object_text(text) == expected


@given(st.dictionaries(TEXT, JSON, max_size=5))
def test_compact_arguments_stay_as_they_are(value: dict[str, Any]) -> None:
    compact = object_text(json.dumps(value))
    assert compact is not None
    assert object_text(compact) == compact
    assert list(json.loads(compact)) == list(value)
