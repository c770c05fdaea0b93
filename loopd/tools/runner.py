"""The runner: a small process that starts the processes of tools, each below a warden that ends them all (SPEC 6).

`python loopd/tools/runner.py PID` on descriptor 0 as a child of loopd, `loopd tools serve` as a service of its own. It
needs nothing but the standard library, so it starts in a moment and a fork of it is cheap.

It listens on a Unix stream socket; a connection is one child. Every message is a JSON object on a line:

    runner  {"sandboxed": false}                                         at once; what the kernel says of the runner
    client  {"argv": […], "env": {…}, "directory": "", "limits": {…}}    with the child's descriptors 0, 1 and 2
    warden  {"pid": 123}                                                 it runs
    warden  {"exit": 0}                                                  it has ended (-9: by signal 9), nothing is left
    any     {"error": "…"}                                               why not; the last message

What the child reads and writes goes between it and the client; nothing passes through here. The child's end, of
itself, is answered when its leftovers are killed. When the client shuts its side or is gone, everything below the
warden gets SIGTERM, `GRACE_S` later SIGKILL, and the answer comes when nothing is left.

The warden is a subreaper, so whatever a descendant does (a session of its own, a double fork, another environment) it
stays below it; no process may gain rights by a set-user-id program, so it can always be killed. A warden ends its tree
when the runner dies; the runner ends what a warden leaves that was killed; as a child of loopd it dies with it.
"""

import ctypes
import errno
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

GRACE_S = 1.0
"""Between SIGTERM and SIGKILL."""

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
DESCRIPTORS = 3

_RECEIVE_S = 10.0
_LONGEST_PAUSE_MS = 1000
_ENDS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_HANDLED = _ENDS | {signal.SIGCHLD, signal.SIGALRM}
_LIMITS = {"data": resource.RLIMIT_DATA, "files": resource.RLIMIT_NOFILE, "file_bytes": resource.RLIMIT_FSIZE}
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_OUT_OF_MEMORY_FIRST = "1000"

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Serve the process with the id in the arguments, whose child this is, on the listening descriptor 0."""
    _set(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    with socket.socket(fileno=os.dup(0)) as listener:
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.close(nothing)
        serve(listener, {os.geteuid()})


def serve(
    listener: socket.socket, allowed_uids: Collection[int], on_ready: Callable[[], object] = lambda: None
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; what runs then is ended by its wardens.

    The working directory is the `HOME` and the `TMPDIR` of all children.

    Args:
        listener: a listening Unix stream socket.
        allowed_uids: whose connections are served; all others are told so.
        on_ready: called when signals are handled and connections will be.
    """
    _set(_PR_SET_CHILD_SUBREAPER, 1)
    listener.settimeout(0)
    greeting = {"sandboxed": is_sandboxed(Path("/proc/self/status").read_text("utf-8"))}
    wardens: set[int] = set()
    signals = _Signals()
    on_ready()
    while True:
        came, connected = signals.wait(listener)
        if came & _ENDS:
            return
        if signal.SIGCHLD in came:
            _bury(wardens)
        if connected and (warden := _take(listener, allowed_uids, greeting, signals)):
            wardens.add(warden)


def is_sandboxed(status: str) -> bool:
    """Tell from a process's `/proc/PID/status` whether it lost rights: none to gain, system calls filtered."""
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return facts.get("NoNewPrivs") == "1" and facts.get("Seccomp") == "2"


def _take(
    listener: socket.socket, allowed_uids: Collection[int], greeting: Mapping[str, Any], signals: "_Signals"
) -> int:
    """Accept one connection and return the id of its warden, 0 where it got none."""
    try:
        connection, _ = listener.accept()
    except OSError:  # it is gone already
        return 0
    with connection:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        if uid not in allowed_uids:
            _answer(connection, {"error": f"the runner does not serve user {uid}"})
            return 0
        _answer(connection, greeting)
        runner = os.getpid()
        with _held_back():
            try:
                warden = os.fork()
            except OSError as error:
                _answer(connection, {"error": f"no process can be started: {error.strerror}"})
                return 0
            if warden == 0:
                listener.close()
                signals.close()
                _be_warden(connection, runner)
        return warden


