"""The table of what a user may write into netacct.yaml: each key, its default, and the function that reads it."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from netacct.identity import cluster, cni_cache
from netacct.model import Network
from netacct.policy import local_range_fault
from netacct.yamlfile import Node

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "logfmt", "json", "console")

LISTEN_FORMS = ":PORT, ADDRESS:PORT, [IPV6]:PORT or NAME:PORT, with a port from 1 to 65535"
_HEALTH_PATHS = ("/livez", "/readyz", "/-/healthy", "/-/ready")
PATH_FORMS = f"a path like /metrics; {', '.join(_HEALTH_PATHS)} are taken"
"""What messages allow for these two keys."""

AUTO_SOURCES = ("file", "kubelet-pods-api", "kubelet", "cri", "cni", "azure-cni", "aws-cni")
"""What `identity.sources: auto` stands for, most trusted first: those who know owners and labels come before others."""

KUBELET_FORMS = "auto, or https://HOST or https://HOST:PORT"

RANGE_PROVIDERS = ("cni", "gce", "azure", "aws", "kubernetes", "rtnetlink")
METADATA_FORMS = "auto, or http://ADDRESS[:PORT] with an IPv4 address or an IPv6 one in brackets"
"""What messages allow for this key."""

_YEAR = 365 * 86400.0

T = TypeVar("T")


class Listen(NamedTuple):
    """Where HTTP is served. `host` is an address or a name, "" for every address of both families."""

    host: str
    port: int

    def __str__(self) -> str:
        """As it is written in the file."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen_address(text: str) -> Listen:
    """`:19112`, `127.0.0.1:19112`, `[::1]:19112`, `localhost:19112`; port 0 is any free one. Else raises ValueError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]*)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise ValueError(text)
    if match[1]:
        return Listen(str(ipaddress.IPv6Address(match[1])), int(match[3]))
    if re.fullmatch(r"[0-9.]+", match[2]):
        ipaddress.IPv4Address(match[2])
    if match[2] and not all(0 < len(label) < 64 for label in match[2].removesuffix(".").split(".")):  # RFC 1035 2.3.4
        raise ValueError(text)
    return Listen(match[2], int(match[3]))


def telemetry_path(text: str) -> str:
    """The path of the metrics, such as `/metrics`. Raises ValueError for what cannot be one or is taken."""
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", text) or text in _HEALTH_PATHS:
        raise ValueError(text)
    return text


def _one_of(*allowed: str) -> Callable[[Node], str]:
    """Reads one word."""
    return lambda node: node.choice(allowed)


def _auto_or_list(auto: T, *allowed: str) -> Callable[[Node], T | tuple[str, ...]]:
    """Reads `auto`, which stands for the value `auto`, or a list of names."""
    hint = "auto, or a list of: " + ", ".join(allowed)

    def item(node: Node) -> str:
        if node.value not in allowed:
            raise node.error(f"{node.kind} is not a valid value", hint)
        return node.string()

    def read(node: Node) -> T | tuple[str, ...]:
        if node.value == "auto":
            return auto
        if not isinstance(node.value, tuple):
            raise node.error(f"{node.kind} is not a valid value", hint)
        return _distinct(item)(node)

    return read


def _distinct(read: Callable[[Node], T]) -> Callable[[Node], tuple[T, ...]]:
    """Reads a list without duplicates."""

    def read_all(node: Node) -> tuple[T, ...]:
        values: dict[T, Node] = {}
        for item in node.sequence():
            value = read(item)
            if value in values:
                raise item.error(f"{item.value!r} is listed twice")
            values[value] = item
        return tuple(values)

    return read_all


def _some(read: Callable[[Node], T]) -> Callable[[Node], tuple[T, ...]]:
    """Reads a list of at least one."""

    def read_all(node: Node) -> tuple[T, ...]:
        values = _distinct(read)(node)
        if not values:
            raise node.error("is empty", "a list of one or more")
        return values

    return read_all


def _auto_or(auto: tuple[T, ...], read: Callable[[Node], tuple[T, ...]]) -> Callable[[Node], tuple[T, ...]]:
    """Reads `auto`, which stands for the values in `auto`, or what `read` reads."""
    return lambda node: auto if node.value == "auto" else read(node)


def _text(convert: Callable[[str], T], allowed: str) -> Callable[[Node], T]:
    def read(node: Node) -> T:
        try:
            return convert(node.string())
        except ValueError:
            raise node.error(f"{node.value!r} is not a valid value", allowed) from None

    return read


def _absolute(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError(text)
    return os.path.normpath(text)


def _absolute_or_none(text: str) -> str:
    return _absolute(text) if text else ""


def _auto_or_absolute(text: str) -> str:
    return text if text == "auto" else _absolute(text)


def _kubelet_url(text: str) -> str:
    """`auto`, or https://HOST[:PORT]: a token never goes anywhere unencrypted. Else raises ValueError."""
    match = re.fullmatch(r"https://(?:[A-Za-z0-9.-]+|\[([0-9A-Fa-f:.]+)\])(?::(\d{1,5}))?/?", text)
    if text != "auto" and (match is None or not 0 < int(match[2] or 1) < 65536):
        raise ValueError(text)
    if match and match[1]:
        ipaddress.IPv6Address(match[1])
    return text.rstrip("/")


