"""Roots that hold what is loopd's own are refused when the configuration is read, and never used."""

from pathlib import Path

import pytest

from loopd.config import parse_config
from loopd.errors import ConfigError, ToolError
from loopd.home import Home
from loopd.tools.files.reading import read
from loopd.tools.files.roots import check_roots
from loopd.tools.files.work import Work
from tests.tools.files.tree import roots_of


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("home/sessions", "etc", "docs", "keys", "programs/bin", "run"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "to-home").symlink_to("home")
    (tmp_path / "home/out").symlink_to("../docs")
    return tmp_path


def check(place: Path, **files: list[str]) -> None:
    table = {kind: [path.format(place=place) for path in paths] for kind, paths in files.items()}
    values = {
        "model": {"api_key_file": f"{place}/keys/model"},
        "channel": {"socket": f"{place}/run/channel.sock"},
        "tools": {
            "files": table,
            "executables": f"{place}/programs/bin",
            "mcp": {
                "x": {"command": [f"{place}/servers/x", f"{place}/docs"], "env_files": {"TOKEN": f"{place}/keys/token"}}
            },
        },
    }
    config_path = place / "etc/loopd.toml"
    check_roots(parse_config(values, source="test"), Home(place / "home"), config_path)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("{place}/home", "it is {place}/home"),
        ("{place}/home/", "it is {place}/home"),
        ("{place}/home/sessions", "it lies in {place}/home"),
        ("{place}/home/not-yet/made", "it lies in {place}/home"),
        ("{place}", "{place}/home lies in it"),
        ("/", "{place}/home lies in it"),
        ("{place}/to-home", "it is {place}/home"),
        ("{place}/to-home/sessions", "it lies in {place}/home"),
        ("{place}/docs/../home", "it is {place}/home"),
        ("{place}/etc", "{place}/etc/loopd.toml lies in it"),
        ("{place}/run", "{place}/run/channel.sock lies in it"),
        ("{place}/keys", "{place}/keys/model lies in it"),
        ("/etc", "/etc/loopd lies in it"),
        ("/etc/loopd", "it is /etc/loopd"),
        ("/var/lib/loopd/sessions", "it lies in /var/lib/loopd"),
        ("/run/loopd", "it is /run/loopd"),
        ("/run/loopd-model", "it is /run/loopd-model"),
        ("/proc/self", "it lies in /proc"),
        ("/dev/shm", "it lies in /dev"),
        ("/sys", "it is /sys"),
    ],
)
@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_root_that_holds_or_lies_in_what_is_loopds_own_is_refused(
    place: Path, kind: str, path: str, why: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check(place, **{kind: ["{place}/docs", path]})
    found = path.format(place=place)
    assert caught.value.message == (
        f"{place}/etc/loopd.toml: [tools] files.{kind}.1: found {found!r}, allowed: a directory apart from loopd's own "
        f"and the system's ({why.format(place=place)})"
    )
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_the_programs_that_are_tools_may_be_read_and_not_written(place: Path) -> None:
    check(place, read=["{place}/programs", "{place}/servers"])
    for path, why in (("programs", "programs/bin"), ("programs/bin", "programs/bin"), ("servers", "servers/x")):
        with pytest.raises(ConfigError, match=why):
            check(place, write=[f"{place}/{path}"])


def test_a_root_that_is_only_read_may_not_lie_in_one_that_is_written(place: Path) -> None:
    check(place, read=["{place}/docs"], write=["{place}/docs/out"])
    check(place, read=["{place}/docs"], write=["{place}/docs"])
    with pytest.raises(ConfigError, match=r"files\.read\.0: .*lies in none of files\.write"):
        check(place, read=["{place}/docs/in"], write=["{place}/docs"])


@pytest.mark.parametrize("path", ["{place}/docs", "{place}/not-yet", "{place}/home/out", "{place}/homes"])
def test_other_roots_are_taken(place: Path, path: str) -> None:
    check(place, read=[path])


def test_a_root_that_came_to_lie_in_the_home_later_is_not_used(place: Path) -> None:
    (place / "home/sessions/log").write_text("x")
    (place / "later").symlink_to("home/sessions")
    roots = roots_of(place / "home", read=[place / "later"])
    with pytest.raises(ToolError, match=r"The root .*later is refused: it lies in .*home\."):
        read(Work(roots), {"path": "log"})


def test_the_deepest_root_above_a_path_decides(place: Path) -> None:
    roots = roots_of(Path("/nowhere"), read=[place], write=[place / "docs"])
    for path, expected in (("docs/a", f"{place}/docs"), ("docs", f"{place}/docs"), ("docs2", f"{place}")):
        root, _ = roots.locate(f"{place}/{path}")
        assert root.path == expected
    with pytest.raises(ToolError, match="could be below any root"):
        roots.locate("docs/a")


def test_many_roots_are_named_in_few_words(place: Path) -> None:
    roots = roots_of(place / "home", read=[Path(f"/srv/{number:02}") for number in range(20)])
    assert str(roots).endswith("/srv/07 and 12 more")