@contextmanager
def _held_back() -> Iterator[None]:
    """Let no signal in between a fork and the moment when the new process has its own handlers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)


def _answer(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message; a client that is gone needs none."""
    with suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _set(option: int, value: int) -> None:
    """Call prctl.

    Raises:
        OSError: the kernel refused.
    """
    if _libc.prctl(option, ctypes.c_ulong(value), *(ctypes.c_ulong(0),) * 3) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class _Signals:
    """The handled signals as bytes in a pipe: one poll waits for them and for a socket."""

    def __init__(self) -> None:
        self._pipe, self._end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._end, warn_on_full_buffer=False)
        for number in _HANDLED:
            signal.signal(number, lambda _number, _frame: None)

    def close(self) -> None:
        """Give the signals back to the system."""
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._pipe)
        os.close(self._end)

    def wait(self, source: socket.socket | None = None, timeout_ms: int | None = None) -> tuple[set[int], bool]:
        """Return the signals that came and whether `source` has something, as soon as there is either."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if source is not None:
            poll.register(source, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(timeout_ms)}
        came = set(os.read(self._pipe, 4096)) if self._pipe in ready else set()
        return came, source is not None and source.fileno() in ready


# --- the warden -----------------------------------------------------------------------------------------------------


def _be_warden(connection: socket.socket, runner: int) -> NoReturn:
    """Ward one child in this new process; never returns."""
    status = 1
    try:
        _set(_PR_SET_CHILD_SUBREAPER, 1)
        _set(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == runner:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
            _ward(connection)
        status = 0
    except Exception:  # noqa: BLE001 - the end of the process; what it warded is the runner's now
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _ward(connection: socket.socket) -> None:
    """Receive the request, start the child and end all that is below this process when the time has come."""
    connection.settimeout(_RECEIVE_S)
    try:
        request, descriptors = _receive(connection)
    except (ValueError, OSError) as error:
        _answer(connection, {"error": f"no request came: {error}"})
        return
    signals = _Signals()
    try:
        child = _launch(request, descriptors)
    except (ValueError, TypeError, LookupError, OSError, subprocess.SubprocessError) as error:
        _answer(connection, {"error": _why_not(error, request)})
        return
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    tree = _Tree(signals, child.pid)
    try:
        _answer(connection, {"pid": child.pid})
        stopped = _watch(connection, signals, tree)
        tree.end(gently=bool(stopped))
    finally:
        tree.end(gently=False)
    _answer(connection, {"error": stopped} if stopped else {"exit": tree.exit})


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return the request and the three descriptors that came with it.

    Raises:
        ValueError: it is not what a client sends.
        OSError: it did not come, or not in time.
    """
    data, descriptors, _, _ = socket.recv_fds(connection, 65_536, DESCRIPTORS)
    while not data.endswith(b"\n"):
        more = connection.recv(65_536)
        data += more
        if not more or len(data) > MAX_MESSAGE_BYTES:
            raise ValueError("it is not whole")
    request = json.loads(data)
    if not isinstance(request, dict) or len(descriptors) != DESCRIPTORS:
        raise ValueError(f"it is no object with {DESCRIPTORS} descriptors")
    return request, descriptors


