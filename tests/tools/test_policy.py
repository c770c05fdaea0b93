from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopd.config import Decision, Effect, PolicyTable
from loopd.tools.policy import Verdict, decide

STRENGTH: dict[Decision, int] = {"allow": 0, "ask": 1, "deny": 2}


def policy(**values: Any) -> PolicyTable:
    return PolicyTable.model_validate(values)


@pytest.mark.parametrize(
    ("table", "name", "effect", "decision", "rule"),
    [
        ({}, "files.read", "read", "allow", '[tools.policy] read = "allow"'),
        ({}, "files.write", "write", "ask", '[tools.policy] write = "ask"'),
        ({"read": "ask"}, "files.read", "read", "ask", '[tools.policy] read = "ask"'),
        ({"write": "deny"}, "files.write", "write", "deny", '[tools.policy] write = "deny"'),
        ({"write": "deny", "allow": ["files.*"]}, "files.write", "write", "allow", '[tools.policy] allow = "files.*"'),
        ({"ask": ["files.*"]}, "files.read", "read", "ask", '[tools.policy] ask = "files.*"'),
        (
            {"allow": ["*"], "ask": ["files.*"], "deny": ["files.write"]},
            "files.write",
            "write",
            "deny",
            '[tools.policy] deny = "files.write"',
        ),
        ({"allow": ["*"], "ask": ["files.*"]}, "files.write", "write", "ask", '[tools.policy] ask = "files.*"'),
        ({"allow": ["files.wr?te"]}, "files.write", "write", "allow", '[tools.policy] allow = "files.wr?te"'),
        ({"deny": ["x.[ab]"]}, "x.b", "read", "deny", '[tools.policy] deny = "x.[ab]"'),
        ({"deny": ["write"]}, "files.write", "write", "ask", '[tools.policy] write = "ask"'),
        ({"deny": ["Files.*"]}, "files.read", "read", "allow", '[tools.policy] read = "allow"'),
        ({"deny": ["Git.*"]}, "Git.log", "read", "deny", '[tools.policy] deny = "Git.*"'),
    ],
    ids=str,
)
def test_the_strictest_rule_that_names_the_tool_decides_and_else_its_effect(
    table: dict[str, Any], name: str, effect: Effect, decision: Decision, rule: str
) -> None:
    assert decide(policy(**table), "s", name, effect) == Verdict(decision, rule)


WORK = '[tools.policy.sessions."work-*"]'


@pytest.mark.parametrize(
    ("own", "general", "decision", "rule"),
    [
        ({"allow": ["*"]}, {}, "allow", f'{WORK} allow = "*"'),
        ({"allow": ["*"]}, {"ask": ["*"]}, "allow", f'{WORK} allow = "*"'),
        ({"ask": ["*"]}, {"allow": ["*"]}, "ask", f'{WORK} ask = "*"'),
        ({"allow": ["*"]}, {"deny": ["files.*"]}, "deny", '[tools.policy] deny = "files.*"'),
        ({"deny": ["files.*"]}, {"allow": ["*"]}, "deny", f'{WORK} deny = "files.*"'),
        ({"allow": ["git.*"]}, {"ask": ["*"]}, "ask", '[tools.policy] ask = "*"'),
        ({"allow": ["git.*"]}, {}, "ask", '[tools.policy] write = "ask"'),
        ({"allow": ["*"]}, {"write": "deny"}, "allow", f'{WORK} allow = "*"'),
    ],
    ids=str,
)
def test_rules_of_a_session_go_before_the_general_ones_but_a_deny_of_either_stands(
    own: dict[str, Any], general: dict[str, Any], decision: Decision, rule: str
) -> None:
    table = policy(**general, sessions={"work-*": own})
    assert decide(table, "work-1", "files.write", "write") == Verdict(decision, rule)
    assert decide(table, "home", "files.write", "write") == decide(policy(**general), "home", "files.write", "write")


def test_of_several_session_rules_the_strictest_decides() -> None:
    table = policy(sessions={"*": {"allow": ["*"]}, "w*": {"ask": ["files.*"]}})
    assert decide(table, "w", "files.write", "write").decision == "ask"
    assert decide(table, "x", "files.write", "write").decision == "allow"


GLOB = st.sampled_from(["*", "files.*", "files.write", "git.*", "*.write", "Files.*", "[", "?iles.*"])
RULES = st.fixed_dictionaries({decision: st.lists(GLOB, max_size=3) for decision in STRENGTH})
DECISION = st.sampled_from(sorted(STRENGTH))
TABLE = st.builds(
    lambda rules, read, write, sessions: policy(**rules, read=read, write=write, sessions=sessions),
    RULES,
    DECISION,
    DECISION,
    st.dictionaries(st.sampled_from(["*", "work-*", "work-1", "other"]), RULES, max_size=3),
)
NAME = st.sampled_from(["files.write", "files.read", "git.log", "Files.write"])
EFFECT = st.sampled_from(["read", "write"])
SESSION = st.sampled_from(["work-1", "work-2", "home"])


@given(TABLE, SESSION, NAME, EFFECT, GLOB, DECISION)
def test_a_rule_that_is_added_only_ever_moves_a_tool_that_it_names_and_a_deny_always_stands(
    table: PolicyTable, session: str, name: str, effect: Effect, glob: str, decision: Decision
) -> None:
    before = decide(table, session, name, effect)
    longer = table.model_copy(update={decision: (*getattr(table, decision), glob)})
    after = decide(longer, session, name, effect)
    named = decide(policy(deny=[glob]), session, name, effect).decision == "deny"
    if not named:
        assert after == before
    if before.decision == "deny" and before.rule.split()[-3] == "deny":
        assert after.decision == "deny"
    if named and decision == "deny":
        assert after.decision == "deny"
    assert decide(longer, session, name, effect) == after


@given(TABLE, SESSION, NAME, EFFECT)
def test_the_order_of_rules_changes_no_decision(table: PolicyTable, session: str, name: str, effect: Effect) -> None:
    turned = table.model_copy(
        update={kind: tuple(reversed(getattr(table, kind))) for kind in STRENGTH}
        | {"sessions": dict(reversed(table.sessions.items()))}
    )
    assert decide(turned, session, name, effect).decision == decide(table, session, name, effect).decision
