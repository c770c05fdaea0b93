from loopd.tools.call import prepare
from loopd.tools.catalogue import Catalogue
from loopd.tools.mends import Mends
from tests.tools.fake import tool


def test_calls_are_counted_by_model_and_by_how_they_were_mended_or_why_refused() -> None:
    catalogue = Catalogue([("host", (tool("now"),))])
    mends = Mends()
    for name, arguments in (
        ("call_tool", '{"name": "host.now", "arguments": {}}'),
        ("call_tool", '{"name": "now", "arguments": ""}'),
        ("host.now", "{}"),
        ("call_tool", '{"name": "now", "arguments": "{}"}'),
        ("call_tool", '{"a":'),
        ("find_tool", '{"need": "the time"}'),
    ):
        mends.add("small", prepare(name, arguments, catalogue))
    mends.add("other", prepare("nothing", "{}", catalogue))
    assert mends.describe() == {
        "other": {"calls": 1, "mended": 0, "mended_how": {}, "refused": 1, "refused_why": {"unknown_tool": 1}},
        "small": {
            "calls": 6,
            "mended": 4,
            "mended_how": {"inner_name": 1, "json_string": 1, "no_arguments": 1, "other_key": 1, "short_name": 2},
            "refused": 1,
            "refused_why": {"not_json": 1},
        },
    }
    assert Mends().describe() == {}
