"""Traffic classes: which address is which kind of peer.

A policy maps CIDRs to classes; the longest prefix wins across all classes; what no CIDR covers is the default class.
Two things come on top, because only the running node knows them: its own addresses (with the loopback ones) are `node`
ahead of every CIDR, and its local ranges are prefixes of `pod` besides those of the file.

This module holds the values and the pure functions on them; `policy_file.py` reads them from YAML, `kernel/plan.py`
makes out of them what the kernel tests, and a property test holds `classify` and the plan to the same answer.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import NamedTuple

from netacct.model import Address, Family, Network

POD = "pod"
NODE = "node"
SERVICE = "service"

CLUSTER = "cluster"

MAY_BE_EMPTY = (POD, NODE, SERVICE)
"""Classes that need no CIDR in the file, because they are found at run time. They exist in every policy."""

FOUND = (*MAY_BE_EMPTY, CLUSTER)
"""Classes whose CIDRs can be found at run time. `cluster` is for pods and nodes that no CIDR tells apart; it exists
where a policy lists it."""

LOOPBACK: Mapping[Family, Network] = {4: ipaddress.ip_network("127.0.0.0/8"), 6: ipaddress.ip_network("::1/128")}
"""Always `node`, ahead of every CIDR (RFC 1122 3.2.1.3, RFC 4291 2.5.3)."""

_LINK_LOCAL_6 = ipaddress.ip_network("fe80::/10")

_NEVER_LOCAL: Mapping[str, str] = {
    "127.0.0.0/8": "loopback addresses, which are the node's",
    "::1/128": "the loopback address, which is the node's",
    "0.0.0.0/32": "the unspecified address",
    "::/128": "the unspecified address",
    "224.0.0.0/4": "multicast addresses, which are nobody's",
    "ff00::/8": "multicast addresses, which are nobody's",
    "255.255.255.255/32": "the broadcast address, which marks the epoch of our counters",
    "fe80::/10": "link-local addresses, which every pod has and no policy can tell apart",
}
_NEVER_LOCAL_NETWORKS = tuple((ipaddress.ip_network(cidr), why) for cidr, why in _NEVER_LOCAL.items())
_NEVER_LOCAL_BEGINNINGS = frozenset(
    first
    for net, _ in _NEVER_LOCAL_NETWORKS
    for first in range(net.network_address.packed[0], net.broadcast_address.packed[0] + 1)
)
"""The first bytes of these addresses, and of some others."""


class Prefix(NamedTuple):
    """One CIDR of one class. `origin` says where it comes from, for people: `default.yaml:7`."""

    network: Network
    traffic: str
    origin: str


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """A class of the policy, apart from its CIDRs."""

    name: str
    zone: str = ""
    region: str = ""


@dataclass(frozen=True, slots=True)
class Tunnel:
    """What counts as encapsulation on the host's own packets: UDP destination ports, IP protocol numbers."""

    udp: tuple[int, ...] = (4789, 6081, 8472, 51820)
    protocols: tuple[int, ...] = (4, 41, 47, 50)


@dataclass(frozen=True, slots=True)
class MarkTable:
    """The fwmark value of each class inside one mask. A class without a value gets no mark."""

    mask: int
    values: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Policy:
    """A set of traffic classes. Every address has exactly one class (`pod`, `node`, `service` always exist).

    path:     the file, as a person would name it.
    hash:     of the meaning: equal for files that differ in comments, order or spelling only.
    classes:  all of them, in the file's order; those that the file does not name come last. Never `tunnel`.
    prefixes: sorted; no CIDR twice, built-in lists included.
    default_origin: the line of the file that names the default class; "" where none does.
    builtin:  which of the prefixes come from a built-in list, and so yield to what is found at run time.
    found:    which of them were found at run time (`policy_found.py`): the file has none.
    """

    name: str
    path: str
    hash: str
    classes: tuple[TrafficClass, ...]
    prefixes: tuple[Prefix, ...]
    default: str
    tunnel: Tunnel = Tunnel()
    marks: MarkTable | None = None
    default_origin: str = ""
    builtin: frozenset[Network] = frozenset()
    found: frozenset[Network] = frozenset()


