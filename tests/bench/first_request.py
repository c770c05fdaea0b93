"""The first request of a new session: its tokens, and how fast a prefill is at the pinned batch against the largest."""

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.bench.harness import Row, at_most
from tests.bench.talk import Talk
from tests.integration.appliance import Appliance, running
from tests.servers import model_file, start_model_server

LIMIT_TOKENS = 310
LONG = "The cellar is at twelve degrees, as it mostly is in winter. " * 120


def run() -> list[Row]:
    small = _speeds(256)
    large = _speeds(2048)
    return [
        at_most(
            "first request of a session", small["tokens"], "tokens", LIMIT_TOKENS, reference="each inlined tool: 116"
        ),
        Row(
            "prefill at batch 256 over batch 2,048",
            small["speed"] / large["speed"],
            "ratio",
            reference=f"256: {small['speed']:.0f} tokens/s, 2,048: {large['speed']:.0f} tokens/s",
        ),
    ]


def _speeds(batch_tokens: int) -> dict[str, float]:
    with TemporaryDirectory() as directory:
        root = Path(directory)
        with start_model_server(root / "m.sock", gguf=model_file(), batch_tokens=batch_tokens) as url:
            device = Appliance(root, url, loop={"max_completion_tokens": 1})
            with running(device):
                for name, text in (("short", "Hi"), ("long", LONG)):
                    talk = Talk(device.socket, name)
                    list(talk.say(text))
                    talk.close()
                tokens = device.json("usage", "short")["requests"][0]["prompt_tokens"]
                row = device.json("usage", "long")["requests"][0]
    return {"tokens": tokens, "speed": 1000 * row["evaluated"] / row["prefill_ms"]}
