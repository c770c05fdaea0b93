"""Tokens recomputed from outside: the model server's own counters, template and tokenizer, on the device as root.

For a request, `/apply-template` and `/tokenize` give its prompt P, the difference of the server's counter of
evaluated prompt tokens over the turn gives P - K, and expected is P + C - 1 of the request before (SPEC 4.3).
"""

import json
from dataclasses import dataclass
from typing import Any

from checks.instance import Instance

# Runs on the device: argv is the socket and either nothing (counters) or the body that `bxctl export --json` prints.
_ASK = """
import json, sys
import httpx
client = httpx.Client(transport=httpx.HTTPTransport(uds=sys.argv[1]), base_url='http://model', timeout=120)
def post(path, body):
    answer = client.post(path, json=body)
    answer.raise_for_status()
    return answer.json()
if len(sys.argv) == 2:
    lines = [l.split() for l in client.get('/metrics').text.splitlines() if l.startswith('llamacpp:')]
    print(json.dumps({name.removeprefix('llamacpp:'): float(value) for name, value in lines}))
else:
    body = json.loads(sys.argv[2])
    counts = []
    for number, message in enumerate(body['messages']):
        if message['role'] == 'assistant':
            prompt = post('/apply-template', body | {'messages': body['messages'][:number]})['prompt']
            tokens = post('/tokenize', {'content': prompt, 'add_special': True, 'parse_special': True})['tokens']
            counts.append(len(tokens))
    print(json.dumps(counts))
"""


@dataclass(frozen=True, slots=True)
class Counters:
    """What the model server has done since it started."""

    evaluated: int
    completed: int


def counters(instance: Instance) -> Counters:
    """Read the server's own counters."""
    shown = json.loads(instance.device.python(_ASK, instance.model_socket))
    return Counters(int(shown["prompt_tokens_total"]), int(shown["tokens_predicted_total"]))


def prompts(instance: Instance, session: str) -> list[int]:
    """Return P of each request of the session, in order, from the server's template and tokenizer."""
    body = instance.bxctl("export %s --json", session)
    counts: list[int] = json.loads(instance.device.python(_ASK, instance.model_socket, body.strip()))
    return counts


def token_table(turns: list[int], prompt_tokens: list[int], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table of a conversation of one request a turn, recomputed.

    Args:
        turns: what the server evaluated for each turn, by its own counter.
        prompt_tokens: P of each request, by its own template and tokenizer.
        rows: what loopd says; only the completion tokens are taken from it, and its causes shown.
    """
    table = []
    before = 0
    for number, (evaluated, prompt, row) in enumerate(zip(turns, prompt_tokens, rows, strict=True), start=1):
        cached, expected = prompt - evaluated, min(before, prompt - 1)
        table.append(
            {
                "turn": number,
                "prompt": prompt,
                "cached": cached,
                "expected": expected,
                "evaluated": evaluated,
                "floor": prompt - expected,
                "completion": row["completion_tokens"],
                "loss": max(0, expected - cached),
                "cause": (row["cause"] or {}).get("name", ""),
            }
        )
        before = prompt + row["completion_tokens"] - 1
    return table
