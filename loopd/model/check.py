"""What the served model and its template can take, found out from `/apply-template` and `/tokenize` alone (SPEC 4.3).

It takes no slot, so it can run at any time. The result steers what is frozen in new sessions, and is kept in the
home until model, template or build change.
"""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loopd.errors import HomeError
from loopd.home import Home
from loopd.model.client import ModelClient, ServerFacts
from loopd.model.forms import Forms, find_forms
from loopd.model.identity import FileHash, model_identity, template_identity
from loopd.proto.model_identity import ModelIdentity, TemplateIdentity


class ModelCheck(BaseModel):
    """The identity of what is served, and the forms it takes."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    model: ModelIdentity
    template: TemplateIdentity
    build: str
    forms: Forms

    def describe(self) -> dict[str, Any]:
        """Return it as `bxctl status` and `loopd model check --json` show it."""
        return self.model_dump(mode="json")


class _Kept(BaseModel):
    """The file `model-check.json`: a cache, of no worth to a release that reads it otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    check: ModelCheck | None = None
    hashes: dict[str, FileHash] = Field(default_factory=dict)


async def load_or_check(home: Home, client: ModelClient, facts: ServerFacts, *, anew: bool = False) -> ModelCheck:
    """Return the check of what the server has now: the one that is kept if it is of the same model, template and build.

    Args:
        home: where it is kept; nothing there need survive a power cut.
        client: of the server.
        facts: what the server says about itself now.
        anew: check again whatever is kept.

    Raises:
        ModelError: the server does not answer.
        HomeError: the result cannot be kept.
    """
    kept = _load(home.model_check)
    model, hashes = await model_identity(facts, kept.hashes)
    template = template_identity(facts)
    check = kept.check
    if anew or check is None or (check.model, check.template, check.build) != (model, template, facts.build):
        forms = await find_forms(client, facts.template, template.options)
        check = ModelCheck(model=model, template=template, build=facts.build, forms=forms)
    now = _Kept(check=check, hashes=hashes)
    if now != kept:
        _save(home.model_check, now)
    return check


def _load(path: Path) -> _Kept:
    with contextlib.suppress(OSError, ValidationError):
        return _Kept.model_validate_json(path.read_bytes())
    return _Kept()


def _save(path: Path, kept: _Kept) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            file.write(kept.model_dump_json(indent=1).encode() + b"\n")
        Path(file.name).replace(path)
    except OSError as error:
        raise HomeError(f"cannot keep the model check in {path}: {error.strerror}") from error
