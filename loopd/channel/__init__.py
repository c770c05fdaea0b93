"""The socket between people and the daemon: codec, server and client (SPEC 8)."""
