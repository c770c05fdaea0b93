"""Whatever path is given, nothing outside the root is read, listed, found or written."""

import ctypes
import errno
import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopd.errors import ToolError
from loopd.tools.files.beneath import walk
from loopd.tools.files.work import Stop, Stopped
from tests.tools.files.tree import HIDDEN, INSIDE, Tree, ordinary_user, public_directory

READERS = ("read", "list", "search")
OUTSIDE = [
    ("/etc/passwd", "is outside the roots"),
    ("/", "is outside the roots"),
    ("//", "is outside the roots"),
    ("{outside}/note.txt", "is outside the roots"),
    ("{docs}-sibling/note.txt", "is outside the roots"),
    ("{docs}s", "is outside the roots"),
    ("{DOCS}/note.txt", "is outside the roots"),
    ("/proc/self/environ", "is outside the roots"),
    ("..", "without '..'"),
    ("../outside/note.txt", "without '..'"),
    ("door/../../outside/note.txt", "without '..'"),
    ("{docs}/../outside/note.txt", "without '..'"),
    ("door/..", "without '..'"),
    ("to-secret", "leads outside"),
    ("to-outside", "leads outside"),
    ("to-outside/note.txt", "leads outside"),
    ("to-outside/../docs/note.txt", "without '..'"),
    ("absolute", "leads outside"),
    ("absolute/note.txt", "leads outside"),
    ("to-etc/passwd", "leads outside"),
    ("chain-1", "leads outside"),
    ("door/climb", "leads outside"),
    ("door/climb/note.txt", "leads outside"),
    ("door/above/outside/note.txt", "leads outside"),
    ("to-sibling/note.txt", "leads outside"),
    ("magic/root/etc/passwd", "leads outside"),
    ("loop", "too many links"),
    ("loop-1/note.txt", "too many links"),
    ("ever/ever/ever/note.txt", "too many links"),
    ("\0", "not a path"),
    ("note.txt\0.png", "not a path"),
    ("x" * 4097, "not a path"),
    ("\ud800", "not a path"),
    ("x" * 256, "the name is too long"),
    ("d/" * 2000 + "note.txt", "no d in"),
    ("note.txt/x", "is a file, not a directory"),
]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def linked(tree: Tree) -> Tree:
    tree.put("docs-sibling/note.txt", HIDDEN)
    links = {
        "to-secret": "../outside/note.txt",
        "to-outside": "../outside",
        "absolute": str(tree.outside),
        "to-etc": "/etc",
        "chain-1": "chain-2",
        "chain-2": "door/chain-3",
        "door/chain-3": "../to-secret",
        "door/climb": "../../outside",
        "door/above": "../..",
        "to-sibling": "../docs-sibling",
        "magic": "/proc/self",
        "loop": "loop",
        "loop-1": "loop-2",
        "loop-2": "loop-1",
        "ever": "ever-1/" * 30,
        "ever-1": "ever/" * 30,
        "good": "door/note.txt",
        "good-absolute": str(tree.docs / "door"),
        "good-chain": "door/back/door/note.txt",
        "door/back": "..",
        "door/here": ".",
        "door/self": "../door",
    }
    for name, target in links.items():
        (tree.docs / name).symlink_to(target)
    return tree


@pytest.mark.parametrize("tool", [*READERS, "write"])
@pytest.mark.parametrize(("path", "words"), OUTSIDE)
def test_a_path_that_leads_outside_is_refused_in_one_line_by_every_tool(
    linked: Tree, tool: str, path: str, words: str
) -> None:
    docs = str(linked.docs)
    path = path.format(docs=docs, DOCS=docs.upper(), outside=linked.outside)
    before = linked.beside()
    arguments = {"content": "x"} if tool == "write" else {"text": HIDDEN} if tool == "search" else {}
    assert words in linked.fault(tool, path=path, **arguments)
    assert linked.beside() == before
    assert linked.leftovers() == []


@pytest.mark.parametrize(
    "path",
    [
        "note.txt",
        "./note.txt",
        ".//door///note.txt",
        "note.txt/",
        "{docs}/note.txt",
        "{docs}//door/./note.txt",
        "//{docs}/note.txt",
        "good",
        "good-absolute/note.txt",
        "good-chain",
        "door/back/note.txt",
        "door/here/here/note.txt",
        "door/self/self/back/door/note.txt",
    ],
)
def test_a_path_that_stays_inside_is_read_however_it_is_written(linked: Tree, path: str) -> None:
    assert linked("read", path=path.format(docs=linked.docs)).endswith(f"{INSIDE}\n")


