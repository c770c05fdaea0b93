"""Assemble what a device needs into tars named by their content (SPEC 10).

A release holds the wheel of loopd made from this tree, every wheel it needs on the target (its own Python and
architecture, not the controller's), the hash-locked list they were fetched by, and a pip to install them with. The
target needs no network and no pip of its own. An MCP server from a package index is bundled likewise. Programs with
their manifests are one folder.

    python bundle.py release --python 3.11.2 --arch aarch64 --glibc 2.36
    python bundle.py server --name time --package mcp-server-time --python 3.11.2 --arch aarch64 --glibc 2.36
    python bundle.py programs --folder DIR

Progress goes to standard output; its last line is a JSON object: `name`, `tar`, `sha256`.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_OLDEST_GLIBC_MINOR = 17
# What may come from this machine's own settings: where packages are and how to reach them, never which ones.
_PIP_SETTINGS = ("index-url", "cert", "proxy", "client-cert", "trusted-host")
_SHOWN = re.compile(r"\s*(Downloading|Using cached|File was already downloaded) (\S+)(.*)")


class BundleError(Exception):
    """Something that is needed cannot be had; the message is one line."""


def main() -> int:
    """Parse, assemble, print the facts of the bundle."""
    parser = argparse.ArgumentParser(description="Assemble a bundle for a device.")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="cache, default: build/")
    kinds = parser.add_subparsers(dest="kind", required=True)
    wheels = argparse.ArgumentParser(add_help=False)
    wheels.add_argument("--python", required=True, help="the target's own version, e.g. 3.11.2")
    wheels.add_argument("--arch", required=True, choices=("x86_64", "aarch64"))
    wheels.add_argument("--glibc", required=True, help="the target's glibc, e.g. 2.36")
    kinds.add_parser("release", parents=[wheels], help="loopd itself")
    mcp = kinds.add_parser("server", parents=[wheels], help="an MCP server from the package index")
    mcp.add_argument("--name", required=True)
    mcp.add_argument("--package", required=True, action="append", help="what is installed, e.g. mcp-server-time==1.2")
    kinds.add_parser("programs", help="a folder of programs").add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    try:
        match given.kind:
            case "release":
                facts = release(Target(given.python, given.arch, given.glibc), given.build)
            case "server":
                target = Target(given.python, given.arch, given.glibc)
                facts = server(given.name, given.package, target, given.build)
            case _:
                facts = programs(given.folder, given.build)
        print(json.dumps(facts))
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True, slots=True)
class Target:
    """What a bundle is made for.

    Attributes:
        python: full version; markers are decided for it (3.11.2 needs what 3.11.7 does not).
        arch: x86_64 or aarch64.
        glibc: decides which manylinux wheels run there.
    """

    python: str
    arch: str
    glibc: str

    def __str__(self) -> str:
        return f"{self.arch}-py{self.python}-glibc{self.glibc}"


def release(target: Target, build: Path) -> dict[str, str]:
    """Return the facts of loopd's bundle for a target, making it below `build` where it is not there yet.

    Args:
        target: what it is made for.
        build: cache of lists and wheels, keyed by what decides them.

    Raises:
        BundleError: a dependency has no wheel for such a target, or the index cannot be reached.
    """
    cache = _cache(build, str(target), _dependencies())
    wheel = _own_wheel(cache)
    how = ("--extra=model", "--constraints=requirements.txt", "pyproject.toml")
    return _assemble(f"loopd-{wheel.name.split('-')[1]}", how, target, cache, own=(wheel,))


def server(name: str, packages: Sequence[str], target: Target, build: Path) -> dict[str, str]:
    """Return the facts of the bundle of an MCP server; as `release`.

    Args:
        name: what it is called.
        packages: what is installed into its environment, as pip takes them.
        target: what it is made for.
        build: as above.

    Raises:
        BundleError: as above.
    """
    cache = _cache(build, f"mcp-{name}-{target}", "\n".join(packages))
    (cache / "packages.txt").write_text("".join(f"{package}\n" for package in packages))
    return _assemble(f"mcp-{name}", (str(cache / "packages.txt"),), target, cache)


def programs(folder: Path, build: Path) -> dict[str, str]:
    """Return the facts of a bundle of a folder: all of it but what is hidden; what is executable stays so.

    Raises:
        BundleError: there is no such folder, or a part of it is neither a file nor a folder.
    """
    folder = folder.expanduser()
    if not folder.is_dir():
        raise BundleError(f"{folder}: there is no such folder on the controller")
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or (path.is_dir() and not path.is_symlink()):
            continue
        if not path.is_file():
            raise BundleError(f"{path}: neither a file nor a folder")
        files[str(name)] = path
    return _packed("programs", files, _cache(build, "programs", str(folder.resolve())))


def _assemble(
    name: str, how: Sequence[str], target: Target, cache: Path, *, own: Sequence[Path] = ()
) -> dict[str, str]:
    """Bring the wheels together and pack them; `how` tells uv what is wanted."""
    wheels = cache / "wheels"
    wheels.mkdir(exist_ok=True)
    lock = _lock(cache / "lock.txt", how, target)
    if missing := _missing(wheels, lock):
        _fetch(wheels, missing, target)
    files = {f"wheels/{path.name}": path for path in (*_wheels(wheels, lock), *own)}
    return _packed(name, files | {"lock.txt": lock, "pip.whl": _installer(cache.parent / "pip")}, cache)


def _packed(name: str, files: dict[str, Path], cache: Path) -> dict[str, str]:
    """Pack files into a tar of the cache; the last three of them stay."""
    part = cache / "bundle.tar.part"
    digest = _pack(part, files)
    tar = cache / f"{name}-{digest[:12]}.tar"
    part.replace(tar)
    _say(f"{tar.name}: {tar.stat().st_size / 1e6:.1f} MB, {len(files)} files")
    for old in sorted(cache.glob("*.tar"), key=lambda path: path.stat().st_mtime)[:-3]:
        old.unlink()
    return {"name": tar.stem, "tar": str(tar), "sha256": digest}


def _cache(build: Path, name: str, inputs: str) -> Path:
    """Return the folder for a bundle that is decided by its name and `inputs`."""
    decided = hashlib.sha256(f"{inputs}\0{name}".encode()).hexdigest()
    folder = build / "bundles" / f"{name}-{decided[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _lock(path: Path, how: Sequence[str], target: Target) -> Path:
    """Return the list of exact versions with hashes, decided once for the cache's inputs."""
    if path.exists():
        return path
    _say("deciding versions")
    part = path.with_suffix(".part")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    command += [f"--python-version={target.python}", "--only-binary=:all:", "--generate-hashes"]
    command += [f"--python-platform={target.arch}-manylinux_{target.glibc.replace('.', '_')}", f"--output-file={part}"]
    _run([*command, *how])
    part.rename(path)
    return path


