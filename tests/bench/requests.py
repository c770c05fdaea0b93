"""Requests for tools and what `make bench` knows about them: their format, their halves, how they are reworded.

A file of requests is a JSON list of `{"request": text, "right": ["server:tool", ...], "model_query"?: text}`; any of
the right tools counts as found. `":tool"` is that tool of any server. `model_query` is the need as a model words it.

**The rule** by which requests are reworded sees the request alone: quoted parts and numbers are dropped, then every
word of `FILLERS` (articles, pronouns, prepositions, auxiliaries, question words, days); what is left keeps its order,
so that verb, object and service remain.

**The halves**: a request whose text has a SHA-256 that begins with an even byte was open to those who set weights and
synonyms; one with an odd byte was held out from that. Figures are about the second half, the first stands beside.
"""

import hashlib
import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

OWN = Path(__file__).with_name("requests.json")
_WORD = re.compile(r"[^\W_]+")
FILLERS = frozenset(
    _WORD.findall(
        "a an the this that these those some any each my your his her its our their mine i me you he him she it we us "
        "they them myself is are was were be been am do does did done has have had can could will would shall should "
        "may might must let lets please want need like of to in on at by for from with into onto about as than then so "
        "if and or but not no yes just also too very still yet already so far here there what which who whom whose "
        "when where why how much many s t d ll re ve m today tomorrow yesterday tonight now monday tuesday wednesday "
        "thursday friday saturday sunday next last everyone anyone everything something"
    )
)
_DROPPED = re.compile(r'"[^"]*"|“[^”]*”|\d[\d.,:%]*')


@dataclass(frozen=True, slots=True)
class Request:
    """A need, the tools that meet it (`server.tool`, or `.tool` for any server), and a model's words for it, or ""."""

    text: str
    right: frozenset[str]
    model_words: str = ""

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.text.encode()).digest()[0] % 2 == 1

    def met_by(self, name: str) -> bool:
        return name in self.right or f".{name.partition('.')[2]}" in self.right


def read(path: Path) -> list[Request]:
    return [
        Request(
            case["request"],
            frozenset(right.replace(":", ".", 1) for right in case["right"]),
            case.get("model_query", ""),
        )
        for case in json.loads(path.read_text(encoding="utf-8"))
    ]


def reworded(text: str) -> str:
    """Return the request reworded by the rule; where nothing would be left, as it is."""
    kept = [word for word in _WORD.findall(_DROPPED.sub(" ", text).lower()) if word not in FILLERS]
    return " ".join(kept) or text


def fingerprint(requests: Sequence[Request]) -> str:
    """Return the hash of the held-out half: of its texts in order of their code points, one a line."""
    lines = sorted(request.text for request in requests if request.held_out)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a share, in percent."""
    z, share = 1.96, hits / of
    middle = share + z * z / (2 * of)
    spread = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    scale = 1 + z * z / of
    return 100 * (middle - spread) / scale, 100 * (middle + spread) / scale


def answerable(requests: Sequence[Request], names: Collection[str]) -> list[Request]:
    """Return the requests that some tool of the catalogue meets."""
    return [request for request in requests if any(request.met_by(name) for name in names)]
