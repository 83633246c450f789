"""CNI configuration that is in the way: plugins that masquerade more than what leaves the cluster."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from netacct.doctor.facts import Masquerade
from netacct.identity import ranges_cni

_PLUGINS = ("bridge", "ptp")
"""Plugins that with `ipMasq` masquerade all but what stays in the node's own range (pkg/ip/ipmasq_linux.go)."""


def masquerades(directories: Iterable[str]) -> tuple[Masquerade, ...]:
    """Those of the network that counts in each directory."""
    found = []
    for path, networks in ranges_cni.read(directories).files.items():
        with contextlib.suppress(OSError, ValueError):
            document = json.loads(Path(path).read_bytes())
            found += [Masquerade(path, plugin, networks) for plugin in _masquerading(document)]
    return tuple(found)


def _masquerading(document: Any) -> Iterator[str]:
    for node in ranges_cni.objects(document):
        if node.get("type") in _PLUGINS and node.get("ipMasq") is True:
            yield str(node["type"])
