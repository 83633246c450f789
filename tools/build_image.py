"""Builds netacct's container image from Debian's packages and this checkout's wheels, without a container builder.

Three layers, so that an upgrade moves little: Debian and its Python; the libraries; netacct. None of Debian's scripts
runs, so it needs no root. What varies between two builds of one commit is what Debian and PyPI have published between
them: times, owners and order are fixed.
"""

from __future__ import annotations

import argparse
import compileall
import io
import os
import py_compile
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import image_archive
from image_archive import Layer

ROOT = Path(__file__).resolve().parents[1]
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"

_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_SUITES = {"3.11": ("bookworm", ("libssl3",)), "3.13": ("trixie", ("libssl3t64", "libzstd1"))}
"""Debian's Python must be the one that builds the wheels (python-iptables is compiled); and packages that differ."""

_PACKAGES = (
    *("base-files", "libc6", "libc-bin", "libgcc-s1", "libstdc++6", "zlib1g"),
    *(f"python{_PYTHON}-minimal", f"libpython{_PYTHON}-minimal", f"libpython{_PYTHON}-stdlib"),
    *("libbz2-1.0", "libcrypt1", "libexpat1", "libffi8", "liblzma5", "libsqlite3-0", "libuuid1"),
    # what python-iptables loads, and the tools to look at what it made
    *("iptables", "libxtables12", "libip4tc2", "libip6tc2"),
    *("libmnl0", "libnftnl11", "libnetfilter-conntrack3", "libnfnetlink0"),
    "busybox-static",  # a shell for whoever looks into the container
)
_APPLETS = ("cat", "env", "grep", "head", "ls", "ps", "sh", "sleep", "tail")
_MERGED = ("bin", "sbin", "lib", "lib64")
_LEFT_OUT = re.compile(
    r"usr/share/(man|info|locale|lintian|bash-completion|gdb|pixmaps|applications|gcc|binfmts|python3)/"
    r"|usr/share/doc/.*/(?!copyright$)[^/]*$"
    r"|usr/lib/([^/]*/gconv|init|locale)/|etc/(dpkg|update-motd\.d|profile|skel)|(boot|home|root|srv|mnt|opt)/"
    r"|usr/s?bin/(iconv|localedef|zic|zdump|tzselect|pldd|catchsegv)"
    r"|usr/lib/python[^/]*/(ensurepip|idlelib|lib2to3|pydoc_data|test|tkinter|turtledemo)/"
    r"|usr/lib/python[^/]*/lib-dynload/(_curses|_dbm|nis|readline)"
)
_SOURCES = ("netacct", "rules", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
_SITE = f"usr/local/lib/python{_PYTHON}/dist-packages"
_UNCOMPILED = re.compile(r"/kubernetes/client/(api|models)/")
"""Never imported by netacct, and 20 MB when compiled."""

_UNUSED = "kubernetes/aio"
"""All of the kubernetes package once more, for asyncio: 25 MB that nothing here imports."""

_LONGEST = 1800.0


class BuildError(Exception):
    """Why there is no image."""


def main() -> int:
    """Build, print what was built."""
    version = _version()
    parser = argparse.ArgumentParser(prog="tools/image", description="Build netacct's container image.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "netacct-image.tar")
    parser.add_argument("--name", default=default_name(), help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        layers = build()
    except BuildError as error:
        print(f"image: {error}", file=sys.stderr)
        return 1
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    image_archive.write(arguments.output, arguments.name, _configuration(version), layers)
    for what, layer in layers.items():
        print(f"{what:10} {layer.size / 1e6:6.1f} MB, compressed {len(layer.blob) / 1e6:5.1f} MB, {layer.digest}")
    on_node = sum(layer.size for layer in layers.values())
    size = arguments.output.stat().st_size
    print(f"{arguments.output}: {arguments.name}, {size / 1e6:.1f} MB, {on_node / 1e6:.1f} MB on a node")
    return 0


def default_name() -> str:
    """The name that the manifests in deploy/ have. `localhost` is nobody's registry: nothing is ever pulled from it."""
    return f"localhost/netacct:{_version()}"


def build() -> dict[str, Layer]:
    """The layers of the image, the lowest first. Raises BuildError."""
    if _PYTHON not in _SUITES:
        raise BuildError(f"this is Python {_PYTHON}; a Debian release has {' or '.join(_SUITES)}")
    when = time_of_files()
    with tempfile.TemporaryDirectory(prefix="netacct-image-") as work:
        folder = Path(work)
        root = folder / "root"
        _debian(folder, root)
        _compile(root / f"usr/lib/python{_PYTHON}", root)
        base = set(_files(root))
        _install(_wheels(folder), root)
        _compile(root / _SITE, root)
        ours = {path for path in _files(root) if re.match(rf"usr/local/bin|{_SITE}/netacct", path)}
        libraries = set(_files(root)) - base - ours
        parts = {"debian": base, "libraries": libraries, "netacct": ours}
        return {what: image_archive.layer(root, sorted(paths), when) for what, paths in parts.items()}


# --- what is in it -----------------------------------------------------------------------------------------------


def _debian(folder: Path, root: Path) -> None:
    """Unpack Debian's packages; none of their scripts runs."""
    for name in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "run", "proc", "sys", "dev", "etc/netacct", "var/lib"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in _MERGED:
        (root / name).symlink_to(f"usr/{name}")
    (root / "var/run").symlink_to("/run")
    (root / "tmp").mkdir(mode=0o1777)
    for package in sorted(_packages(folder).glob("*.deb")):
        content = _run(["dpkg-deb", "--fsys-tarfile", str(package)])
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                _unpack(tar, member, root)
    (root / "usr/bin/python3").symlink_to(f"python{_PYTHON}")
    for applet in _APPLETS:
        (root / "usr/bin" / applet).symlink_to("busybox")
    # python-iptables asks ctypes, which asks the linker's cache
    _run([str(root / "usr/sbin/ldconfig"), "-r", str(root)])
    shutil.rmtree(root / "var/cache")
    (root / "etc/passwd").write_text("root:x:0:0:root:/:/bin/sh\n", encoding="ascii")
    (root / "etc/group").write_text("root:x:0:\n", encoding="ascii")


def _packages(folder: Path) -> Path:
    """Fetch them by apt, with lists and configuration of its own: the machine's are not touched."""
    suite, more = _SUITES[_PYTHON]
    if not Path(KEYS).exists():
        raise BuildError(f"no {KEYS} (package debian-archive-keyring)")
    apt, debs = folder / "apt", folder / "debs"
    for name in ("state/lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True)
    debs.mkdir()
    (apt / "status").touch()
    sources = [f"{MIRROR} {suite}", f"{MIRROR} {suite}-updates", f"{MIRROR}-security {suite}-security"]
    lines = "".join(f"deb [signed-by={KEYS}] {source} main\n" for source in sources)
    (apt / "sources.list").write_text(lines, encoding="ascii")
    settings = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State": apt / "state",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "root",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    _run(["apt-get", *options, "update", "-qq"])
    _run(["apt-get", *options, "download", "-qq", *_PACKAGES, *more], cwd=debs)
    return debs


def _unpack(tar: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    """Put one file where a merged /usr has it."""
    name = member.name.removeprefix("./").strip("/")
    first, _, rest = name.partition("/")
    name = f"usr/{name}" if first in _MERGED and rest else name
    target = root / name
    if not name or _LEFT_OUT.match(f"{name}/" if member.isdir() else name) or target.is_symlink():
        return
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if member.issym():
        target.symlink_to(member.linkname)
    elif member.isfile() and (content := tar.extractfile(member)) is not None:
        target.write_bytes(content.read())
        target.chmod(stat.S_IMODE(member.mode) & 0o755)  # no setuid
    else:
        raise BuildError(f"{member.name} is neither file nor link")


def _wheels(folder: Path) -> Path:
    """Build this checkout and all that it needs, from a copy: setuptools would leave build/ behind."""
    source, made = folder / "source", folder / "wheels"
    source.mkdir()
    for name in _SOURCES:
        original = ROOT / name
        if original.is_dir():
            shutil.copytree(original, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(original, source)
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(made), str(source)])
    return made


def _install(wheels: Path, root: Path) -> None:
    site = root / _SITE
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
    command += ["--no-compile", "--root-user-action=ignore", "--no-warn-script-location", "--target", str(site)]
    _run([*command, "netacct"])
    shutil.rmtree(site / _UNUSED)
    shutil.rmtree(site / "bin")  # commands of libraries, and ours with this machine's Python
    for record in site.glob("*.dist-info/RECORD"):
        record.unlink()  # they list what was just removed, and nobody uninstalls from an image
    program = root / "usr/local/bin/netacct"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        "#!/usr/bin/python3\nimport sys\n\nfrom netacct.cli import main\n\nsys.exit(main())\n", encoding="ascii"
    )
    program.chmod(0o755)


def _compile(folder: Path, root: Path) -> None:
    """Compile what is there: on a root that cannot be written each start would do it."""
    compileall.compile_dir(
        folder,
        maxlevels=30,
        stripdir=str(root),
        prependdir="/",
        rx=_UNCOMPILED,
        quiet=2,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _files(root: Path) -> Iterator[str]:
    """Every path below a directory."""
    return (str(path.relative_to(root)) for path in root.rglob("*"))


def _configuration(version: str) -> dict[str, object]:
    return {
        "Entrypoint": ["/usr/local/bin/netacct"],
        "Cmd": ["run"],
        "Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin", "PYTHONDONTWRITEBYTECODE=1"],
        "ExposedPorts": {"19112/tcp": {}},
        "Labels": {
            "org.opencontainers.image.title": "netacct",
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
        "StopSignal": "SIGTERM",
        "WorkingDir": "/",
    }


def _version() -> str:
    text = (ROOT / "netacct" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]


def time_of_files() -> int:
    """The time that all files have, in seconds since 1970: SOURCE_DATE_EPOCH, else of the last commit, else 0."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    try:
        written = _run(["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]).strip()
    except BuildError:  # no git, or no clone
        return 0
    return int(written or b"0")


def _run(command: list[str], cwd: Path | None = None) -> bytes:
    environ = os.environ | {"LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, check=False, timeout=_LONGEST)
    except FileNotFoundError as error:
        raise BuildError(f"no program {command[0]}") from error
    if done.returncode:
        raise BuildError(f"{' '.join(command[:3])} …: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
