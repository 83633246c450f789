"""The archive that `make image` writes: an OCI image layout that is the same for the same content."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import image_archive
import pytest

WHEN = 1_700_000_000
NAME = "registry.example/netacct:1"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small root file system, with modes of this machine's umask."""
    made = tmp_path / "root"
    (made / "usr/bin").mkdir(parents=True)
    (made / "tmp").mkdir()
    (made / "usr/bin/program").write_text("#!/bin/sh\n")
    (made / "usr/bin/program").chmod(0o700)
    (made / "usr/data").write_text("data")
    (made / "usr/data").chmod(0o600)
    (made / "bin").symlink_to("usr/bin")
    return made


def paths(root: Path) -> list[str]:
    """Everything below a root, as the builder lists it."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def written(root: Path, archive: Path) -> dict[str, bytes]:
    """The files of an archive that has this root in two layers."""
    listed = paths(root)
    layers = {"one": listed[:3], "two": listed[3:]}
    made = {what: image_archive.layer(root, part, WHEN) for what, part in layers.items()}
    image_archive.write(archive, NAME, {"Cmd": ["run"]}, made)
    with tarfile.open(archive) as tar:
        return {member.name: content.read() for member in tar if (content := tar.extractfile(member)) is not None}


def blob(files: dict[str, bytes], reference: dict[str, Any]) -> bytes:
    """What a reference of OCI leads to; it has the size and the digest that the reference says."""
    content = files[f"blobs/{reference['digest'].replace(':', '/')}"]
    assert len(content) == reference["size"]
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == reference["digest"]
    return content


def test_owners_modes_and_times_are_those_of_an_image(root: Path) -> None:
    """Files are root's, of one time, readable by all; only /tmp can be written by everybody; links stay links."""
    layer = image_archive.layer(root, paths(root), WHEN)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(layer.blob))) as tar:
        members = {member.name: member for member in tar}
    assert {(one.uid, one.gid, one.uname, one.gname, one.mtime) for one in members.values()} == {(0, 0, "", "", WHEN)}
    modes = {name: one.mode for name, one in members.items() if not one.issym()}
    assert modes == {"tmp": 0o1777, "usr": 0o755, "usr/bin": 0o755, "usr/bin/program": 0o755, "usr/data": 0o644}
    assert members["bin"].linkname == "usr/bin"


def test_every_reference_leads_to_its_content(root: Path, tmp_path: Path) -> None:
    """From index.json all is found by digest and size, and the layers' contents are what the configuration says."""
    files = written(root, tmp_path / "image.tar")
    (listed,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blob(files, listed))
    config = json.loads(blob(files, manifest["config"]))
    contents = [gzip.decompress(blob(files, layer)) for layer in manifest["layers"]]
    digests = [f"sha256:{hashlib.sha256(content).hexdigest()}" for content in contents]
    assert config["rootfs"]["diff_ids"] == digests
    assert config["config"] == {"Cmd": ["run"]}
    assert listed["annotations"] == {
        "io.containerd.image.name": NAME,
        "org.opencontainers.image.ref.name": "1",
    }
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}


def test_docker_finds_the_same_image(root: Path, tmp_path: Path) -> None:
    """manifest.json, which `docker load` reads, names the configuration and the layers of the other index."""
    files = written(root, tmp_path / "image.tar")
    (docker,) = json.loads(files["manifest.json"])
    manifest = json.loads(blob(files, json.loads(files["index.json"])["manifests"][0]))
    assert docker["RepoTags"] == [NAME]
    assert files[docker["Config"]] == blob(files, manifest["config"])
    assert [files[layer] for layer in docker["Layers"]] == [blob(files, layer) for layer in manifest["layers"]]


def test_the_same_content_is_the_same_archive(root: Path, tmp_path: Path) -> None:
    """Two archives of one content are equal to the byte, whatever the files' own times are."""
    written(root, tmp_path / "one.tar")
    for path in (root / "usr/data", root / "usr"):
        os.utime(path, (1, 1))
    written(root, tmp_path / "other.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "other.tar").read_bytes()