def _launch(request: Mapping[str, Any], descriptors: list[int]) -> subprocess.Popen[bytes]:
    """Start the child in a session of its own, within its limits, with the given descriptors and no other.

    Raises:
        OSError: the system refuses; ENOENT and EACCES may be of the program or of the directory.
        ValueError: the request holds what no process can be given.
    """
    warden = os.getpid()
    limits = {_LIMITS[name]: int(value) for name, value in request["limits"].items()} | {resource.RLIMIT_CORE: 0}

    def prepare() -> None:
        _set(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != warden:
            os._exit(1)
        _set(_PR_SET_NO_NEW_PRIVS, 1)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(_OUT_OF_MEMORY_FIRST, "ascii")
        for kind, value in limits.items():
            _, most = resource.getrlimit(kind)
            limit = value if most == resource.RLIM_INFINITY else min(value, most)
            resource.setrlimit(kind, (limit, limit))

    stdin, stdout, stderr = descriptors
    return subprocess.Popen(  # noqa: S603 - running what the configuration names is its purpose
        request["argv"],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=request["directory"] or None,
        env=_environment(request["env"]),
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - the warden has one thread
    )


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    work = str(Path.cwd())
    path = os.environ.get("PATH", os.defpath)
    return {"PATH": path, "HOME": work, "TMPDIR": work, "LANG": "C.UTF-8", **given}


def _why_not(error: Exception, request: Mapping[str, Any]) -> str:
    """Return in words why the child could not be started."""
    argv, directory = request.get("argv"), str(request.get("directory", ""))
    name = str(argv[0]) if isinstance(argv, list) and argv else "no program"
    if not isinstance(error, OSError):
        return f"{name} cannot be started: {error}"
    if directory and error.filename == directory:
        return f"{name} cannot be started in {directory}: {error.strerror}"
    place = Path(shutil.which(name, mode=os.F_OK, path=_environment(request["env"])["PATH"]) or name)
    refused, missing = error.errno == errno.EACCES, error.errno == errno.ENOENT
    reasons = (
        (refused and place.is_dir(), "it is a directory"),
        (refused and place.is_file() and not os.access(place, os.X_OK), "it is not executable"),
        (missing and place.is_file(), "the interpreter that its first line names is not there"),
        (missing, "there is no such program"),
        (error.errno == errno.ENOEXEC, "it is no binary program, and its first line names no interpreter"),
        (True, error.strerror),
    )
    return f"{name} cannot be started: {next(text for applies, text in reasons if applies)}"


def _watch(connection: socket.socket, signals: _Signals, tree: "_Tree") -> str:
    """Return when the child has ended: "", or when it must end: why."""
    connection.settimeout(0)
    while True:
        came, readable = signals.wait(connection)
        tree.reap()
        if tree.exit is not None:
            return ""
        if came & _ENDS:
            return "the runner was stopped"
        if readable:
            with suppress(BlockingIOError):
                try:
                    heard = connection.recv(4096)
                except ConnectionError:
                    heard = b""
                if not heard:
                    return "it was stopped"


class _Tree:
    """All descendants of this process, which is a subreaper: the last of them is always its own child.

    Attributes:
        exit: how the child ended: its status, or minus the number of the signal; None while it runs.
    """

    def __init__(self, signals: _Signals, child: int) -> None:
        self._signals, self._child = signals, child
        self.exit: int | None = None

    def reap(self) -> bool:
        """Bury the dead; return whether anything is left."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._child:
                    self.exit = os.waitstatus_to_exitcode(status)
        return False

    def end(self, *, gently: bool) -> None:
        """Return when nothing is left; `gently` leaves each `GRACE_S` to end by itself."""
        if gently and self.reap():
            _kill(descendants(os.getpid()), signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, GRACE_S)
            while self.reap() and signal.SIGALRM not in self._signals.wait()[0]:
                pass
        pause_ms = 1
        while self.reap():
            _kill(descendants(os.getpid()), signal.SIGKILL)
            self._signals.wait(timeout_ms=pause_ms)
            pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)


# --- processes ------------------------------------------------------------------------------------------------------


def _bury(wardens: set[int]) -> None:
    """Take the dead; let a warden that a tool has stopped go on.

    What a killed warden leaves behind is the runner's child now and is killed, each time anew.
    """
    strays = False
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                break
            if os.WIFSTOPPED(status):
                _kill([pid], signal.SIGCONT)
                continue
            strays = strays or status != 0 or pid not in wardens
            wardens.discard(pid)
    if strays:
        _kill(descendants(os.getpid(), without=wardens), signal.SIGKILL)


def descendants(root: int, *, without: Collection[int] = ()) -> list[int]:
    """Return the processes below `root`, those of `without` and all below them left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # The name, in parentheses, may hold anything; state and parent stand behind it.
                parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found = [pid for pid in children.get(root, ()) if pid not in without]
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def _kill(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


if __name__ == "__main__":
    main()
