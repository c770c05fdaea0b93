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
from loopd.tools.text import Capture

_CHUNK_CHARS = 65_536


def outcome(result: CallToolResult, max_bytes: int) -> Outcome:
    """Return the text of a result, what is no text named by kind and size; structured content where there is no text.

    Args:
        result: what the server answered.
        max_bytes: head and tail of more text are kept, with a count; no more than that is copied.
    """
    parts = [part for block in result.content if (part := _text(block))]
    if result.structured_content is not None and not any(_is_text(block) for block in result.content):
        parts.append(compact(result.structured_content))
    if result.is_error and not parts:
        parts.append("The tool failed and gave no reason.")
    capture = Capture(max_bytes)
    for number, part in enumerate(parts):
        capture.feed_text("\n" if number else "")
        for start in range(0, len(part), _CHUNK_CHARS):
            capture.feed_text(part[start : start + _CHUNK_CHARS])
    text = capture.finish()
    return Outcome(ok=not result.is_error, content=text.text, cut=text.cut, lossy=text.lossy)


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
