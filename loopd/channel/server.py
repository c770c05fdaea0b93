"""The channel's server: binds the socket, takes clients, and ends everything in bounded time (SPEC 8, 4.4)."""

import asyncio
import logging
import os
import socket
import struct
from contextlib import AsyncExitStack
from typing import Any, Self

from loopd.channel import socketfile
from loopd.channel.answers import Answers
from loopd.channel.connection import Connection
from loopd.channel.engine import Engine
from loopd.channel.live import Peer
from loopd.channel.sessions import Sessions
from loopd.clock import monotonic_s
from loopd.config import Config
from loopd.errors import LimitReached
from loopd.home import Home
from loopd.proto.frames import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_PEER = struct.Struct("3i")


class ChannelServer:
    """Serves the channel of one home for the time of an `async with` block.

    On entry the socket is bound and clients can connect. At the block's end there are no new clients, turns are
    cancelled, clients ended and logs closed, in less than `stop_timeout_s`, also with a client that does not read.
    Clients are let go first: one whose turn has no durable record yet keeps its text and says it again under the
    same key when a daemon is back, so a planned restart looks to it like a lost connection.

    Args:
        home: whose sessions are served; its lock is held by the caller.
        config: `[channel]` and `[loop]`.
        engine: turns, baselines, audit, facts.
        release: loopd's version, for the welcome and the status.
    """

    def __init__(self, home: Home, config: Config, engine: Engine, *, release: str) -> None:
        self.path = config.channel_socket(home.path)
        self._home, self._config, self._engine, self._release = home, config, engine, release
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._started_s = monotonic_s()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Bind and listen.

        Raises:
            ConfigError: the socket path cannot be used.
            ChannelError: another process listens there, or the system refuses.
        """
        async with AsyncExitStack() as stack:
            listener = socketfile.bind(self.path, group=self._config.channel.group)
            stack.callback(socketfile.unlink, self.path, self.path.stat().st_ino)
            self._tasks = await stack.enter_async_context(asyncio.TaskGroup())
            self._sessions = Sessions(self._home, self._config.loop, self._engine, self._tasks.create_task)
            self._answers = Answers(self._home, self._sessions, self._engine, self._facts)
            server = await asyncio.start_unix_server(self._accept, sock=listener)
            stack.push_async_callback(self._end)
            stack.callback(self._tasks.create_task(self._sessions.refusals.check_all()).cancel)
            stack.callback(server.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Stop serving."""
        await self._stack.aclose()

    def reconfigure(self, config: Config) -> None:
        """Take limits and tables into use, for what is opened or connects from now on; the socket stays."""
        self._config = config
        self._sessions.limits = config.loop

    async def _end(self) -> None:
        """Let clients go, cancel turns, end whatever a client's last frame still waits for, and close the logs.

        The shares of `stop_timeout_s` add up to less than nine tenths of it.
        """
        whole_s = self._config.loop.stop_timeout_s
        for connection in list(self._connections):
            connection.close()
        await self._sessions.cancel_turns(patience_s=0.4 * whole_s)
        clients = dict(self._connections)
        for connection in clients:
            connection.abort()
        if clients:
            _, waiting = await asyncio.wait(clients.values(), timeout=0.1 * whole_s)
            for task in waiting:
                task.cancel()
            if waiting:
                await asyncio.wait(waiting, timeout=0.1 * whole_s)
        await self._sessions.cancel_turns(patience_s=0.1 * whole_s)  # what began meanwhile
        await self._sessions.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(
            reader,
            writer,
            peer=_peer_of(writer.get_extra_info("socket")),
            table=self._config.channel,
            sessions=self._sessions,
            answers=self._answers,
            release=self._release,
        )
        most = self._config.channel.max_clients
        if len(self._connections) >= most:
            connection.refuse(
                LimitReached(
                    f"{most} clients are connected (max_clients)",
                    hint="end one of them, or raise max_clients in [channel]",
                )
            )
        else:
            self._connections[connection] = self._tasks.create_task(self._serve(connection))

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.run()
        except Exception:
            logger.exception("client_failed")
        finally:
            del self._connections[connection]

    def _facts(self) -> dict[str, Any]:
        return {
            "release": self._release,
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "uptime_s": round(monotonic_s() - self._started_s, 1),
            "socket": str(self.path),
            "clients": len(self._connections),
        }


def _peer_of(connection: socket.socket) -> Peer:
    return Peer(*_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))
