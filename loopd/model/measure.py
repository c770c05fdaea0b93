"""What the device does with the served model, measured only where no conversation can be harmed (SPEC 4.3)."""

from loopd.model.client import CompletionRequest, ModelClient
from loopd.proto.canonical import canonical


async def batch_ms(client: ModelClient, batch_tokens: int) -> float | None:
    """Return how long the prefill of one batch takes, which is also how long a cancel may; in milliseconds.

    Returns:
        None where it was not measured: the server shows no slots, or one was used since the server started and may
        hold a session.

    Raises:
        ModelError: the server does not answer.
    """
    slots = await client.slots()
    if not slots or any(slot.task is not None for slot in slots):
        return None
    text = canonical({"role": "user", "content": "word " * batch_tokens})
    request = CompletionRequest(messages=[text], tools=b"[]", slot=0, max_tokens=1)
    reported = (await client.complete(request, lambda _event: None)).reported
    if reported.prefill_ms is None or not reported.prompt_tokens:
        return None
    return reported.prefill_ms * batch_tokens / reported.prompt_tokens