def _multus_network(text: str) -> str:
    """A network as Multus names it in its annotation, NAMESPACE/NAME. Else raises ValueError."""
    name = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
    if not re.fullmatch(f"{name}/{name}", text):
        raise ValueError(text)
    return text


def _node_name(text: str) -> str:
    """`auto`, or a DNS subdomain (RFC 1123), as names of nodes are. Else raises ValueError."""
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text):
        raise ValueError(text)
    return text


def _policy(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError(text)
    return text


def _local_range(node: Node) -> Network:
    network = node.network()
    fault = local_range_fault(network)
    if fault:
        raise node.error(fault, "unicast ranges of this node's pods")
    return network


def _label(text: str) -> str:
    """A label key of Kubernetes: an optional DNS prefix and a slash, then a name of up to 63 characters."""
    name = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
    if not re.fullmatch(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{name}", text):
        raise ValueError(text)
    return text


def _label_or_none(text: str) -> str:
    return _label(text) if text else ""


def _metadata_url(text: str) -> str:
    from netacct.identity import metadata_http  # noqa: PLC0415 -- and with it http.client, for a key that few write

    if text != "auto":
        metadata_http.base(text)
    return text


def _seconds(minimum: float, maximum: float) -> Callable[[Node], float]:
    return lambda node: node.seconds(minimum, maximum)


def _series(node: Node) -> int:
    return node.integer(1, 100_000)


class Key(NamedTuple):
    """What a user may write at one key: the value without it, and the reader of what is written."""

    default: Any
    read: Callable[[Node], Any]


_PATH = _text(_absolute, "an absolute path")

KEYS: dict[str, Key] = {
    "enabled": Key(True, Node.boolean),
    "policy": Key("default", _text(_policy, "the name of a shipped policy, or a path")),
    "datapath": Key("auto", _one_of("auto", "iptables", "nftables")),
    "host_pods": Key("off", _one_of("off", "cgroup")),
    "local_ranges": Key((), _distinct(_local_range)),
    "ranges.providers": Key("auto", _auto_or_list("auto", *RANGE_PROVIDERS)),
    "ranges.metadata.url": Key("auto", _text(_metadata_url, METADATA_FORMS)),
    "ranges.cni.directories": Key(cni_cache.CONFIGURATION, _auto_or(cni_cache.CONFIGURATION, _distinct(_PATH))),
    "cluster_ranges.providers": Key(cluster.PROVIDERS, _auto_or_list(cluster.PROVIDERS, *cluster.PROVIDERS)),
    "marks.mode": Key("auto", _one_of("auto", "on", "off")),
    "identity.sources": Key(AUTO_SOURCES, _auto_or_list(AUTO_SOURCES, *AUTO_SOURCES, "veth", "apiserver")),
    "identity.file.path": Key("/etc/netacct/pods.yaml", _PATH),
    "identity.cni.directories": Key(cni_cache.DIRECTORIES, _auto_or(cni_cache.DIRECTORIES, _distinct(_PATH))),
    "identity.kubelet.url": Key("auto", _text(_kubelet_url, KUBELET_FORMS)),
    "identity.kubelet.ca_file": Key("auto", _text(_auto_or_absolute, "auto, or an absolute path")),
    "identity.kubelet.certificate_file": Key("", _text(_absolute_or_none, 'an absolute path, or ""')),
    "identity.kubelet.key_file": Key("", _text(_absolute_or_none, 'an absolute path, or ""')),
    "identity.kubelet.token_file": Key("", _text(_absolute_or_none, 'an absolute path, or ""')),
    "identity.apiserver.kubeconfig": Key("auto", _text(_auto_or_absolute, "auto, or an absolute path")),
    "identity.apiserver.node": Key("auto", _text(_node_name, "auto, or the node's name in Kubernetes")),
    "identity.multus_networks": Key((), _distinct(_text(_multus_network, "NAMESPACE/NAME"))),
    "identity.poll": Key(30.0, _seconds(10, 3600)),
    "identity.late_binding": Key(120.0, _seconds(0, 3600)),
    "metrics.pods": Key(True, Node.boolean),
    "metrics.workloads": Key(True, Node.boolean),
    "metrics.packets": Key(True, Node.boolean),
    "metrics.retention": Key(300.0, _seconds(0, _YEAR)),
    "metrics.zero_first": Key(60.0, _seconds(0, 3600)),
    "metrics.max_pod_series": Key(500, _series),
    "metrics.max_workload_series": Key(500, _series),
    "metrics.max_namespace_series": Key(500, _series),
    "metrics.max_label_series": Key(500, _series),
    "metrics.by_label": Key("", _text(_label_or_none, 'a label key of Kubernetes, or ""')),
    "metrics.labels": Key((), _distinct(_text(_label, "a label key of Kubernetes"))),
    "state_dir": Key("/run/netacct", _PATH),
    "accounts_dir": Key("/var/lib/netacct", _PATH),
    "web.listen_address": Key((Listen("", 19112),), _some(_text(listen_address, LISTEN_FORMS))),
    "web.telemetry_path": Key("/metrics", _text(telemetry_path, PATH_FORMS)),
    "log.level": Key("info", _one_of(*LOG_LEVELS)),
    "log.format": Key("auto", _one_of(*LOG_FORMATS)),
}
