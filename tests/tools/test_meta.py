from loopd.proto.canonical import canonical
from loopd.tools.meta import CALL, DEFINITIONS, FIND


def test_the_model_sees_two_tools() -> None:
    assert [definition["function"]["name"] for definition in DEFINITIONS] == [FIND, CALL]


def test_find_tool_asks_for_the_wording_that_finds() -> None:
    query = DEFINITIONS[0]["function"]["parameters"]["properties"]["query"]
    assert "verb, object and service" in query["description"]


def test_the_definitions_cost_little_in_each_first_request() -> None:
    assert len(canonical(list(DEFINITIONS))) < 600
