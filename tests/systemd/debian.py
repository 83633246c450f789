"""What the containers are made of: a Debian tree by debootstrap, kept in .tools, and the wheels of this checkout."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from nspawn import PRIVATE

ROOT = Path(__file__).resolve().parents[2]

_SUITES = {(3, 11): "bookworm", (3, 13): "trixie"}
"""Debian's Python must be the one that builds the wheels: python-iptables is compiled."""

_MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
_OF_THE_SYSTEM = ("systemd", "systemd-sysv", "procps", "iproute2")
"""What every Debian server has, and a minimal one not; the rest is what the README tells to install."""

_OF_THE_TESTS = ("iptables-persistent", "nftables")
_SOURCES = ("netacct", "rules", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
_TOOLS = ("debootstrap", "systemd-nspawn", "nsenter", "setpriv", "unshare")
_LONGEST = 1800.0


class MissingError(Exception):
    """Something that only other machines have; says what."""


def require() -> None:
    """Raises MissingError where containers cannot run here."""
    if os.geteuid():
        raise MissingError("containers need root")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    lacking = [name for name in _TOOLS if shutil.which(name, path=path) is None]
    if lacking:
        raise MissingError(f"{', '.join(lacking)} missing (make setup installs debootstrap and systemd-container)")
    if sys.version_info[:2] not in _SUITES:
        known = " or ".join(f"{major}.{minor}" for major, minor in _SUITES)
        raise MissingError(f"this is Python {sys.version.split()[0]}; a Debian release has {known}")


def install_commands() -> list[str]:
    """The commands that README.md gives for a node, one by one."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install on a node")[2]
    block = re.search(r"(?:^    .*\n)+", section.partition("On the node")[2], re.MULTILINE)
    assert block is not None
    return [line.partition("#")[0].strip() for line in block[0].splitlines() if line.partition("#")[0].strip()]


def tree() -> Path:
    """A Debian with the packages that the README names, made once. Raises MissingError where it cannot be had."""
    suite, packages = _SUITES[sys.version_info[:2]], _packages()
    key = hashlib.sha256(" ".join((suite, *packages)).encode()).hexdigest()[:12]
    folder = ROOT / ".tools" / "debian"
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{suite}-{key}"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            for old in (path for path in folder.iterdir() if path.is_dir()):
                shutil.rmtree(old)
            _debootstrap(suite, packages, folder / "new")
            (folder / "new").rename(made)
    return made


def _packages() -> list[str]:
    named = [word for line in install_commands() if line.startswith("apt-get install") for word in line.split()[2:]]
    return sorted({*_OF_THE_SYSTEM, *_OF_THE_TESTS, *(word for word in named if not word.startswith("-"))})


def _debootstrap(suite: str, packages: list[str], target: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", suite, str(target), _MIRROR]
    environ = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    print(f"debootstrap {suite}: once, two minutes or so", file=sys.stderr, flush=True)
    log = target.with_name("debootstrap.log")
    with log.open("wb") as output:
        done = subprocess.run(
            [*PRIVATE, *command], env=environ, stdout=output, stderr=output, check=False, timeout=_LONGEST
        )
    if done.returncode:
        shutil.rmtree(target, ignore_errors=True)
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise MissingError(f"debootstrap {suite} from {_MIRROR}: {''.join(last)} (all of it: {log})")
    shutil.rmtree(target / "var/cache/apt/archives", ignore_errors=True)


def wheels(folder: Path) -> Path:
    """Build this checkout and all that it needs, as the README tells; returns the folder of the wheels."""
    source = folder / "source"
    source.mkdir()
    for name in _SOURCES:  # a copy: setuptools would leave build/ behind, and take old modules from there
        original = ROOT / name
        if original.is_dir():
            shutil.copytree(original, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(original, source)
    made = folder / "dist" / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LONGEST)
    assert done.returncode == 0, done.stderr
    return made
