"""Assemble what a device needs into one tar named by its content (SPEC 10).

The tar holds the wheel of loopd made from this tree, every wheel it needs on the target (its own Python and
architecture, not the controller's), the hash-locked list they were fetched by, and a pip to install them with. The
target needs no network and no pip of its own.

    python bundle.py --python 3.11.2 --arch aarch64 --glibc 2.36 --build DIR

Progress goes to standard output; its last line is a JSON object: `version`, `release`, `tar`, `sha256`.
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
from collections.abc import Iterator
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
    parser.add_argument("--python", required=True, help="the target's own version, e.g. 3.11.2")
    parser.add_argument("--arch", required=True, choices=("x86_64", "aarch64"))
    parser.add_argument("--glibc", required=True, help="the target's glibc, e.g. 2.36")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="cache, default: build/")
    given = parser.parse_args()
    try:
        print(json.dumps(assemble(given.python, given.arch, given.glibc, given.build)))
    except BundleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def assemble(python: str, arch: str, glibc: str, build: Path) -> dict[str, str]:
    """Return the facts of the bundle for such a target, making it below `build` where it is not there yet.

    Args:
        python: full version; markers are decided for it (3.11.2 needs what 3.11.7 does not).
        arch: x86_64 or aarch64.
        glibc: decides which manylinux wheels run there.
        build: cache of lists and wheels, keyed by what decides them.

    Raises:
        BundleError: a dependency has no wheel for such a target, or the index cannot be reached.
    """
    inputs = f"{_dependencies()}\0{python}\0{arch}\0{glibc}"
    cache = build / "bundles" / f"{arch}-py{python}-glibc{glibc}-{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    lock = _lock(cache / "lock.txt", python, arch, glibc)
    if missing := _missing(wheels, lock):
        _fetch(wheels, missing, python, arch, glibc)
    wheel = _own_wheel(cache)
    version = wheel.name.split("-")[1]
    _say("packing")
    files = {f"wheels/{path.name}": path for path in _wheels(wheels, lock)}
    files |= {"lock.txt": lock, "pip.whl": _installer(cache / "pip"), f"own/{wheel.name}": wheel}
    part = cache / "bundle.tar.part"
    digest = _pack(part, files)
    tar = cache / f"loopd-{version}-{digest[:12]}.tar"
    part.replace(tar)
    _say(f"{tar.name}: {tar.stat().st_size / 1e6:.1f} MB, {len(files)} files")
    for old in sorted(cache.glob("loopd-*.tar"), key=lambda path: path.stat().st_mtime)[:-3]:
        old.unlink()
    return {"version": version, "release": f"{version}-{digest[:12]}", "tar": str(tar), "sha256": digest}


def _lock(path: Path, python: str, arch: str, glibc: str) -> Path:
    """Return the list of exact versions with hashes, decided once for the cache's inputs."""
    if path.exists():
        return path
    _say("deciding versions")
    part = path.with_suffix(".part")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--no-header", "--no-annotate"]
    command += ["--extra=model", f"--python-version={python}", "--only-binary=:all:", "--generate-hashes"]
    command += [f"--python-platform={arch}-manylinux_{glibc.replace('.', '_')}", "--constraints=requirements.txt"]
    command += [f"--output-file={part}"]
    _run([*command, "pyproject.toml"])
    part.rename(path)
    return path


def _fetch(wheels: Path, missing: list[str], python: str, arch: str, glibc: str) -> None:
    """Fetch what is missing, for the target and never for this machine."""
    _say(f"fetching {len(missing)} wheels for {arch}, Python {python}, glibc {glibc}")
    wanted = wheels.with_name("missing.txt")
    wanted.write_text("\n".join(missing) + "\n")
    platforms = [f"--platform=manylinux_2_{minor}_{arch}" for minor in _glibc_minors(glibc)]
    target = [*platforms, f"--platform=manylinux2014_{arch}", f"--python-version={python}", "--implementation=cp"]
    exactly = ("--no-deps", "--require-hashes", "--only-binary=:all:")
    _pip("download", *exactly, *target, "-d", str(wheels), "-r", str(wanted))


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
            facts.size, facts.mode = files[name].stat().st_size, 0o644
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
