"""What a model server sends, as far as loopd reads it: lenient models, and its errors as ours.

Sources: llama.cpp `tools/server/README.md`, OpenAI's "chat completion chunk". Fields that are not named here are
ignored, and everything is optional, because other servers leave things out.
"""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from loopd.errors import ContextOverflow, ModelError, ModelProtocolError, ModelRejected

_SHOWN_CHARS = 300


class _Wire(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, protected_namespaces=())


class FunctionDelta(_Wire):
    """A piece of a call's name and arguments."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(_Wire):
    """A piece of one tool call; pieces of one `index` belong together."""

    index: int | None = None
    id: str | None = None
    function: FunctionDelta = FunctionDelta()


class Delta(_Wire):
    """A piece of the answer."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] | None = None


class Choice(_Wire):
    """One answer; loopd asks for one."""

    delta: Delta = Delta()
    finish_reason: str | None = None


class PromptTokensDetails(_Wire):
    """Where the server tells how much of the prompt was cached."""

    cached_tokens: int | None = None


class WireUsage(_Wire):
    """OpenAI's usage object."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class Timings(_Wire):
    """llama.cpp's own account of a request; times in milliseconds."""

    cache_n: int | None = None
    prompt_ms: float | None = None
    predicted_ms: float | None = None


class PromptProgress(_Wire):
    """llama.cpp's progress of a prefill, in tokens; `processed` includes the cached ones."""

    total: int
    cache: int
    processed: int


class WireError(_Wire):
    """An error object, in a body or in a stream."""

    message: str = ""
    type: str = ""
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class Chunk(_Wire):
    """One event of the stream."""

    choices: tuple[Choice, ...] = ()
    usage: WireUsage | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None
    error: WireError | None = None


class Slot(_Wire):
    """One entry of `/slots`. A slot that was never used has no `id_task`."""

    id: int
    id_task: int | None = None
    n_prompt_tokens: int = 0
    is_processing: bool = False


class Slots(RootModel[tuple[Slot, ...]]):
    """`/slots`."""


class TransferTimings(_Wire):
    """How long the server took to write or read a slot, in milliseconds."""

    save_ms: float = 0.0
    restore_ms: float = 0.0


class Saved(_Wire):
    """`/slots/N?action=save`; `n_written` in bytes."""

    n_saved: int
    n_written: int
    timings: TransferTimings = TransferTimings()


class Restored(_Wire):
    """`/slots/N?action=restore`; `n_read` in bytes."""

    n_restored: int
    n_read: int
    timings: TransferTimings = TransferTimings()


class GenerationSettings(_Wire):
    """The part of `/props` that describes a slot."""

    n_ctx: int = 0


class Props(_Wire):
    """`/props`. `media_marker` is drawn at random when the server starts, so it tells one process from the next."""

    model_alias: str = ""
    model_path: str = ""
    total_slots: int | None = None
    chat_template: str | None = None
    build_info: str = ""
    media_marker: str = ""
    endpoint_slots: bool = True
    default_generation_settings: GenerationSettings = GenerationSettings()


class ModelMeta(_Wire):
    """What llama.cpp adds to a model's entry; `size` in bytes."""

    size: int | None = None
    n_ctx: int | None = None


class ModelEntry(_Wire):
    """One entry of `/v1/models`."""

    id: str
    meta: ModelMeta | None = None


class Models(_Wire):
    """`/v1/models`."""

    data: tuple[ModelEntry, ...] = Field(min_length=1)


class Rendered(_Wire):
    """`/apply-template`."""

    prompt: str


class Tokens(_Wire):
    """`/tokenize`."""

    tokens: list[int]


class _ErrorBody(_Wire):
    error: WireError | str


_Model = TypeVar("_Model", bound=BaseModel)


def parse(model: type[_Model], data: bytes | str, what: str) -> _Model:
    """Return the JSON text `data` as `model`.

    Raises:
        ModelProtocolError: it is something else; the message shows where it begins to differ.
    """
    try:
        return model.model_validate_json(data)
    except ValidationError as error:
        shown = data if isinstance(data, str) else data.decode("utf-8", "replace")
        raise ModelProtocolError(f"{what} is not of the protocol: {_shorten(shown)!r}") from error


def error_from(status: int, body: bytes) -> ModelError:
    """Return the error that an HTTP answer other than 200 stands for, in the server's own words."""
    try:
        error = _ErrorBody.model_validate_json(body).error
    except ValidationError:
        text = _shorten(body.decode("utf-8", "replace").strip()) or "an empty answer"
        return ModelRejected(f"the model server answered HTTP {status}: {text}")
    if isinstance(error, str):
        error = WireError(message=error)
    return error_of(error, f"the model server refused the request (HTTP {status})")


def error_of(error: WireError, lead: str) -> ModelError:
    """Return the error that an error object stands for."""
    if error.n_prompt_tokens is not None and error.n_ctx is not None:
        return ContextOverflow(error.n_prompt_tokens, error.n_ctx)
    return ModelRejected(f"{lead}: {_shorten(error.message or error.type or 'no reason given')}")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
