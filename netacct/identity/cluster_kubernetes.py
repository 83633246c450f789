"""Cluster ranges in the flags and configuration of Kubernetes' own programs, as far as they run on this node.

| program | says | of |
|---|---|---|
| kube-proxy | `--cluster-cidr`, `clusterCIDR` (kubeproxy.config.k8s.io/v1alpha1) | pods |
| kube-controller-manager | `--cluster-cidr`, `--service-cluster-ip-range` | pods, Services |
| kube-apiserver | `--service-cluster-ip-range` | Services |
| kubelet | `--cluster-dns`, `clusterDNS` (kubelet.config.k8s.io/v1beta1): addresses | one Service each |
| k3s, RKE2 | `cluster-cidr`, `service-cidr`, `cluster-dns` in their config.yaml | pods, Services |

Two families stand with a comma between them. The functions here are pure; `cluster_files.py` and
`cluster_processes.py` find the texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from netacct import yamlfile
from netacct.errors import ConfigError
from netacct.identity.cluster import read_cidrs
from netacct.policy import POD, SERVICE, Prefix

FLAGS: Mapping[str, Mapping[str, str]] = {
    "kube-proxy": {"cluster-cidr": POD},
    "kube-controller-manager": {"cluster-cidr": POD, "service-cluster-ip-range": SERVICE},
    "kube-apiserver": {"service-cluster-ip-range": SERVICE},
    "kubelet": {"cluster-dns": SERVICE},
}
"""By program: the class that each flag tells of."""

MEMBERS: Mapping[str, Mapping[str, str]] = {
    "kube-proxy": {"clusterCIDR": POD},
    "kubelet": {"clusterDNS": SERVICE},
    "k3s": {"cluster-cidr": POD, "service-cidr": SERVICE, "cluster-dns": SERVICE},
}
"""By program (`k3s` is RKE2, too): the class that each member of its configuration tells of."""


def flags(arguments: Iterable[str]) -> dict[str, str]:
    """The flags of a command line, `--name=value` or `--name value`; of one given twice, the last, as pflag has it."""
    found: dict[str, str] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            found[name] = value
            name = "" if equals else name
        elif name:
            found[name] = argument
            name = ""
    return found


def parse_flags(program: str, arguments: Iterable[str], where: str) -> tuple[list[Prefix], list[str]]:
    """The facts in a program's flags, and what is wrong in them. `where`: `the command line of kube-proxy`."""
    given = flags(arguments)
    facts: list[Prefix] = []
    faults: list[str] = []
    for name, traffic in FLAGS[program].items():
        good, bad = read_cidrs(given.get(name, ""), traffic, f"found in {where} (--{name})")
        facts += good
        faults += bad
    return facts, faults


def parse_configuration(program: str, data: bytes, path: str) -> tuple[list[Prefix], list[str]]:
    """The facts in a program's configuration (YAML or JSON), and what is wrong in it."""
    facts: list[Prefix] = []
    faults: list[str] = []
    try:
        members = yamlfile.parse(data, path).mapping()
        for name, traffic in MEMBERS[program].items():
            node = members.get(name)
            if node is None or node.value is None:
                continue
            items = node.sequence() if isinstance(node.value, tuple) else (node,)
            for item in items:
                good, bad = read_cidrs(item.string(), traffic, f"found in {path} ({name})")
                facts += good
                faults += bad
    except ConfigError as error:
        faults.append(str(error))
    return facts, faults
