"""The daemon: the only place where the parts are put together (SPEC 8, 9).

Start: home, its lock, the audit log, the socket; then READY. The model server is not waited for: a session can be
read without it, and whoever says something is told what is waited for. Stop (SIGTERM, SIGINT): turns are cancelled,
clients told, logs closed, within `stop_timeout_s`; then slots are saved, for `stop_save_s` at most, which a second
signal skips. SIGHUP reads the configuration again; what needs a restart to
change is said in the log.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from systemd_watchdog.systemd_watchdog import WatchDog

from loopd import __version__
from loopd.audit import AuditLog
from loopd.channel.server import ChannelServer
from loopd.config import Config
from loopd.errors import AuditError, ConfigError, LoopdError
from loopd.home import Home
from loopd.model.client import ModelClient
from loopd.model.keeper import StateKeeper
from loopd.model.slots import SlotPool
from loopd.model.watch import ModelWatch
from loopd.session.store import sweep
from loopd.tools.children import Children
from loopd.tools.ports import plans
from loopd.tools.registry import Registry
from loopd.turn.engine import Engine
from loopd.turn.parts import Parts

log = logging.getLogger("loopd.serve")

Load = Callable[[], Config]


def serve_forever(home: Home, load: Load) -> int:
    """Run the daemon until it is told to stop; return its exit status.

    Args:
        home: the home directory; made if it is missing.
        load: reads the configuration; called again at SIGHUP.

    Raises:
        LoopdError: the daemon could not be started. Configuration errors have exit status 2, so that a service
            manager can tell them from a crash.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.umask(0o077)
    config = load()
    home.make()
    lock = home.lock()
    try:
        asyncio.run(_serve(home, config, load))
    except* LoopdError as group:
        raise _first(group) from None
    finally:
        os.close(lock)
    return 0


def _first(group: BaseExceptionGroup[LoopdError]) -> LoopdError:
    """Return what went wrong first in the daemon's tasks."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


async def _serve(home: Home, config: Config, load: Load) -> None:
    async with AsyncExitStack() as stack:
        parts = _parts(home, config)
        stack.push_async_callback(parts.client.close)
        stack.callback(parts.registry.close)
        if parts.audit_log:
            stack.callback(parts.audit_log.close)
        for name in sweep(home):
            log.warning("swept name=%s", name)
        server = ChannelServer(home, config, Engine(parts), release=__version__)
        stopping, hurry, reload = asyncio.Event(), asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _told, stopping, hurry)
        loop.add_signal_handler(signal.SIGHUP, reload.set)
        async with _tools_kept(parts), server, asyncio.TaskGroup() as group:
            watchdog = WatchDog()
            background = [
                group.create_task(_feed(watchdog)),
                group.create_task(_greet_model(parts)),
                group.create_task(_reload(parts, server, reload, load)),
                group.create_task(parts.keeper.run()),
            ]
            log.info("ready release=%s home=%s socket=%s", __version__, home.path, server.path)
            _tell(watchdog.ready)
            await stopping.wait()
            log.info("stopping")
            for task in background:
                task.cancel()
        await _save_states(parts, watchdog, hurry)
        if parts.audit_log:
            parts.audit_log.append("stop", release=__version__)
    log.info("stopped")


@asynccontextmanager
async def _tools_kept(parts: Parts) -> AsyncIterator[None]:
    """Keep the ports and the runner of their processes up for the time of a block, which turns must not outlive."""
    async with asyncio.TaskGroup() as group:
        keeping = [group.create_task(parts.children.keep()), group.create_task(parts.registry.keep())]
        try:
            yield
        finally:
            for task in keeping:
                task.cancel()


def _told(stopping: asyncio.Event, hurry: asyncio.Event) -> None:
    """Take a signal: the first one stops, a second one hurries."""
    (hurry if stopping.is_set() else stopping).set()


async def _save_states(parts: Parts, watchdog: WatchDog, hurry: asyncio.Event) -> None:
    """Save what the slots hold, so that nothing is evaluated again after a planned reboot (SPEC 4.4)."""
    async with asyncio.TaskGroup() as group:
        feeding = group.create_task(_feed(watchdog))
        await parts.keeper.stop(parts.config.model.stop_save_s, hurry)
        feeding.cancel()


def _parts(home: Home, config: Config) -> Parts:
    """Make one of each part. A daemon that cannot write its start record serves read-only and says so (SPEC 7)."""
    audit_log, fault = None, ""
    try:
        audit_log = AuditLog.open(home.audit)
        audit_log.append("start", release=__version__, pid=os.getpid(), config=config.sha256())
    except AuditError as error:
        audit_log, fault = None, error.message
        log.error("read_only reason=%r", fault)  # noqa: TRY400 - the message is the whole fact
    client = ModelClient.from_config(config.model, config.model_url(home.path))
    pool = SlotPool(None, client)
    keeper = StateKeeper(
        home.slots,
        client,
        pool,
        table=lambda: parts.config.model,
        short_of_disk=lambda size_bytes: _short_of_disk(parts, size_bytes),
    )
    children = Children(lambda: parts.config.tools, home.path / "run" / "tools")
    parts = Parts(
        home=home,
        config=config,
        client=client,
        pool=pool,
        keeper=keeper,
        watch=ModelWatch(home, client, pool, keeper),
        registry=Registry(plans(config, home, children), config.tools, vectors=home.tool_vectors),
        children=children,
        audit_log=audit_log,
        audit_fault=fault,
    )
    return parts


def _short_of_disk(parts: Parts, size_bytes: int) -> str:
    """Say why a state of that size must not be written; the logs come first."""
    free, least = parts.home.free_bytes(), parts.config.loop.min_free_bytes
    if free - size_bytes >= least:
        return ""
    return f"{free:,} bytes are free under {parts.home.path}, and {least:,} must stay free ([loop] min_free_bytes)"


def _tell(word: Callable[[], None]) -> None:
    """Say a word to the service manager; one that does not listen is no reason to end."""
    with suppress(OSError):
        word()


async def _feed(watchdog: WatchDog) -> None:
    """Tell systemd that the event loop turns: nothing that waits for the model runs in it."""
    if not watchdog.is_enabled:
        return
    while True:
        _tell(watchdog.notify)
        await asyncio.sleep(watchdog.timeout / 4_000_000)


async def _greet_model(parts: Parts) -> None:
    """Ask the model server once at start, so that the first person need not wait for the check."""
    try:
        check = await parts.watch.current()
    except LoopdError as error:
        log.warning("model_unavailable reason=%r", error.message)
    else:
        log.info("model alias=%s template=%s", check.model.alias, check.template.name)


async def _reload(parts: Parts, server: ChannelServer, reload: asyncio.Event, load: Load) -> None:
    """Take a changed configuration into use; one that is wrong changes nothing."""
    while True:
        await reload.wait()
        reload.clear()
        try:
            config = load()
        except ConfigError as error:
            log.error("config_refused reason=%r", error.message)  # noqa: TRY400 - the message is the whole fact
            parts.config_refused = error.message
            continue
        parts.config, parts.config_refused = config, ""
        parts.registry.reconfigure(plans(config, parts.home, parts.children), config.tools)
        server.reconfigure(config)
        await parts.audit("config", config=config.sha256())
        log.info("config_reloaded sha256=%s", config.sha256())
