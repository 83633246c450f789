"""The format of pods.yaml (or .json): which pod, VM or tenant owns which address. docs/configuration.md describes it.

A file is taken whole or not at all: half a list would book the other half's bytes to nobody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from netacct import yamlfile
from netacct.model import UNBOUNDED, WHOLE, Address, Network, Observation, Pod, unpack
from netacct.policy import local_range_fault
from netacct.yamlfile import Node

SOURCE = "file"

CIDR_LIMIT = 4096
"""Addresses that one entry of `ips` may stand for."""

TOTAL_LIMIT = 65_536
"""Addresses that a whole file may stand for."""

PHASES = ("Pending", "Running", "Succeeded", "Failed", "Unknown")
FINISHED = ("Succeeded", "Failed")
"""Phases in which a pod owns nothing, so that its address may be another's."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_LABEL = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_CGROUP_UID = re.compile(r"[0-9a-f][0-9a-f-]{0,252}")
_TOKEN = re.compile(r"[!-~]{1,253}")
_TEXT = re.compile(r"[^\x00-\x1f\x7f]{0,253}")


def parse(data: bytes, path: str, seen_at: float) -> tuple[Observation, ...]:
    """The observations that a file stands for, one per address, in its order.

    Args:
        data: the file's content.
        path: its name, for messages.
        seen_at: when it was read (CLOCK_BOOTTIME seconds).

    Raises:
        ConfigError: the first thing that is wrong; names file, line and key.
    """
    root = yamlfile.parse(data, path)
    pods = root.mapping(("pods",)).get("pods")
    if pods is None or pods.value is None:  # as in a file that is being written
        raise root.error("has no list pods", "pods: [] for an empty one")
    reader = _Reader(seen_at)
    return tuple(observation for entry in pods.sequence() for observation in reader.entry(entry))


class _Reader:
    """Reads entry after entry and remembers who owns what."""

    def __init__(self, seen_at: float) -> None:
        self._seen_at = seen_at
        self._owners: dict[Address, Node] = {}
        self._pods: dict[str, Node] = {}
        self._total = 0

    def entry(self, node: Node) -> Iterator[Observation]:
        fields = node.mapping(("namespace", "name", "uid", "ips", "phase", "labels", "owner", "hostNetwork"))
        phase = fields["phase"].choice(PHASES) if "phase" in fields else "Running"
        pod = _pod(node)
        present = phase not in FINISHED
        if present:
            self._claim_names(pod, node)
        if "hostNetwork" in fields and fields["hostNetwork"].boolean():
            _check_host_pod(node)
            yield Observation(SOURCE, WHOLE, pod, "", UNBOUNDED, self._seen_at, present)
        for item in fields["ips"].sequence() if "ips" in fields else ():
            for ip in self._addresses(item):
                if present:
                    self._claim_address(ip, item)
                yield Observation(SOURCE, ip, pod, "", UNBOUNDED, self._seen_at, present)  # of whatever sandbox

    def _claim_names(self, pod: Pod, node: Node) -> None:
        for what, name in (("the pod", f"{pod.namespace}/{pod.name}"), ("the uid", pod.uid)):
            other = self._pods.setdefault(f"{what} {name}", node)
            if other is not node:
                raise node.error(f"{what} {name} is also {other.key} in line {other.line}", "one entry per pod")

    def _claim_address(self, ip: Address, item: Node) -> None:
        other = self._owners.get(ip)
        if other is not None:
            text = unpack(ip)
            raise item.error(f"{text} is also in {other.key} in line {other.line}", "each address once")
        self._owners[ip] = item

    def _addresses(self, item: Node) -> Iterator[Address]:
        network = _unicast(item)
        self._total += network.num_addresses
        if network.num_addresses > CIDR_LIMIT:
            raise item.error(f"{network} has {network.num_addresses} addresses", f"up to {CIDR_LIMIT}")
        if self._total > TOTAL_LIMIT:
            raise item.error(f"the file stands for more than {TOTAL_LIMIT} addresses", f"up to {TOTAL_LIMIT}")
        first, size = int(network.network_address), network.max_prefixlen // 8
        return (number.to_bytes(size, "big") for number in range(first, first + network.num_addresses))


def _pod(node: Node) -> Pod:
    fields = node.mapping()
    namespace, name = (_required(node, key, _NAME, "letters, digits, '-', '_', '.'") for key in ("namespace", "name"))
    uid = _matching(fields["uid"], _TOKEN, "printable, without blanks") if "uid" in fields else ""
    kind = workload = ""
    if "owner" in fields:
        owner = fields["owner"]
        owner.mapping(("kind", "name"))
        kind, workload = (_required(owner, key, _NAME, "letters, digits, '-', '_', '.'") for key in ("kind", "name"))
    labels = fields["labels"].mapping() if "labels" in fields else {}
    for key, value in labels.items():
        if not _LABEL.fullmatch(key):
            raise value.error("is no label key", "as Kubernetes has them: an optional prefix and a slash, then a name")
    return Pod(
        namespace,
        name,
        uid or f"{SOURCE}:{namespace}/{name}",
        kind,
        workload,
        tuple(
            sorted((key, _matching(value, _TEXT, "one line of up to 253 characters")) for key, value in labels.items())
        ),
    )


def _check_host_pod(node: Node) -> None:
    fields = node.mapping()
    if "ips" in fields:
        raise fields["ips"].error("a hostNetwork pod has no address of its own", "hostNetwork without ips")
    if "uid" not in fields:
        raise node.error("has no uid", "with hostNetwork, the uid in the name of the pod's cgroup")
    _matching(fields["uid"], _CGROUP_UID, "with hostNetwork, the uid in the name of the pod's cgroup: 0-9, a-f, '-'")


def _required(node: Node, key: str, pattern: re.Pattern[str], allowed: str) -> str:
    member = node.mapping().get(key)
    if member is None:
        raise node.error(f"has no {key}", allowed)
    return _matching(member, pattern, allowed)


def _matching(node: Node, pattern: re.Pattern[str], allowed: str) -> str:
    text = node.string()
    if not pattern.fullmatch(text):
        raise node.error(f"{text!r} is not a valid value", allowed)
    return text


def _unicast(item: Node) -> Network:
    """An address or CIDR that can be counted as a pod's."""
    network = item.network()
    fault = local_range_fault(network)
    if not fault and getattr(network.network_address, "ipv4_mapped", None) is not None:
        fault = f"{network} is an IPv4 address in IPv6 form, which no packet has"
    if fault:
        raise item.error(fault, "unicast addresses")
    return network
