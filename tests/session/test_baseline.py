import json
from typing import Any

import pytest
from pydantic import ValidationError

from loopd.proto.canonical import canonical, sha256
from loopd.proto.model_identity import ModelIdentity, TemplateIdentity
from loopd.session.baseline import BASELINE_VERSION, Baseline
from tests.session.builders import make_baseline

HASH_A, HASH_B = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def test_what_is_encoded_is_decoded_again() -> None:
    baseline = make_baseline(arguments="object", reasoning="dropped", system="user")
    assert Baseline.decode(baseline.encoded()) == baseline


def test_the_bytes_are_canonical_and_hashed() -> None:
    baseline = make_baseline()
    assert baseline.encoded() == canonical(json.loads(baseline.encoded()))
    assert baseline.sha256() == sha256(baseline.encoded())


def test_tools_are_one_canonical_array_in_their_order() -> None:
    baseline = make_baseline(tools=({"b": 1, "a": 2}, {"a": 1}))
    assert baseline.tools_json == b'[{"a":2,"b":1},{"a":1}]'
    assert baseline.tools_json is baseline.tools_json


def test_required_arguments_come_first_in_the_order_in_which_they_are_required() -> None:
    properties = {name: {"type": "string"} for name in ("arguments", "extra", "name")}
    schema = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
    tool = {"type": "function", "function": {"parameters": schema, "name": "call_tool"}}
    sent = json.loads(make_baseline(tools=(tool,)).tools_json)
    assert list(sent[0]["function"]["parameters"]["properties"]) == ["name", "arguments", "extra"]
    assert list(sent[0]) == ["function", "type"]


@pytest.mark.parametrize(
    "change", [{"hostname": "pi"}, {"version": BASELINE_VERSION + 1}, {"arguments": "xml"}, {"system_prompt": None}]
)
def test_an_unknown_field_version_or_form_is_refused_by_name(change: dict[str, Any]) -> None:
    values = json.loads(make_baseline().encoded()) | change
    with pytest.raises(ValidationError, match=next(iter(change))):
        Baseline.decode(canonical(values))


@pytest.mark.parametrize(
    ("ours", "theirs", "is_other"),
    [
        (ModelIdentity(alias="m", sha256=HASH_A, size=1), ModelIdentity(alias="m", sha256=HASH_A, size=1), False),
        (ModelIdentity(alias="m", sha256=HASH_A, size=1), ModelIdentity(alias="n", sha256=HASH_A, size=None), False),
        (ModelIdentity(alias="m", sha256=HASH_A, size=1), ModelIdentity(alias="m", sha256=HASH_B, size=1), True),
        (ModelIdentity(alias="m", sha256=HASH_A, size=1), ModelIdentity(alias="m", sha256=None, size=1), False),
        (ModelIdentity(alias="m", sha256=HASH_A, size=1), ModelIdentity(alias="m", sha256=None, size=2), True),
        (ModelIdentity(alias="m", sha256=HASH_A, size=1), ModelIdentity(alias="m", sha256=None, size=None), False),
        (ModelIdentity(alias="m", sha256=None, size=1), ModelIdentity(alias="n", sha256=HASH_A, size=1), True),
    ],
)
def test_models_are_compared_by_what_both_sides_have(
    ours: ModelIdentity, theirs: ModelIdentity, is_other: bool
) -> None:
    baseline = make_baseline(model=ours)
    difference = baseline.difference(theirs, baseline.template)
    assert bool(difference) == is_other
    if is_other:
        assert ours.alias in difference
        assert theirs.alias in difference


def test_another_template_is_named_and_another_name_for_it_is_not_another() -> None:
    baseline = make_baseline(template=TemplateIdentity(name="ours", sha256=HASH_A, options={"date": "2026-12-01"}))
    same = TemplateIdentity(name="renamed", sha256=HASH_A, options={})
    other = TemplateIdentity(name="theirs", sha256=HASH_B, options={})
    assert baseline.difference(baseline.model, same) == ""
    assert "ours" in baseline.difference(baseline.model, other)
    assert "theirs" in baseline.difference(baseline.model, other)
