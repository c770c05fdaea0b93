import pytest

from loopd.errors import UsageError
from loopd.proto.ids import MAX_KEY_CHARS, check_session_id, is_session_id, new_key, new_session_id


@pytest.mark.parametrize("text", ["a", "0", "a-b_c", "9" * 64, "s1234567890"])
def test_an_id_is_1_to_64_of_lower_case_letters_digits_and_two_marks(text: str) -> None:
    assert is_session_id(text)
    assert check_session_id(text) == text


@pytest.mark.parametrize(
    "text", ["", "-a", "_a", ".a", "A", "a" * 65, "a/b", "..", "a\0", "a\n", "a b", "ä", "٣", "a.jsonl"]
)
def test_anything_else_is_refused_and_the_error_is_one_line(text: str) -> None:
    assert not is_session_id(text)
    with pytest.raises(UsageError, match="1-64 of") as caught:
        check_session_id(text)
    assert "\n" not in str(caught.value)


def test_a_very_long_id_is_not_repeated_whole() -> None:
    with pytest.raises(UsageError) as caught:
        check_session_id("A" * 10_000)
    assert len(str(caught.value)) < 300


def test_fresh_ids_and_keys_are_valid_and_differ() -> None:
    ids, keys = {new_session_id() for _ in range(100)}, {new_key() for _ in range(100)}
    assert len(ids) == len(keys) == 100
    assert all(is_session_id(text) and len(text) == 10 for text in ids)
    assert all(len(key) <= MAX_KEY_CHARS for key in keys)
