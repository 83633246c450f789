"""A container image as an archive: an OCI image layout that `docker load` reads as well.

It has a manifest.json beside index.json, as `docker save` writes it since version 25. Formats:
github.com/opencontainers/image-spec, v1.1, and github.com/moby/docker-image-spec, v1.2.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_CONFIG = "application/vnd.oci.image.config.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Layer(NamedTuple):
    """A layer as it is stored: compressed bytes and their digest; digest and size of what is in it."""

    blob: bytes
    digest: str
    content: str
    size: int


def layer(root: Path, paths: Iterable[str], when: int) -> Layer:
    """A layer of these paths below a directory, with fixed owners, modes and times.

    Args:
        root: the directory that becomes /.
        paths: relative to it; a directory comes before what is in it.
        when: the time of all files, in seconds since 1970.
    """
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for path in paths:
            _add(tar, root, path, when)
    content = made.getvalue()
    blob = gzip.compress(content, compresslevel=6, mtime=0)
    return Layer(blob, _digest(blob), _digest(content), len(content))


def _add(tar: tarfile.TarFile, root: Path, path: str, when: int) -> None:
    entry = tar.gettarinfo(str(root / path), arcname=path)
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = when
    if entry.isdir():
        entry.mode = 0o1777 if path == "tmp" else 0o755
    if not entry.isfile():
        tar.addfile(entry)
        return
    entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    with (root / path).open("rb") as content:
        tar.addfile(entry, content)


def write(archive: Path, name: str, configuration: Mapping[str, Any], layers: Mapping[str, Layer]) -> None:
    """Write an image.

    Args:
        archive: the file.
        name: of the image, as `registry/name:tag`.
        configuration: what the image config calls `config`: Entrypoint, Env, Labels …
        layers: the lowest first, each with a word for what made it.
    """
    config = _json(
        {
            "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": configuration,
            "rootfs": {"type": "layers", "diff_ids": [one.content for one in layers.values()]},
            "history": [{"created_by": what} for what in layers],
        }
    )
    stored = [_reference(_LAYER, one.blob) for one in layers.values()]
    manifest = _json(
        {"schemaVersion": 2, "mediaType": _MANIFEST, "config": _reference(_CONFIG, config), "layers": stored}
    )
    names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name.rpartition(":")[2]}
    listed = {**_reference(_MANIFEST, manifest), "annotations": names}
    docker = {
        "Config": _path(_digest(config)),
        "RepoTags": [name],
        "Layers": [_path(one.digest) for one in layers.values()],
    }
    blobs = [config, manifest, *(one.blob for one in layers.values())]
    files = {
        **{_path(_digest(blob)): blob for blob in blobs},
        "index.json": _json({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [listed]}),
        "manifest.json": _json([docker]),
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
    }
    with tarfile.open(archive, "w", format=tarfile.GNU_FORMAT) as tar:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))


def _reference(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(blob), "size": len(blob)}


def _json(document: Any) -> bytes:
    return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
