import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loopd import home as home_module
from loopd.errors import HomeError, HomeLocked
from loopd.home import Home, default_channel, default_config, default_home, default_model_socket

HOLDER = (
    "import sys\n"
    "from pathlib import Path\n"
    "from loopd.home import Home\n"
    "Home(Path(sys.argv[1])).lock()\n"
    "print('locked', flush=True)\n"
    "sys.stdin.read()\n"
)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


@pytest.fixture
def holder(home: Home) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the home's lock."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(home.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's environment on a machine that is no device."""
    for name in ("LOOPD_HOME", "LOOPD_CONFIG", "LOOPD_SOCKET", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(home_module, "DEVICE_CONFIG", tmp_path / "etc" / "loopd.toml")
    return tmp_path


def test_everything_below_a_home_is_for_its_owner_only_and_making_it_twice_is_no_error(home: Home) -> None:
    home.make()
    places = [home.path, home.sessions, home.refused, home.audit, home.slots, home.models]
    assert all(place.parent in {home.path, home.path.parent} for place in places)
    assert {place.stat().st_mode & 0o777 for place in places} == {0o700}


@pytest.mark.parametrize("kind", ["a file", "below a file", "a dangling link"])
def test_a_home_that_cannot_be_made_is_an_error_with_its_path_and_a_hint(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "home"
    if kind == "a dangling link":
        path.symlink_to(tmp_path / "nowhere" / "else")
    else:
        path.write_bytes(b"")
    wanted = path / "below" if kind == "below a file" else path
    with pytest.raises(HomeError, match=str(path)) as caught:
        Home(wanted).make()
    assert "--home" in caught.value.hint


def test_a_home_has_one_daemon_among_all_processes(home: Home, holder: subprocess.Popen[bytes]) -> None:
    with pytest.raises(HomeLocked, match=f"process {holder.pid}") as caught:
        home.lock()
    assert caught.value.hint


def test_a_stopped_daemon_still_holds_its_home(home: Home, holder: subprocess.Popen[bytes]) -> None:
    holder.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(HomeLocked):
        home.lock()
    holder.send_signal(signal.SIGCONT)


def test_a_killed_daemon_holds_nothing(home: Home, holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.wait()
    os.close(home.lock())


def test_a_lock_ends_with_its_descriptor_and_names_its_process(home: Home) -> None:
    descriptor = home.lock()
    assert (home.path / "loopd.lock").read_text() == f"{os.getpid()}\n"
    with pytest.raises(HomeLocked, match=f"process {os.getpid()}"):
        home.lock()
    os.close(descriptor)
    os.close(home.lock())


def test_a_lock_that_cannot_be_opened_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(HomeError, match=r"loopd\.lock"):
        Home(tmp_path / "nowhere").lock()


def test_free_bytes_are_those_of_the_homes_disk(home: Home) -> None:
    disk = os.statvfs(home.path)
    assert 0 <= home.free_bytes() <= disk.f_blocks * disk.f_frsize


# --- who may write --------------------------------------------------------------------------------------------


def test_the_owner_goes_on_and_so_does_whoever_makes_a_home(home: Home, tmp_path: Path) -> None:
    home.become_owner()
    Home(tmp_path / "new").become_owner()


def test_anyone_else_is_refused_with_a_hint(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = home.path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(HomeError, match=f"belongs to user {owner}") as caught:
        home.become_owner()
    assert "sudo" in caught.value.hint


def test_root_becomes_the_owner_with_the_group_first(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []

    def stat(_path: Path) -> os.stat_result:
        return os.stat_result((0o40700, 1, 1, 1, 977, 978, 0, 0, 0, 0))

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    for name in ("setgroups", "setgid", "setuid"):
        monkeypatch.setattr(os, name, lambda value, name=name: calls.append((name, value)))
    home.become_owner()
    assert calls == [("setgroups", [978]), ("setgid", 978), ("setuid", 977)]


def test_root_is_the_owner_for_a_block_and_root_again_behind_it(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []

    def stat(_path: Path) -> os.stat_result:
        return os.stat_result((0o40700, 1, 1, 1, 977, 978, 0, 0, 0, 0))

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "getegid", lambda: 5)
    monkeypatch.setattr(os, "getgroups", lambda: [5, 6])
    for name in ("setgroups", "setegid", "seteuid"):
        monkeypatch.setattr(os, name, lambda value, name=name: calls.append((name, value)))

    def fail() -> None:
        with home.as_owner():
            calls.append(("block", None))
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fail()
    became = [("setgroups", [978]), ("setegid", 978), ("seteuid", 977)]
    assert calls == [*became, ("block", None), ("seteuid", 0), ("setegid", 5), ("setgroups", [5, 6])]


def test_a_home_that_cannot_be_looked_at_is_an_error(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    def stat(_path: Path) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(HomeError, match="Permission denied"):
        home.become_owner()


# --- where things are -----------------------------------------------------------------------------------------


def test_a_persons_places_follow_the_base_directories(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_home() == person / ".local/share/loopd"
    assert default_config() == person / ".config/loopd/loopd.toml"
    assert default_channel(default_home()) == default_home() / "run/channel.sock"
    assert default_model_socket(default_home()) == default_home() / "run/model.sock"
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/config")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert default_home() == Path("/data/loopd")
    assert default_config() == Path("/config/loopd/loopd.toml")
    assert default_channel(default_home()) == Path("/run/user/1000/loopd/channel.sock")
    assert default_model_socket(default_home()) == Path("/run/user/1000/loopd/model.sock")


def test_another_home_of_a_person_has_its_own_sockets(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert default_channel(person / "other") == person / "other/run/channel.sock"
    assert default_model_socket(person / "other") == person / "other/run/model.sock"


def test_a_relative_base_directory_is_ignored(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", "data")
    assert default_home() == person / ".local/share/loopd"


def test_a_device_is_known_by_its_configuration(person: Path) -> None:
    (person / "etc").mkdir()
    (person / "etc" / "loopd.toml").write_bytes(b"")
    assert default_home() == Path("/var/lib/loopd")
    assert default_config() == person / "etc" / "loopd.toml"
    assert default_channel(default_home()) == Path("/run/loopd/channel.sock")
    assert default_model_socket(default_home()) == Path("/run/loopd-model/model.sock")


def test_the_environment_goes_before_all_of_them(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOPD_HOME", "/srv/loopd")
    monkeypatch.setenv("LOOPD_CONFIG", "/srv/loopd.toml")
    monkeypatch.setenv("LOOPD_SOCKET", "/srv/loopd.sock")
    assert default_home() == Path("/srv/loopd")
    assert default_config() == Path("/srv/loopd.toml")
    assert default_channel(default_home()) == Path("/srv/loopd.sock")
