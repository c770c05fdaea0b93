"""The baseline: what a request holds that never changes in an epoch (SPEC 2.3).

It is written once, as canonical JSON, beside the log; line 1 of the log carries its hash. Nothing that may differ
tomorrow is in it: no date, host name, tool count, release.
"""

import json
from functools import cached_property, partial
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from loopd.proto.canonical import canonical, sha256
from loopd.proto.model_identity import ModelIdentity, TemplateIdentity

BASELINE_VERSION = 1
_dumps = partial(json.dumps, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class Baseline(BaseModel):
    """The frozen part of every request of an epoch.

    Attributes:
        version: of this format.
        system_prompt: '' sends none.
        tools: the tool definitions in OpenAI's form, in the order in which they are sent.
        model: the model that the conversation began with.
        template: its chat template; the options are sent with each request.
        arguments: what the template wants of a replayed call: a JSON string or the object.
        reasoning: whether earlier reasoning is sent back.
        system: `message`, or `user` where the template refuses the role (then the prompt stands before the first
            user text).
    """

    version: int = Field(default=BASELINE_VERSION, ge=1, le=BASELINE_VERSION)
    system_prompt: str
    tools: tuple[dict[str, Any], ...]
    model: ModelIdentity
    template: TemplateIdentity
    arguments: Literal["string", "object"] = "string"
    reasoning: Literal["sent", "dropped"] = "sent"
    system: Literal["message", "user"] = "message"
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def decode(cls, data: bytes) -> "Baseline":
        """Return the baseline that `encoded` wrote.

        Raises:
            pydantic.ValidationError: not JSON, or no baseline of a version that this release reads.
        """
        return cls.model_validate_json(data)

    def encoded(self) -> bytes:
        """Return the bytes that are on disk and hashed: canonical JSON, no newline.

        Raises:
            ValueError: a text holds a lone surrogate.
        """
        return canonical(self.model_dump(mode="json"))

    def sha256(self) -> str:
        """Return `sha256:` and the digest of `encoded()`."""
        return sha256(self.encoded())

    @cached_property
    def tools_json(self) -> bytes:
        """The tool definitions as a JSON array, ready for a request's body.

        Keys are sorted but for the arguments of a tool: those that are required come first, in the order in which
        the schema requires them. A server that builds a grammar from a schema makes the model write the arguments in
        the schema's order, and what is called should be chosen before what it is called with.
        """
        return _dumps([_required_first(tool) for tool in self.tools]).encode()

    def difference(self, model: ModelIdentity, template: TemplateIdentity) -> str:
        """Say how a server's model and template differ from the baseline's; '' where they are the same.

        Identities are compared by what both sides have: by the hash if both have it, else by alias and by size.
        A template is its text: another name for the same text is the same template, and its options are the
        baseline's own.
        """
        if _is_other_model(self.model, model):
            return f"the session began with the model {_describe(self.model)}, the server has {_describe(model)}"
        if self.template.sha256 != template.sha256:
            ours, theirs = (f"{it.name} ({it.sha256[:19]}…)" for it in (self.template, template))
            return f"the session began with the chat template {ours}, the server has {theirs}"
        return ""


def _required_first(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, list):
        return [_required_first(part) for part in value]
    if not isinstance(value, dict):
        return value
    ordered = {key: _required_first(value[key]) for key in sorted(value)}
    properties, required = ordered.get("properties"), ordered.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        first = [name for name in required if name in properties]
        ordered["properties"] = {name: properties[name] for name in dict.fromkeys([*first, *properties])}
    return ordered


def _is_other_model(ours: ModelIdentity, theirs: ModelIdentity) -> bool:
    if ours.sha256 is not None and theirs.sha256 is not None:
        return ours.sha256 != theirs.sha256
    sizes_differ = ours.size is not None and theirs.size is not None and ours.size != theirs.size
    return ours.alias != theirs.alias or sizes_differ


def _describe(model: ModelIdentity) -> str:
    facts = [f"{model.size} bytes"] if model.size is not None else []
    facts += [f"{model.sha256[:19]}…"] if model.sha256 is not None else []
    return f"{model.alias} ({', '.join(facts)})" if facts else model.alias
