"""Whether a tool may run: pure (SPEC 6).

Globs are compared with the full name (`server.tool`) as the catalogue has it, case and all. The strictest rule that
names the tool decides: deny, then ask, then allow; one that no rule names is decided by its effect. Rules for a
session (globs over its id) go before the general ones, but a deny of either stands.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from loopd.config import Decision, Effect, PolicyTable, Rules


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens to a call.

    Attributes:
        decision: allow, ask or deny.
        rule: what decided it, as it stands in the configuration: `[tools.policy] ask = "files.*"`.
    """

    decision: Decision
    rule: str


def decide(policy: PolicyTable, session_id: str, name: str, effect: Effect) -> Verdict:
    """Return what the policy says about a call.

    Args:
        policy: `[tools.policy]` as it is now.
        session_id: whose call it is.
        name: the tool's full name.
        effect: what the tool does where no rule names it.
    """
    own = tuple(
        (f'[tools.policy.sessions."{glob}"]', rules)
        for glob, rules in policy.sessions.items()
        if fnmatchcase(session_id, glob)
    )
    general = (("[tools.policy]", policy),)
    candidates = (
        *_named("deny", (*own, *general), name),
        *_named("ask", own, name),
        *_named("allow", own, name),
        *_named("ask", general, name),
        *_named("allow", general, name),
    )
    if candidates:
        return candidates[0]
    default = policy.read if effect == "read" else policy.write
    return Verdict(default, f'[tools.policy] {effect} = "{default}"')


def _named(decision: Decision, tables: tuple[tuple[str, Rules], ...], name: str) -> Iterator[Verdict]:
    """Yield a verdict for each glob of this decision that the name fits."""
    for table, rules in tables:
        globs: tuple[str, ...] = getattr(rules, decision)
        for glob in globs:
            if fnmatchcase(name, glob):
                yield Verdict(decision, f'{table} {decision} = "{glob}"')
