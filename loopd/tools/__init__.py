"""Tools: what the model may run, behind two definitions that never change (SPEC 6).

- `port`: what a provider of tools is
- `meta`: the definitions of find_tool and call_tool, constant for ever
- `catalogue`: all tools of all ports, ranked by words (SQLite FTS5) and looked up by name
- `schema`: JSON Schema made short, made an example, and used to validate
- `find`: the answer of find_tool, within a token budget
- `call`: what a model's call means, however it was written (pure)
- `text`: a tool's output as clean text of bounded size
- `registry`: joins the ports and runs a call to a result
- `builtin`: clock and device
- `executables`: programs in a directory, with a manifest beside each
- `mcp`: MCP servers over stdio and streamable HTTP, by the official SDK
- `ports`: which of them the configuration asks for
- `children`: processes of tools as the daemon sees them
- `runner`: the process that starts them and ends them, apart from the daemon; standard library only
"""
