"""The configuration: /etc/netacct/netacct.yaml, flags over it, defaults under it.

`config_keys.KEYS` is the one table of what a user may write; this module turns it into values.
"""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from netacct import yamlfile
from netacct.config_keys import KEYS, Listen
from netacct.errors import ConfigError
from netacct.model import Network
from netacct.policy import is_path
from netacct.yamlfile import Node

DEFAULT_PATH = "/etc/netacct/netacct.yaml"

FLAGS = {
    "web.listen_address": "--web.listen-address",
    "web.telemetry_path": "--web.telemetry-path",
    "log.level": "--log.level",
    "log.format": "--log.format",
}
"""Keys that a flag can set, over the file."""


INVALID = " (invalid; the default is shown)"
"""Follows the origin of a value that is none."""


@dataclass(frozen=True, slots=True)
class Directories:
    """Where to look for CNI's files, `auto` resolved."""

    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """Where a cloud's metadata server is: `auto` for its well-known addresses, else a URL."""

    url: str


@dataclass(frozen=True, slots=True)
class Ranges:
    """What finds local ranges, besides `local_ranges`; `auto` for what suits this node."""

    providers: Literal["auto"] | tuple[str, ...]
    cni: Directories
    metadata: Metadata


@dataclass(frozen=True, slots=True)
class ClusterRanges:
    """What finds ranges of the whole cluster; `auto` stands for all that this version has."""

    providers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Marks:
    """`mode`: auto, on or off."""

    mode: str


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Where the `file` source reads pods."""

    path: str


@dataclass(frozen=True, slots=True)
class KubeletIdentity:
    """How to ask the kubelet for its pods; `url` and `ca_file` may be `auto`, the others "" where there are none."""

    url: str
    ca_file: str
    certificate_file: str
    key_file: str
    token_file: str


@dataclass(frozen=True, slots=True)
class ApiserverIdentity:
    """How to ask the API server for the pods of this node; both may be `auto`."""

    kubeconfig: str
    node: str


@dataclass(frozen=True, slots=True)
class Identity:
    """`sources`: the names of the sources to run, `auto` resolved. `late_binding` and `poll` are seconds."""

    sources: tuple[str, ...]
    file: FileIdentity
    cni: Directories
    kubelet: KubeletIdentity
    apiserver: ApiserverIdentity
    multus_networks: tuple[str, ...]
    poll: float
    late_binding: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """Which series are exported. `retention` and `zero_first` are seconds.

    `labels` are pod labels for pod_info; `by_label` is one to sum over, "" for none.
    """

    pods: bool
    workloads: bool
    packets: bool
    retention: float
    zero_first: float
    max_pod_series: int
    max_workload_series: int
    max_namespace_series: int
    max_label_series: int
    by_label: str
    labels: tuple[str, ...]

    @property
    def pod_labels(self) -> tuple[str, ...]:
        """The labels of pods that are used at all, each once; sources need to tell no others."""
        return tuple(dict.fromkeys(label for label in (*self.labels, self.by_label) if label))


@dataclass(frozen=True, slots=True)
class Web:
    """The HTTP server."""

    listen_address: tuple[Listen, ...]
    telemetry_path: str


@dataclass(frozen=True, slots=True)
class Log:
    """The log's level and format."""

    level: str
    format: str


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be configured. `origins` says where each key's value comes from."""

    enabled: bool
    policy: str
    datapath: str
    host_pods: str
    local_ranges: tuple[Network, ...]
    ranges: Ranges
    cluster_ranges: ClusterRanges
    marks: Marks
    identity: Identity
    metrics: Metrics
    state_dir: str
    accounts_dir: str
    web: Web
    log: Log
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)


class Setting(NamedTuple):
    """One line of the effective configuration: `origin` is `default`, `FILE:LINE` or the flag, perhaps `INVALID`."""

    key: str
    value: Any
    origin: str


def load(path: str | None = None, flags: Mapping[str, str | list[str]] | None = None) -> Config:
    """The configuration from a file and flags.

    Args:
        path: the file; None for DEFAULT_PATH, which may be missing.
        flags: values from the command line by key (of FLAGS), as text.

    Raises:
        ConfigError: the first thing that is wrong; `examine` has them all.
    """
    config, errors = examine(path, flags)
    if errors:
        raise first_of(errors)
    return config


def first_of(errors: list[ConfigError]) -> ConfigError:
    """The first error, which tells how many there are besides."""
    errors[0].more = len(errors) - 1
    return errors[0]


