"""What a request should have cost, and why it cost more: the account of SPEC 4.3, with evidence."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from loopd.errors import ModelError
from loopd.model.client import ModelClient
from loopd.model.rendering import Renderer
from loopd.model.slots import SlotCondition
from loopd.proto.records import Cause, LossCause, Usage
from loopd.proto.usage import Reported, expected_tokens, loss_tokens

_BY_CONDITION: dict[str, LossCause] = {
    "cold": "server_restarted",
    "foreign": "slot_taken",
    "evicted": "evicted",
    "not_restored": "state_not_restored",
    "rebased": "model_changed",
}


class Template(Protocol):
    """What a template is rendered with."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Passed to the template as they are."""
        ...


class Frozen(Protocol):
    """The part of a baseline that the rendering of a request depends on."""

    @property
    def tools_json(self) -> bytes:
        """The tool definitions, as they are sent."""
        ...

    @property
    def template(self) -> Template:
        """The chat template."""
        ...


async def account(
    client: ModelClient,
    baseline: Frozen,
    previous: Usage | None,
    messages: Sequence[bytes],
    reported: Reported,
    condition: SlotCondition,
) -> tuple[int | None, int | None, Cause | None]:
    """Return `(expected, loss, cause)` of a finished request.

    Args:
        client: asked to render, only if tokens were lost in a slot that was as it had been left.
        baseline: of the session.
        previous: the last request with recorded numbers on this line of history.
        messages: of this request, canonical JSON each.
        reported: the server's numbers.
        condition: the slot, as it was found before the request.
    """
    expected = expected_tokens(previous, reported.prompt_tokens)
    loss = loss_tokens(expected, reported.cached_tokens)
    if not loss or previous is None:
        return expected, loss, None
    if name := _BY_CONDITION.get(condition.kind):
        return expected, loss, Cause(name=name, evidence=condition.evidence)
    if condition.kind == "restored" and not reported.cached_tokens and condition.tokens <= (expected or 0):
        evidence = f"{condition.evidence}, and the server used none of it"
        return expected, loss, Cause(name="state_not_restored", evidence=evidence)
    renderer = Renderer(client, baseline.tools_json, baseline.template.options)
    try:
        cause = await _find(renderer, previous, messages, reported.cached_tokens or 0, condition)
    except ModelError as error:
        cause = Cause(name="unknown", evidence=f"the server did not render the request again: {error.message}")
    return expected, loss, cause


async def _find(
    renderer: Renderer, previous: Usage, messages: Sequence[bytes], cached: int, condition: SlotCondition
) -> Cause:
    """Tell a history that the template rewrites from an answer that tokenises in another way when it comes back."""
    sent = _sent_before(previous, messages)
    if rewritten := await renderer.first_rewritten(messages[:sent], messages):
        return Cause(name="history_rewritten", evidence=f"{rewritten} differs")
    kept = (previous.prompt_tokens or 1) - 1
    left = kept + (previous.completion_tokens or 0)
    if cached < kept and condition.tokens > left:
        evidence = f"the slot held {condition.tokens} tokens, {left} of them of this history, and {cached} were used"
        return Cause(name="cannot_roll_back", evidence=evidence)
    if cached < kept:
        evidence = f"{cached} tokens were cached, and the text of {kept} before the last answer is unchanged"
        return Cause(name="unknown", evidence=evidence)
    evidence = f"the text is unchanged, and the {cached} cached tokens reach into the last answer (from {kept} on)"
    return Cause(name="retokenised", evidence=evidence)


def _sent_before(previous: Usage, messages: Sequence[bytes]) -> int:
    """Return how many of the messages the former request had: it recorded how long they were."""
    length = 0
    for count, message in enumerate(messages):
        if length >= previous.request_bytes:
            return count
        length += len(message) + 1
    return len(messages)