class Reason(enum.StrEnum):
    """Which rule gave an address its class."""

    LOOPBACK = "loopback address"
    OWN = "the node's own address"
    LOCAL = "local range"
    PREFIX = "policy"
    FOUND = "cluster range"
    DEFAULT = "default class"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The class of one address, and why.

    reason, prefix: the rule that decided; None as prefix where no CIDR did (`OWN`, `DEFAULT`).
    origin: the decisive line of the policy (`default.yaml:7`), or where the range was found; "" where neither had a
            say.
    beaten: the prefixes that cover the address too, longest first, and lost.
    """

    traffic: str
    reason: Reason
    prefix: Network | None = None
    origin: str = ""
    beaten: tuple[Prefix, ...] = ()


def classify(
    policy: Policy, address: Address, own: Collection[Address] = frozenset(), local: Iterable[Network] = ()
) -> Verdict:
    """The class that the kernel gives to an address: the longest prefix, unless the address is the node's own.

    `own` are the node's addresses and `local` its local ranges, as for `plan.build`. A local range beats an equal CIDR
    of any class, and loses to a longer one. Slow and simple (it looks at every prefix): for people, not for packets.
    """
    parsed = ipaddress.ip_address(address)
    covering = [prefix for prefix in policy.prefixes if parsed in prefix.network]
    ranges = [Prefix(net, POD, "") for net in canonical(local) if parsed in net]
    # sort() is stable: at equal length the local range stays ahead.
    ordered = tuple(sorted(ranges + covering, key=lambda prefix: -prefix.network.prefixlen))
    loopback = LOOPBACK[4 if parsed.version == 4 else 6]
    if parsed in loopback:
        return Verdict(NODE, Reason.LOOPBACK, loopback, beaten=ordered)
    if address in countable_own(own):
        return Verdict(NODE, Reason.OWN, beaten=ordered)
    if not ordered:
        return Verdict(policy.default, Reason.DEFAULT, origin=policy.default_origin)
    best = ordered[0]
    return Verdict(best.traffic, _reason(policy, best, ranges), best.network, best.origin, ordered[1:])


def _reason(policy: Policy, best: Prefix, ranges: Collection[Prefix]) -> Reason:
    if best in ranges:
        return Reason.LOCAL
    return Reason.FOUND if best.network in policy.found else Reason.PREFIX


def canonical(networks: Iterable[Network]) -> tuple[Network, ...]:
    """Networks sorted (IPv4 first), each once, without those that lie inside another one.

    Neighbours stay apart: merging 10.0.0.2/32 and 10.0.0.3/32 would let a CIDR of the policy that equals one of them
    win over the local range.
    """
    kept: list[Network] = []
    for net in sorted(set(networks), key=sort_key):
        if not kept or kept[-1].version != net.version or net.network_address not in kept[-1]:
            kept.append(net)
    return tuple(kept)


def sort_key(network: Network) -> tuple[int, int, int]:
    """Orders networks of both families: by family, then address; a network comes just before what lies inside it."""
    return network.version, int(network.network_address), network.prefixlen


def countable_own(addresses: Iterable[Address]) -> frozenset[Address]:
    """Those of the node's addresses that need naming: no loopback ones, no IPv6 link-local ones.

    A new IPv6 link-local address comes with each veth, so naming them would change the rules at each pod start.
    """
    skipped = (*LOOPBACK.values(), _LINK_LOCAL_6)
    return frozenset(ip for ip in addresses if not any(ipaddress.ip_address(ip) in net for net in skipped))


def is_path(name_or_path: str) -> bool:
    """Whether this is the path of a policy, and no shipped policy's name: by a slash in it, or by how it ends."""
    return "/" in name_or_path or PurePath(name_or_path).suffix in {".yaml", ".yml", ".json"}


def local_range_fault(network: Network) -> str:
    """Why a network cannot be a local range, in words; "" where it can.

    A range that holds one of these addresses would book somebody else's packets to a pod, or (the broadcast address)
    count into the element that carries the epoch.
    """
    for never, why in _NEVER_LOCAL_NETWORKS:
        if network.overlaps(never):
            return f"{network} holds {why}"
    return ""


def can_be_local(ip: Address) -> bool:
    """Whether a single address can be in a local range (`local_range_fault`), and so a pod's."""
    # Nearly all end at the first byte; what follows takes ten times as long.
    return ip[0] not in _NEVER_LOCAL_BEGINNINGS or not local_range_fault(ipaddress.ip_network(ip))
