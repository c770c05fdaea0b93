"""loopd: an agent-loop appliance beside a local llama.cpp server.

Conversations are append-only logs on disk; every request to the model is rebuilt from the log alone and extends
the one before, so the model's prompt cache is never lost. The map, lowest layer first (upper imports lower):

    errors      every error on purpose, with its code, hint and exit status
    clock       the only place that imports time
    proto/      records of the log, frames of the channel, token accounts, ids, canonical JSON: pure
    home        where things are on disk, the lock, who may write
    config      one TOML file, four tables
    audit       what was done, chained by hashes
    tools/      the port, the registry, find_tool and call_tool, the built-in tools, executables, MCP servers; the
                runner of their processes, a program of its own
    model/      the client of the model server; its slots and their saved states; the account of a request; the
                embedded server, the scripted one, the check of a model
    session/    baseline, replay, the store with its epochs, verify, repair, fork, backup
    turn/       limits (pure), the loop: say -> step -> tools -> step -> turn_end, approvals, and compaction
    channel/    codec (pure), server, client of the socket between people and the daemon
    serve       the daemon: the only place where the parts are put together
    cli/        `loopd` and `bxctl`: parse, call, print

Data flows one way: client frame -> turn -> model -> record -> client frame.
"""

__version__ = "0.1.0"
