"""The two tools that the model sees, however many there are (SPEC 6).

They stand in every baseline, so nothing in them may depend on which tools there are. They are short because each new
session pays for them in its first request, and they ask for verb, object and service because that wording decides
whether the right tool is found.
"""

from typing import Any

FIND = "find_tool"
CALL = "call_tool"

DEFINITIONS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": FIND,
            "description": "Find tools. Returns their names, examples and arguments.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {
                        "type": "string",
                        "description": "verb, object and service, e.g. 'list events in Google Calendar'",
                    }
                },
                "required": ["query"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": CALL,
            "description": "Run a tool that find_tool returned.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "arguments": {"type": "object"}},
                "required": ["name", "arguments"],
            },
        },
    },
)
