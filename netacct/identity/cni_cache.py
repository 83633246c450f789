"""The format of libcni's result cache: one JSON file per attachment of a pod to a network.

libcni writes `RESULTS/NETWORK-CONTAINERID-IFNAME` when all plugins of a network have answered ADD, and before the
pod's containers start; it removes the file when all have answered DEL. The format is libcni's own ("cniCacheV1" in
libcni/api.go of github.com/containernetworking/cni) and has been the same since v0.8 of 2020; the result inside is the
CNI specification's, whose versions put addresses at different places. Anybody's file may lie there, cut off or empty
(libcni truncates and writes; a node that loses power keeps a file of no bytes), so nothing is taken for granted.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from netacct.model import Address, Observation, Pod
from netacct.policy import local_range_fault

SOURCE = "cni"

KIND = "cniCacheV1"

SIZE_LIMIT = 1 << 20
"""Bytes; a real file has one to four kB."""

CONFIGURATION = (
    "/etc/cni/net.d",
    "/var/lib/rancher/k3s/agent/etc/cni/net.d",
    "/var/lib/rancher/rke2/agent/etc/cni/net.d",
    "/var/snap/microk8s/current/args/cni-network",
)
"""Where runtimes read the configuration of their network."""

DIRECTORIES = (
    "/var/lib/cni/results",  # libcni's default: containerd (kubeadm, EKS, AKS, GKE, k3s, RKE2, k0s) and CRI-O
    "/var/lib/cni/cache/results",  # cri-dockerd, and the kubelet with Docker before it
    "/var/snap/microk8s/current/var/lib/cni/results",  # MicroK8s as a confined snap
)
"""Where runtimes keep the cache. Multus' own (/var/lib/cni/multus/results) is left out on purpose: addresses of
secondary networks may repeat those of pods, and mostly bypass the node's netfilter."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?")
_TOKEN = re.compile(r"[!-~]{1,253}")


@dataclass(frozen=True, slots=True)
class Attachment:
    """What one file says: this sandbox of this pod has these addresses. `netns` is a path, "" where it names none."""

    pod: Pod
    sandbox: str
    netns: str
    addresses: tuple[Address, ...]

    def observations(self, created: float, seen_at: float) -> tuple[Observation, ...]:
        """One observation per address. Both times are CLOCK_BOOTTIME seconds."""
        return tuple(Observation(SOURCE, ip, self.pod, self.sandbox, created, seen_at) for ip in self.addresses)


def is_loopback(name: str) -> bool:
    """Whether a file of this name is about a pod's `lo`, of which there is one for each pod and more."""
    return name.endswith("-lo")


def is_name(text: object) -> bool:
    """Whether this can be a pod's name, or its namespace's."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def decode(data: bytes) -> Attachment | None:
    """The attachment that a file stands for; None where it is no pod's (another program's container, loopback).

    Raises:
        ValueError: this is no whole cache file; says why, in words.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON, or cut off" if data else "is empty") from None
    fields = _mapping(document, "the file")
    if "kind" not in fields and "cniVersion" in fields:
        return None  # the bare result that libcni before v0.8 wrote, which names nobody
    if fields.get("kind") != KIND:
        raise ValueError(f"has the kind {str(fields.get('kind'))[:40]!r}, not {KIND!r}")
    if fields.get("ifName") == "lo":
        return None
    arguments = dict(_arguments(fields.get("cniArgs")))
    namespace, name = arguments.get("K8S_POD_NAMESPACE"), arguments.get("K8S_POD_NAME")
    if not namespace or not name:
        return None
    uid = arguments.get("K8S_POD_UID", "")
    sandbox = arguments.get("K8S_POD_INFRA_CONTAINER_ID") or fields.get("containerId")
    if not _NAME.fullmatch(namespace) or not _NAME.fullmatch(name):
        raise ValueError("names a pod as Kubernetes never does")
    if not isinstance(sandbox, str) or not _TOKEN.fullmatch(sandbox) or (uid and not _TOKEN.fullmatch(uid)):
        raise ValueError("has no usable sandbox id or uid")
    netns = fields.get("netns")
    addresses = dict.fromkeys(_addresses(_mapping(fields.get("result"), "its result")))
    return Attachment(Pod(namespace, name, uid), sandbox, netns if isinstance(netns, str) else "", tuple(addresses))


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not an object")  # noqa: TRY004 -- the contract is ValueError, whatever is wrong
    return value


def _arguments(value: Any) -> Iterator[tuple[str, str]]:
    """CNI_ARGS, as pairs of key and value; absent where the runtime gave none."""
    for pair in value if isinstance(value, list) else []:
        if isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair):
            yield pair[0], pair[1]


def _addresses(result: Mapping[str, Any]) -> Iterator[Address]:
    """The pod's addresses: `ips` since version 0.3.0 of the specification, `ip4` and `ip6` before."""
    listed = result.get("ips")
    if listed is not None and not isinstance(listed, list):
        raise ValueError("its result has no list of ips")
    texts = [_mapping(entry, "an entry of ips").get("address") for entry in listed or ()]
    texts += [_mapping(result[key], key).get("ip") for key in ("ip4", "ip6") if result.get(key) is not None]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError("an address is not a string")  # noqa: TRY004 -- as above
        try:
            interface = ipaddress.ip_interface(text)
        except ValueError:
            raise ValueError(f"{text[:60]!r} is no address") from None
        if not local_range_fault(ipaddress.ip_network(interface.ip)):
            yield interface.ip.packed