def examine(
    path: str | None = None, flags: Mapping[str, str | list[str]] | None = None
) -> tuple[Config, list[ConfigError]]:
    """As `load`, but with every error; where there are some, the Config has defaults in their place."""
    errors: list[ConfigError] = []
    nodes: dict[str, Node] = {}
    try:
        nodes = _flatten(_document(path), errors)
    except ConfigError as error:
        errors.append(error)
    for key, text in (flags or {}).items():
        nodes[key] = _from_flag(key, text)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, (default, read) in KEYS.items():
        values[key], origins[key] = default, "default"
        node = nodes.get(key)
        if node is not None:
            origins[key] = node.file if key in (flags or {}) else f"{node.file}:{node.line}"
            try:
                values[key] = read(node)
            except ConfigError as error:
                errors.append(error)
                origins[key] += INVALID
    if is_path(values["policy"]) and "policy" in nodes:
        path = Path(nodes["policy"].file).parent / values["policy"]
        values["policy"] = os.path.abspath(path)  # noqa: PTH100 -- resolve() would follow links
    if (values["host_pods"], values["datapath"]) == ("cgroup", "iptables"):
        errors.append(nodes["host_pods"].error("iptables cannot tell hostNetwork pods apart", "datapath: nftables"))
    if values["identity.kubelet.key_file"] and not values["identity.kubelet.certificate_file"]:
        lone = nodes["identity.kubelet.key_file"]
        errors.append(lone.error("there is no certificate for this key", "with certificate_file"))
    errors.sort(key=lambda error: (error.line or 0, error.key))
    return _build(values, origins), errors


def effective(config: Config) -> tuple[Setting, ...]:
    """Each key with its value as a person would write it (strings, numbers, booleans, lists) and its origin."""
    return tuple(Setting(key, _plain(_get(config, key)), config.origins.get(key, "default")) for key in KEYS)


def keys() -> tuple[str, ...]:
    """The dotted path of every key."""
    return tuple(KEYS)


def _document(path: str | None) -> Node:
    try:
        return yamlfile.load(DEFAULT_PATH if path is None else path)
    except ConfigError as error:
        if path is None and isinstance(error.__cause__, FileNotFoundError):
            return Node(DEFAULT_PATH, "", 1, None)
        raise


def _flatten(root: Node, errors: list[ConfigError]) -> dict[str, Node]:
    """The nodes of all known keys; unknown ones become errors."""
    nodes: dict[str, Node] = {}
    pending = [root]
    while pending:
        section = pending.pop()
        prefix = f"{section.key}." if section.key else ""
        known = {key[len(prefix) :].partition(".")[0] for key in KEYS if key.startswith(prefix)}
        try:
            members = section.mapping()
        except ConfigError as error:
            errors.append(error)
            continue
        for name, node in members.items():
            if name not in known:
                errors.append(section.unknown(name, known))
            elif node.key in KEYS:
                nodes[node.key] = node
            else:
                pending.append(node)
    return nodes


def _from_flag(key: str, text: str | list[str]) -> Node:
    flag = FLAGS[key]
    value = text if isinstance(text, str) else tuple(Node(flag, key, 1, item) for item in text)
    return Node(flag, key, 1, value)


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and not isinstance(value, Listen):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return yamlfile.duration(value)
    return value if isinstance(value, bool | int) else str(value)


def _build(values: Mapping[str, Any], origins: Mapping[str, str]) -> Config:
    def part(section: str) -> dict[str, Any]:
        prefix = section + "."
        return {k[len(prefix) :]: v for k, v in values.items() if k.startswith(prefix) and "." not in k[len(prefix) :]}

    return Config(
        **{key: value for key, value in values.items() if "." not in key},
        ranges=Ranges(
            **part("ranges"), cni=Directories(**part("ranges.cni")), metadata=Metadata(**part("ranges.metadata"))
        ),
        cluster_ranges=ClusterRanges(**part("cluster_ranges")),
        marks=Marks(**part("marks")),
        identity=Identity(
            **part("identity"),
            file=FileIdentity(**part("identity.file")),
            cni=Directories(**part("identity.cni")),
            kubelet=KubeletIdentity(**part("identity.kubelet")),
            apiserver=ApiserverIdentity(**part("identity.apiserver")),
        ),
        metrics=Metrics(**part("metrics")),
        web=Web(**part("web")),
        log=Log(**part("log")),
        origins=origins,
    )
