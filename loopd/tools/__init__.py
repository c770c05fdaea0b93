"""Tools: what the model may run, behind two definitions that never change (SPEC 6).

- `port`: what a provider of tools is
- `meta`: the definitions of find_tool and call_tool, constant for ever
- `catalogue`: all tools of all ports, looked up by name and ranked for a need
- `ranking`: the index that ranks (SQLite FTS5), with `synonyms`: everyday words and those of tools; `semantic`: the
  optional extra, by meaning; `indexing`: makes the index in a thread while the last one ranks
- `schema`: JSON Schema made short, made an example; `validation`: arguments held against it, bounded in time
- `find`: the answer of find_tool, within a token budget
- `call`: what a model's call means, however it was written, and how it had to be mended (pure)
- `mends`: how many calls of each model had to be mended or were refused (pure)
- `policy`: whether a tool may run: allow, ask or deny (pure)
- `text`: a tool's output as clean text of bounded size
- `registry`: joins the ports and runs a call to a result; `counts`: how often, and how it went (pure)
- `builtin`: clock and device; `services`: what systemd says for it
- `files`: reading, listing, searching and writing below the configured roots
- `executables`: programs in a directory, with a manifest beside each
- `mcp`: MCP servers over stdio and streamable HTTP, by the official SDK
- `ports`: which of them the configuration asks for
- `children`: processes of tools as the daemon sees them
- `runner`: the process that starts them and ends them, apart from the daemon; standard library only
"""
