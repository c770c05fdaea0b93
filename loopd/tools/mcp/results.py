"""What an MCP server answers to a call, as the text that the model reads (SPEC 6)."""

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from loopd.tools.port import Outcome
from loopd.tools.schema import compact


def outcome(result: CallToolResult) -> Outcome:
    """Return the text of a result, what is no text named by kind and size; structured content where there is no text.

    A single text is passed on as it is: it may be as long as a message, and the registry cuts it.
    """
    parts = [part for block in result.content if (part := _text(block))]
    if result.structured_content is not None and not any(_is_text(block) for block in result.content):
        parts.append(compact(result.structured_content))
    if result.is_error and not parts:
        parts.append("The tool failed and gave no reason.")
    return Outcome(ok=not result.is_error, content=parts[0] if len(parts) == 1 else "\n".join(parts))


def _is_text(block: ContentBlock) -> bool:
    return isinstance(block, TextContent) and bool(block.text)


def _text(block: ContentBlock) -> str:
    match block:
        case TextContent():
            return block.text
        case ImageContent() | AudioContent():
            return f"[{block.type}: {block.mime_type}, {_decoded_bytes(block.data)} bytes]"
        case ResourceLink():
            size = f", {block.size} bytes" if block.size is not None else ""
            return f"[resource: {block.uri}{_kind(block.mime_type)}{size}]"
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return f"[resource: {resource.uri}{_kind(resource.mime_type)}]\n{resource.text}"
        case EmbeddedResource(resource=BlobResourceContents() as resource):
            return f"[resource: {resource.uri}{_kind(resource.mime_type)}, {_decoded_bytes(resource.blob)} bytes]"
    return f"[{block.type}]"


def _kind(mime_type: str | None) -> str:
    return f", {mime_type}" if mime_type else ""


def _decoded_bytes(base64_text: str) -> int:
    """Return how many bytes the text stands for, without decoding it."""
    return len(base64_text) * 3 // 4 - base64_text[-2:].count("=")
