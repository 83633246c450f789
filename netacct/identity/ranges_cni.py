"""Local ranges from CNI configuration: the addresses that this node's own IPAM may give to its pods.

Of each directory the first network counts (files `.conf`, `.conflist` and `.json`, by name), as for containerd and
CRI-O: what lies behind it, a podman network for example, is no pod's. Two IPAMs say on this node what they may give:

    host-local   `ranges` (or one `subnet`), with `rangeStart` and `rangeEnd` where the subnet is shared with other
                 nodes; at any depth, for Multus and others that delegate (plugins/ipam/host-local/README.md of
                 github.com/containernetworking/plugins)
    flannel      FLANNEL_SUBNET and FLANNEL_IPV6_SUBNET in /run/flannel/subnet.env (plugins/meta/flannel)

Calico, Cilium, AWS and Azure keep that elsewhere: their configuration says nothing, and their pods' addresses join the
local ranges one by one, as sources name them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from netacct import log, model, plainfile
from netacct.following import Follower, Pace, contents
from netacct.identity.cni_cache import CONFIGURATION
from netacct.identity.ranges_provider import Fact, Told
from netacct.identity.source import Health
from netacct.model import Network
from netacct.policy import local_range_fault, sort_key

PROVIDER = "cni"

FLANNEL = "/run/flannel/subnet.env"

SIZE_LIMIT = 1 << 20

POLL = 60.0
"""Seconds between looks when nothing was signalled."""

_SUFFIXES = (".conf", ".conflist", ".json")
_PLACEHOLDERS = ("usepodcidr", "usepodcidripv6")
"""What kubenet's and Calico's templates write for "the node's podCIDR", which is not in the file."""


class Fault(ValueError):  # noqa: N818 -- what is wrong with a file, and not with the program
    """A file that is no network configuration, or one with an impossible range; says why."""


class Found(NamedTuple):
    """The ranges of the file that counted in each directory, and why other files did not (both by path)."""

    files: Mapping[str, tuple[Network, ...]]
    faults: Mapping[str, str]

    @property
    def ranges(self) -> tuple[Network, ...]:
        """All ranges, sorted."""
        return tuple(sorted({network for several in self.files.values() for network in several}, key=sort_key))


def read(directories: Iterable[str] = CONFIGURATION, before: Mapping[str, tuple[Network, ...]] | None = None) -> Found:
    """The local ranges of now.

    Args:
        directories: where to look.
        before: what was found earlier; of a file that has an error since then, that holds. Any other file with an
            error is passed over.
    """
    files: dict[str, tuple[Network, ...]] = {}
    faults: dict[str, str] = {}
    for directory in dict.fromkeys(map(os.path.realpath, directories)):
        for path in _files(directory, faults):
            try:
                files[path] = tuple(_ranges(_load(path)))
                break
            except (OSError, Fault) as error:
                faults[path] = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
                if before and path in before:
                    files[path] = before[path]
                    break
    return Found(files, faults)


def _files(directory: str, faults: dict[str, str]) -> list[str]:
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(_SUFFIXES))  # noqa: PTH208 -- strings
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        faults[directory] = f"cannot be read: {error.strerror}"
        return []
    paths = [os.path.join(directory, name) for name in names]  # noqa: PTH118 -- as above
    return [path for path in paths if not os.path.isdir(path)]  # noqa: PTH112 -- as above


def _load(path: str) -> Mapping[str, Any]:
    """A network configuration (list). Raises OSError and Fault."""
    with open(path, "rb", opener=plainfile.opener) as file:
        data = file.read(SIZE_LIMIT + 1)
    try:
        document = json.loads(data) if len(data) <= SIZE_LIMIT else None
    except (ValueError, RecursionError) as error:
        raise Fault(f"is not JSON: {error}") from None
    if not isinstance(document, dict) or not ("type" in document or document.get("plugins")):
        raise Fault("is no network configuration: it has neither type nor plugins")
    return document


def objects(document: Any) -> Iterator[dict[str, Any]]:
    """Each object of a document of JSON, at any depth: plugins are nested in each other (Multus), and IPAM in them."""
    pending = [document]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            yield node
            pending += node.values()


def _ranges(network: Mapping[str, Any]) -> Iterator[Network]:
    """All ranges of a network, at any depth. Raises Fault."""
    for node in objects(network):
        if node.get("type") == "host-local":
            yield from _host_local(node)
        elif node.get("type") == "flannel":
            path = str(node.get("subnetFile") or FLANNEL)
            if "\0" in path:
                raise Fault(f"{path!r:.60} is no path")
            yield from _flannel(path)


def _host_local(ipam: Mapping[str, Any]) -> Iterator[Network]:
    several = ipam.get("ranges") or []
    if not isinstance(several, list) or not all(isinstance(entry, list) for entry in several):
        raise Fault("ranges of host-local is not a list of lists")
    entries = [entry for group in several for entry in group]
    if ipam.get("subnet"):
        entries.append(ipam)
    for entry in entries:
        if not isinstance(entry, dict):
            raise Fault("a range of host-local is not an object")
        subnet = str(entry.get("subnet") or "")
        if subnet.lower() not in _PLACEHOLDERS:
            yield from _part(subnet, entry.get("rangeStart"), entry.get("rangeEnd"))


def _part(subnet: str, start: Any, end: Any) -> Iterator[Network]:
    """The subnet, or the part of it from `start` to `end`, as networks."""
    parts: list[Network] = []
    try:
        whole = model.network(subnet)
        first = ipaddress.ip_address(str(start)) if start else whole.network_address
        last = ipaddress.ip_address(str(end)) if end else whole.broadcast_address
        if first in whole and last in whole:
            parts += ipaddress.summarize_address_range(first, last)
    except (ValueError, TypeError):
        parts = []
    if not parts:
        raise Fault(f"{subnet!r}, from {start or 'its first'} to {end or 'its last address'}, is no range")
    for part in parts:
        fault = local_range_fault(part)
        if fault:
            raise Fault(fault)
        yield part


def _flannel(path: str) -> Iterator[Network]:
    """What flanneld wrote about this node, which it does before pods can start; nothing where it has not yet."""
    with (
        contextlib.suppress(FileNotFoundError),
        open(path, encoding="utf-8", errors="replace", opener=plainfile.opener) as file,
    ):
        for line in file.read(SIZE_LIMIT).splitlines():
            key, _, value = line.partition("=")
            if key in ("FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET") and value:
                yield from _part(value.strip(), None, None)


class CniRanges:
    """Follows the configuration, and tells the ranges whenever they differ.

    What was found in a file holds while there is an error in it; the log says so once.

    Args:
        directories: where the runtime reads its configuration.
        poll: seconds between looks when nothing was signalled.
    """

    name = PROVIDER

    def __init__(self, directories: Sequence[str] = CONFIGURATION, poll: float = POLL) -> None:
        self._directories = tuple(directories)
        followed = (*directories, os.path.dirname(FLANNEL))  # noqa: PTH120 -- as above
        self._found = Found({}, {})
        self._tell: Callable[[tuple[Network, ...]], None] | None = None
        self._log = log.get(source="cni-ranges")
        self._follower = Follower(lambda: contents(followed), self._look, Pace(poll), "source-cni-ranges", self._log)

    def read(self, seconds: float) -> Told:  # noqa: ARG002 -- files do not keep anybody waiting
        """What the files say."""
        return Told(read(self._directories).ranges)

    def start(self, changed: Callable[[tuple[Network, ...]], None]) -> tuple[Network, ...]:
        """Return the ranges of now, and call `changed` with all of them whenever they differ, from a thread."""
        self._look(None)
        first, self._tell = self._found.ranges, changed
        self._follower.start()
        return first

    @property
    def facts(self) -> tuple[Fact, ...]:
        """None."""
        return ()

    def wait(self, seconds: float) -> None:
        """Nothing: `start` has the first answer."""

    def stop(self) -> None:
        """End the thread; `changed` is not called any more once this returned. Idempotent."""
        self._follower.stop()

    def healthy(self) -> Health:
        """Unhealthy, with the first fault, while a file is not understood."""
        fault = next(iter(self._found.faults.items()), None)
        return Health(up=True) if fault is None else Health(up=False, reason=f"{fault[0]} {fault[1]}")

    def _look(self, _paths: frozenset[str] | None) -> None:
        before = self._found
        self._found = now = read(self._directories, before.files)
        for path, why in now.faults.items():
            if before.faults.get(path) != why:
                self._log.error("CNI configuration is not understood", file=path, why=why, kept=path in now.files)
        if now.ranges != before.ranges:
            self._log.info("local ranges by CNI configuration", ranges=" ".join(map(str, now.ranges)) or "none")
            if self._tell is not None:
                self._tell(now.ranges)