def _fetch(wheels: Path, missing: Sequence[str], target: Target) -> None:
    """Fetch what is missing, for the target and never for this machine."""
    _say(f"fetching {len(missing)} wheels for {target}")
    wanted = wheels.with_name("missing.txt")
    wanted.write_text("\n".join(missing) + "\n")
    platforms = [f"--platform=manylinux_2_{minor}_{target.arch}" for minor in _glibc_minors(target.glibc)]
    platforms += [f"--platform=manylinux2014_{target.arch}", f"--python-version={target.python}"]
    exactly = ("--no-deps", "--require-hashes", "--only-binary=:all:", "--implementation=cp")
    _pip("download", *exactly, *platforms, "-d", str(wheels), "-r", str(wanted))


def _missing(wheels: Path, lock: Path) -> list[str]:
    """Return the entries of the lock whose wheel is not there, or is not one that the entry allows."""
    there = _there(wheels)
    return [
        entry
        for key, entry in _entries(lock).items()
        if key not in there or hashlib.sha256(there[key].read_bytes()).hexdigest() not in entry
    ]


def _installer(folder: Path) -> Path:
    """Return the wheel of the pip that this project locks."""
    locked = re.search(r"^pip==(\S+)(?:.*\\\n)+.*\n", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    if locked is None:
        raise BundleError("requirements.txt locks no pip")
    if not list(folder.glob(f"pip-{locked[1]}-*.whl")):
        folder.mkdir(exist_ok=True)
        (folder / "pip.txt").write_text(locked[0])
        _pip("download", "--no-deps", "--require-hashes", "-d", str(folder), "-r", str(folder / "pip.txt"))
    return next(folder.glob(f"pip-{locked[1]}-*.whl"))


def _own_wheel(cache: Path) -> Path:
    """Build the wheel of this tree; its bytes depend on the sources alone."""
    folder = cache / "own"
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)])
    return next(folder.glob("loopd-*.whl"))


