import pytest

from loopd.tools.synonyms import understood


@pytest.mark.parametrize(
    ("asked", "tool"),
    [
        ("get rid of", "delete"),
        ("got rid of", "remove"),
        ("turn off", "disable"),
        ("wrote down", "notes"),
        ("copied", "duplicate"),
        ("stopping", "halt"),
        ("queries", "search"),
        ("made", "create"),
        ("folders", "directory"),
    ],
)
def test_a_persons_words_mean_what_a_tools_word_means(asked: str, tool: str) -> None:
    assert set(understood(asked.split())[1]) & set(understood([tool])[1])


@pytest.mark.parametrize("text", ["", "xyzzy", "of", "rid"])
def test_other_words_mean_nothing(text: str) -> None:
    assert understood(text.split()) == (text.split(), [])


def test_a_word_of_two_meanings_has_both() -> None:
    assert len(understood(["message"])[1]) == 2


def test_the_words_of_a_phrase_do_not_stand_for_themselves() -> None:
    kept, meanings = understood(["Get", "rid", "of", "it"])
    assert kept == ["it"]
    assert meanings == understood(["delete"])[1]
