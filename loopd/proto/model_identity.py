"""What tells one model, and one chat template, from another (SPEC 2.3)."""

from pydantic import BaseModel, ConfigDict, JsonValue


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelIdentity(_Strict):
    """The model: `sha256` of its GGUF where the file can be read, `size` in bytes where the server tells it."""

    alias: str
    sha256: str | None
    size: int | None


class TemplateIdentity(_Strict):
    """The chat template: its name, the hash of its text, and the options that it is rendered with."""

    name: str
    sha256: str
    options: dict[str, JsonValue]
