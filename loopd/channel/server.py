"""The channel's server: binds the socket, takes clients, and ends everything in bounded time (SPEC 8, 4.4)."""

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from loopd import __version__
from loopd.channel import socketfile
from loopd.channel.answers import Answers
from loopd.channel.connection import Connection
from loopd.channel.engine import Engine
from loopd.channel.sessions import Peer, Sessions
from loopd.clock import monotonic_s
from loopd.config import Config
from loopd.errors import LimitReached
from loopd.home import Home
from loopd.proto.frames import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

_PEER = struct.Struct("3i")


class ChannelServer:
    """Serves the channel of one home.

    Args:
        home: whose sessions are served; its lock is held by the caller.
        config: `[channel]` and `[loop]`.
        engine: turns, baselines, audit, facts.
    """

    def __init__(self, home: Home, config: Config, engine: Engine) -> None:
        self.path = config.channel_socket(home.path)
        self._home, self._config, self._engine = home, config, engine
        self._connections: set[Connection] = set()
        self._stop = asyncio.Event()
        self._stopped = asyncio.Event()
        self._started_s = monotonic_s()

    async def serve(self, ready: Callable[[], None]) -> None:
        """Serve until `stop` is called; `ready` is called once clients can connect.

        Raises:
            ConfigError: the socket path cannot be used.
            ChannelError: another process listens there, or the system refuses.
        """
        listener = socketfile.bind(self.path, group=self._config.channel.group)
        inode = self.path.stat().st_ino
        try:
            async with asyncio.TaskGroup() as tasks:
                sessions = Sessions(self._home, self._config.loop, self._engine, tasks.create_task)
                answers = Answers(self._home, sessions, self._engine, self._facts)

                def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                    tasks.create_task(self._client(reader, writer, sessions, answers))

                server = await asyncio.start_unix_server(accept, sock=listener)
                checking = tasks.create_task(sessions.refusals.check_all())
                ready()
                await self._stop.wait()
                server.close()
                checking.cancel()
                await self._end(sessions)
        finally:
            listener.close()
            socketfile.unlink(self.path, inode)
            self._stopped.set()

    async def stop(self) -> None:
        """Stop serving: no new clients, turns cancelled, clients ended, logs closed.

        Clients are let go first: one whose turn has no durable record yet keeps its text and says it again under
        the same key when a daemon is back, so a planned restart looks to it like a lost connection. It all takes
        less than `stop_timeout_s`, also with a client that does not read.
        """
        self._stop.set()
        await self._stopped.wait()

    async def _end(self, sessions: Sessions) -> None:
        patience_s = self._config.loop.stop_timeout_s
        for connection in list(self._connections):
            connection.close()
        await sessions.stop(patience_s=patience_s / 2)
        for connection in list(self._connections):
            connection.abort()

    async def _client(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        sessions: Sessions,
        answers: Answers,
    ) -> None:
        peer = _peer_of(writer.get_extra_info("socket"))
        table = self._config.channel
        connection = Connection(
            reader, writer, peer=peer, table=table, sessions=sessions, answers=answers, release=__version__
        )
        if len(self._connections) >= table.max_clients:
            connection.refuse(
                LimitReached(
                    f"{table.max_clients} clients are connected (max_clients)",
                    hint="end one of them, or raise max_clients in [channel]",
                )
            )
            return
        self._connections.add(connection)
        try:
            await connection.run()
        except Exception:
            logger.exception("client_failed uid=%d pid=%d", peer.uid, peer.pid)
        finally:
            self._connections.discard(connection)

    def _facts(self) -> dict[str, Any]:
        return {
            "release": __version__,
            "protocol": PROTOCOL_VERSION,
            "pid": os.getpid(),
            "uptime_s": round(monotonic_s() - self._started_s, 1),
            "socket": str(self.path),
            "clients": len(self._connections),
        }


def _peer_of(connection: socket.socket) -> Peer:
    return Peer(*_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)))
