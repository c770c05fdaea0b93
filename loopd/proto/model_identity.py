"""Which model and which chat template: frozen in a baseline, compared with what a server has (SPEC 2.3)."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class ModelIdentity(BaseModel):
    """A model: its GGUF's hash where the file is readable, else its alias and size in bytes."""

    alias: str
    sha256: str | None
    size: int | None
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TemplateIdentity(BaseModel):
    """A chat template: its name, the hash of its text, and the options it is rendered with."""

    name: str
    sha256: str
    options: dict[str, Any]
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