def test_no_link_is_followed_by_a_search(linked: Tree) -> None:
    found = linked("search", text=HIDDEN)
    assert found == "Nothing found in 2 files."
    named = linked("search", name="note")
    assert named.splitlines()[1:] == [f"{linked.docs}/door/note.txt 7 bytes", f"{linked.docs}/note.txt 7 bytes"]


@pytest.mark.parametrize("real", [True, False])
def test_a_root_that_is_a_link_is_known_by_both_names(tmp_path: Path, real: bool) -> None:
    tree = Tree(tmp_path / "far")
    link = tmp_path / "docs"
    link.symlink_to(tree.docs)
    tree.docs, target = link, tree.docs
    assert INSIDE in tree("read", path=f"{target if real else link}/note.txt")
    assert "outside the roots" in tree.fault("read", path=f"{tmp_path}/far/outside/note.txt")


def test_a_link_that_takes_the_place_of_the_root_is_not_followed(tree: Tree) -> None:
    roots = tree.roots
    tree.docs.rename(tree.path / "moved")
    tree.docs.symlink_to(tree.outside)
    with pytest.raises(ToolError, match="cannot be used now"):
        walk(*roots.locate("note.txt"), Stop())


def test_a_root_that_is_missing_is_said_and_serves_once_it_is_there(tree: Tree) -> None:
    roots = tree.roots
    tree.docs.rename(tree.path / "moved")
    with pytest.raises(ToolError, match=r"The root .*/docs cannot be used now: No such file .*mounted"):
        walk(*roots.locate("note.txt"), Stop())
    (tree.path / "moved").rename(tree.docs)
    with walk(*roots.locate("note.txt"), Stop()) as spot:
        assert spot.info is not None


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["FIFO", "socket", "device", "directory"])
def test_what_is_no_regular_file_is_named_and_not_opened(
    tree: Tree, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tree.docs / "odd"
    with socket.socket(socket.AF_UNIX) as listening:
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "socket":
            monkeypatch.chdir(tree.docs)
            listening.bind("odd")
        elif kind == "directory":
            path.mkdir()
        else:
            monkeypatch.setattr("stat.S_ISREG", lambda mode: False)  # only root can make a device
            monkeypatch.setattr("stat.S_IFMT", lambda mode: 0o020000)
            path.touch()
        opened: list[object] = []
        real = os.open

        def watched(path: object, flags: int, *arguments: int, **options: int) -> int:
            if not flags & os.O_PATH:
                opened.append(path)
            return real(path, flags, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", watched)
        assert f"is a {kind}, not a file" in tree.fault("read", path="odd")
        assert f"is a {kind}, not a file; nothing was written" in tree.fault("write", path="odd", content="x")
        assert opened == []
        monkeypatch.undo()
        if kind in {"FIFO", "socket"}:
            assert tree("search", text="x") == "Nothing found in 2 files."


@pytest.mark.parametrize("tool", READERS)
def test_what_is_not_permitted_is_said(tool: str) -> None:
    with public_directory() as directory:
        tree = Tree(directory)
        tree.docs.chmod(0o755)
        tree.put("docs/locked/note.txt", HIDDEN)
        for path in tree.docs.rglob("*"):  # whatever the umask is
            path.chmod(0o755)
        (tree.docs / "closed.txt").touch(0o000)
        (tree.docs / "locked").chmod(0o000)
        with ordinary_user():
            assert "loopd's user is not allowed to" in tree.fault(tool, path="locked/note.txt", text="x")
            assert "loopd's user is not allowed to" in tree.fault("list", path="locked")
            assert "loopd's user is not allowed to" in tree.fault("read", path="closed.txt")
            found = tree("search", text=INSIDE)
            assert found.startswith("2 found in 2 files; 2 could not be read:")
        (tree.docs / "locked").chmod(0o700)


def test_names_with_newlines_escapes_and_bytes_that_are_not_utf8_are_shown_safely(tree: Tree) -> None:
    for name in (b"two\nlines", b"\x1b[31mred", b"caf\xe9", "\u202egnp.exe".encode()):
        (tree.docs / os.fsdecode(name)).write_text(INSIDE)
    shown = [r'"\u001b[31mred"', r'"caf\udce9"', r'"two\nlines"', r'"\u202egnp.exe"']
    lines = tree("list").splitlines()
    assert len(lines) == 1 + 2 + len(shown)
    assert {f"{name} 6 bytes" for name in shown} <= set(lines)
    assert "\x1b" not in tree("search", name="red")
    assert INSIDE in tree("read", path="two\nlines")
    assert INSIDE in tree("read", path="caf\udce9")
    assert r'"\u001b[31mno"' in tree.fault("read", path="\x1b[31mno")


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(tree: Tree) -> None:
    assert tree.fault("read", path="Note.TXT").endswith("Like it are note.txt.")
    assert "Like it are door." in tree.fault("read", path="doors/note.txt")


def test_a_walk_ends_at_its_next_step_when_told_to(tree: Tree) -> None:
    stop = Stop()
    stop.set()
    before = descriptors()
    with pytest.raises(Stopped):
        walk(*tree.roots.locate("door/note.txt"), stop)
    assert descriptors() == before


def test_no_descriptor_is_left_open_by_any_outcome(linked: Tree) -> None:
    before = descriptors()
    for path, _ in OUTSIDE:
        for tool in READERS:
            linked.fault(tool, path=path.format(docs=linked.docs, DOCS="/DOCS", outside=linked.outside), text="x")
    linked("read", path="good-chain")
    linked("list", path="door/self")
    linked("search", text="x")
    linked("write", path="door/new.txt", content="x")
    assert descriptors() == before


# --- any path at all ----------------------------------------------------------------------------------------------

NAMES = ["a", "b", "note.txt", "up", "out", "rel", "abs", "loop", "deep", "..", ".", "", "missing", "\n", "é"]
PATHS = st.builds(
    lambda start, parts: start + "/".join(parts),
    st.sampled_from(["", "/", "{docs}/", "{docs}", "{outside}/", "{docs}/../outside/", "//"]),
    st.lists(st.sampled_from(NAMES) | st.text(max_size=3), max_size=8),
)
TARGETS = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5).map("/".join)


@settings(max_examples=300, deadline=None)
@given(
    path=PATHS,
    targets=st.lists(TARGETS, min_size=4, max_size=4),
    absolute=st.sampled_from(["/etc", "{outside}", "{docs}/a", "{docs}/../outside", "{outside}/note.txt"]),
    tool=st.sampled_from(["read", "list", "search", "write"]),
)
def test_no_path_through_any_links_ever_shows_or_changes_what_is_outside(
    path: str, targets: list[str], absolute: str, tool: str
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = Tree(Path(directory))
        tree.put("docs/a/b/note.txt", INSIDE)
        places = {"docs": tree.docs, "outside": tree.outside}
        for name, target in zip(["up", "a/up", "a/b/rel", "deep"], targets, strict=True):
            (tree.docs / name).symlink_to(target.lstrip("/") or ".")
        (tree.docs / "a/abs").symlink_to(absolute.format(**places))
        (tree.docs / "out").symlink_to("../outside")
        (tree.docs / "loop").symlink_to("a/../loop")
        before = tree.beside()
        path = path.replace("{docs}", str(tree.docs)).replace("{outside}", str(tree.outside))
        try:
            text = tree(tool, path=path, content="x", directories=True, name="*")
        except ToolError as error:
            text = error.message
        lines = [line for line in text.splitlines() if " -> " not in line]  # a link's own text is no content of it
        assert HIDDEN not in "\n".join(lines)
        assert tree.beside() == before


class OpenHow(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def kernel_error(root: int, path: str) -> int:
    """What the kernel's own RESOLVE_BENEATH (openat2, without magic links) says to a path: an errno, 0 for yes."""
    libc = ctypes.CDLL(None, use_errno=True)
    how = OpenHow(os.O_PATH | os.O_CLOEXEC, 0, 0x08 | 0x02)
    opened = libc.syscall(437, root, os.fsencode(path or "."), ctypes.byref(how), ctypes.sizeof(how))
    if opened < 0:
        return ctypes.get_errno()
    os.close(opened)
    return 0


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from(["a", "b", "note.txt", "up", "rel", "deep", "."]), max_size=7),
    targets=st.lists(TARGETS, min_size=4, max_size=4),
)
def test_a_walk_leads_where_the_kernels_own_confined_lookup_leads(parts: list[str], targets: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        tree = Tree(Path(directory))
        tree.put("docs/a/b/note.txt", INSIDE)
        for name, target in zip(["up", "a/up", "a/b/rel", "deep"], targets, strict=True):
            (tree.docs / name).symlink_to(target.lstrip("/") or ".")
        root = os.open(tree.docs, os.O_PATH)
        try:
            expected = kernel_error(root, "/".join(parts))
        finally:
            os.close(root)
        try:
            with walk(*tree.roots.locate("/".join(parts)), Stop()) as spot:
                found = spot.info is not None
        except ToolError:
            found = False
        assert found == (expected == 0) or expected == errno.ENOTDIR  # a slash behind a file is forgiven
