"""An image made on the spot: static busybox and `traffic` (traffic.c), as the archive of `docker save`.

The format: github.com/moby/docker-image-spec, v1.2, "Combined Image JSON + Filesystem Changeset Format".
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

NAME = "docker.io/local/box:1"
"""Busybox with some links to it in /bin, and /bin/traffic. By default it does nothing, until SIGTERM."""

_APPLETS = (
    "sh",
    "sleep",
    "cat",
    "ls",
    "ip",
    "nc",
    "wget",
    "dd",
    "date",
    "env",
    "seq",
    "true",
    "false",
    "test",
    "mkdir",
)
_FOLDERS = ("bin", "tmp", "etc", "proc", "sys", "dev", "run", "var")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def build_traffic(folder: Path) -> Path:
    """Compile traffic.c, static: it runs in any image and on the machine itself."""
    program = folder / "traffic"
    source = Path(__file__).with_name("traffic.c")
    done = subprocess.run(
        ["cc", "-static", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(source)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return program


def box(archive: Path, traffic: Path) -> None:
    """Write the image NAME into an archive."""
    files = {"bin/busybox": Path("/bin/busybox").read_bytes(), "bin/traffic": traffic.read_bytes()}
    write(archive, NAME, layer(files, dict.fromkeys((f"bin/{applet}" for applet in _APPLETS), "busybox")))


def layer(files: Mapping[str, bytes], links: Mapping[str, str]) -> bytes:
    """A layer: executable files by path, and symbolic links."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name in _FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        for name, content in files.items():
            _add(tar, name, content, 0o755)
        for name, target in links.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return made.getvalue()


def write(archive: Path, name: str, *layers: bytes, entrypoint: tuple[str, ...] = ("/bin/traffic", "pause")) -> None:
    """Write an image of these layers, the lowest first."""
    digests = [hashlib.sha256(each).hexdigest() for each in layers]
    config = json.dumps(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": {"Entrypoint": list(entrypoint), "Env": ["PATH=/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        }
    ).encode()
    files = [f"{digest}/layer.tar" for digest in digests]
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": files}]
    with tarfile.open(archive, "w") as tar:
        _add(tar, config_name, config)
        for file, content in zip(files, layers, strict=True):
            _add(tar, file, content)
        _add(tar, "manifest.json", json.dumps(manifest).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))
