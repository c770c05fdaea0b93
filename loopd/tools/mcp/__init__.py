"""MCP servers as tool ports, one port each, over stdio or streamable HTTP (SPEC 6).

- `port`: what the registry sees: keeps one server up, lists it again when it says so, tells why it is down
- `lists`: what is kept of a server's tools, and the file that answers before the server is up
- `secrets`: values that stand in files, and their removal from what is shown
- `connection`: one connection, by the official SDK: the handshake, the list, a call
- `stdio`, `web`: the two transports
- `results`: a result as text

`connection` and what it imports take a second and some 60 MB, so they are imported once a server is configured, by
the port, in a thread.
"""