def _wheels(wheels: Path, lock: Path) -> Iterator[Path]:
    """Yield the wheel of each entry of the lock; others of earlier lists stay behind.

    Raises:
        BundleError: one is missing, by name.
    """
    there = _there(wheels)
    for key in _entries(lock):
        if key not in there:
            raise BundleError(f"the wheelhouse lacks {key}")
        yield there[key]


def _there(wheels: Path) -> dict[str, Path]:
    """Return the wheels that are there, by `name==version`."""
    return {_normal(path.name.split("-")[0]) + "==" + path.name.split("-")[1]: path for path in wheels.glob("*.whl")}


def _entries(lock: Path) -> dict[str, str]:
    """Return the entries of the lock with their hashes, by `name==version`."""
    found = re.finditer(r"^([A-Za-z0-9._-]+)==([^\s;\\]+).*(?:\n[ \t].*)*", lock.read_text(), re.MULTILINE)
    return {f"{_normal(entry[1])}=={entry[2]}": entry[0] for entry in found}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _pack(tar: Path, files: dict[str, Path]) -> str:
    """Write a tar whose bytes depend on names and contents alone; return its SHA-256."""
    with tarfile.open(tar, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            facts = tarfile.TarInfo(name)
            there = files[name].stat()
            facts.size, facts.mode = there.st_size, 0o755 if there.st_mode & 0o100 else 0o644
            with files[name].open("rb") as content:
                archive.addfile(facts, content)
    with tar.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _dependencies() -> str:
    """Return the text that decides which packages there are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = json.dumps([project["dependencies"], project["optional-dependencies"]["model"]])
    return named + (ROOT / "requirements.txt").read_text()


def _glibc_minors(glibc: str) -> range:
    return range(int(glibc.split(".")[1]), _OLDEST_GLIBC_MINOR - 1, -1)


def _pip(*arguments: str) -> None:
    """Run pip with this machine's way to the index and nothing else of its settings."""
    _run([sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check"])


def _environment() -> dict[str, str]:
    """Return the environment less every setting of pip and uv that could choose other packages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    for setting in _PIP_SETTINGS:
        asked = [sys.executable, "-m", "pip", "config", "get", f"global.{setting}"]
        variable = "PIP_" + setting.upper().replace("-", "_")
        value = os.environ.get(variable)
        if value is None:
            done = subprocess.run(asked, capture_output=True, text=True, check=False)
            value = done.stdout.strip() if done.returncode == 0 else ""
        if value:
            kept[variable] = value
    if "PIP_INDEX_URL" in kept:
        kept["UV_DEFAULT_INDEX"] = kept["PIP_INDEX_URL"]
    if "PIP_CERT" in kept:
        kept["SSL_CERT_FILE"] = kept["PIP_CERT"]
    quiet = {"PIP_CONFIG_FILE": os.devnull, "PIP_DEFAULT_TIMEOUT": "120", "PIP_PROGRESS_BAR": "off"}
    return kept | quiet | {"UV_NO_CONFIG": "1", "SOURCE_DATE_EPOCH": "1577836800"}


def _run(command: list[str]) -> None:
    """Run, showing what is fetched.

    Raises:
        BundleError: it failed; with the line that says why.
    """
    said: list[str] = []
    with subprocess.Popen(
        command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            if shown := _SHOWN.match(line):
                _say(f"{shown[2].rsplit('/', 1)[-1]}{shown[3]}")
    if process.returncode:
        why = [line for line in said if re.search(r"error|cause|no matching|not find", line, re.IGNORECASE)] or said[
            -1:
        ]
        raise BundleError(f"{Path(command[2]).name} {command[3]}: {' '.join(why[-3:])}")


def _say(text: str) -> None:
    print(f"bundle: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
