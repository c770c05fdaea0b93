import pytest

from loopd.tools.catalogue import Catalogue
from loopd.tools.ranking import words
from tests.tools.fake import tool

PORTS = [
    (
        "calendar",
        (
            tool("list_events", "List the events of a calendar.", day={"type": "string"}),
            tool("createEvent", "Add an appointment.", title={"type": "string"}),
            tool("search", "Search events."),
        ),
    ),
    (
        "files",
        (
            tool("read_file", "Read a text file.", path={"type": "string"}),
            tool("search", "Search files by name."),
        ),
    ),
]


@pytest.fixture
def catalogue() -> Catalogue:
    return Catalogue(PORTS)


def names(catalogue: Catalogue, query: str, limit: int = 3) -> list[str]:
    return [entry.name for entry in catalogue.find(query, limit)]


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("list events in calendar", "calendar.list_events"),
        ("read a file", "files.read_file"),
        ("creating events", "calendar.createEvent"),
        ("appointment", "calendar.createEvent"),
        ("title", "calendar.createEvent"),
        ("files search", "files.search"),
        ("read_file", "files.read_file"),
        ("FILES.READ_FILE", "files.read_file"),
    ],
)
def test_the_tool_meant_is_ranked_first(catalogue: Catalogue, query: str, best: str) -> None:
    assert names(catalogue, query)[0] == best


def test_hits_are_as_many_as_asked_for_at_most(catalogue: Catalogue) -> None:
    assert len(names(catalogue, "search files events calendar", 2)) == 2


def test_equal_hits_keep_the_order_of_the_ports() -> None:
    catalogue = Catalogue([(port, (tool("same", "the same"),)) for port in ("b", "a", "c")])
    assert names(catalogue, "same") == ["b.same", "a.same", "c.same"]


@pytest.mark.parametrize(
    "query", ["", "  ", '"', "AND OR NOT", "NEAR(q z)", "parameters:x*", "'; DROP TABLE tool", "\0\ud800"]
)
def test_a_query_is_words_and_never_syntax(catalogue: Catalogue, query: str) -> None:
    assert catalogue.find(query, 3) == []


def test_a_query_of_ten_thousand_words_is_answered(catalogue: Catalogue) -> None:
    assert names(catalogue, "file " + " ".join(f"word{n}" for n in range(10_000)))[0] == "files.read_file"


@pytest.mark.parametrize(
    "name", ["list_events", "calendar.list_events", "List_Events", "list-events", "listEvents", "calendar__list_events"]
)
def test_a_name_is_known_in_any_case_and_punctuation(catalogue: Catalogue, name: str) -> None:
    entry = catalogue.get(name)
    assert entry is not None
    assert entry.name == "calendar.list_events"


def test_a_name_that_two_ports_have_needs_its_port(catalogue: Catalogue) -> None:
    assert catalogue.get("search") is None
    assert catalogue.nearest("search", 5)[:2] == ["calendar.search", "files.search"]


def test_a_name_that_differs_in_case_only_means_what_it_says() -> None:
    catalogue = Catalogue([("port", (tool("run"), tool("Run")))])
    assert [getattr(catalogue.get(name), "name", None) for name in ("run", "Run", "RUN")] == [
        "port.run",
        "port.Run",
        None,
    ]


@pytest.mark.parametrize(("wrong", "right"), [("list_event", "calendar.list_events"), ("file_read", "files.read_file")])
def test_an_unknown_name_has_nearest_ones(catalogue: Catalogue, wrong: str, right: str) -> None:
    assert catalogue.nearest(wrong, 3)[0] == right


def test_the_first_of_two_tools_with_one_name_counts() -> None:
    catalogue = Catalogue([("port", (tool("twice", "one"), tool("twice", "two")))])
    assert [entry.tool.description for entry in catalogue.entries] == ["one"]


def test_lone_surrogates_in_a_foreign_list_do_no_harm() -> None:
    catalogue = Catalogue([("port\ud800", (tool("na\ud800me", "de\0scription \udfff"),))])
    assert names(catalogue, "scription") == ["port\ud800.na\ud800me"]


def test_identifiers_are_found_whole_and_by_their_parts() -> None:
    assert words("getHttpUrl_2 GitHub") == ["getHttpUrl", "get", "Http", "Url", "2", "GitHub", "Git", "Hub"]
