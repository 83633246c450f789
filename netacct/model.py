"""The values that travel between the parts: who a pod is, who held an address when, what the kernel counted.

Everything here is immutable, knows no clock and does no I/O. Times are seconds of CLOCK_BOOTTIME (a float), because
counters, leases and totals all live within one boot; wall time is for display only. Addresses are packed in network
byte order, 4 or 16 bytes long, so that the length is the family and no reader has to format a thing.
"""

from __future__ import annotations

import enum
import ipaddress
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

Address: TypeAlias = bytes
"""An IPv4 or IPv6 address, packed in network byte order (4 or 16 bytes); or what a hostNetwork pod has instead.

That is its cgroup: the number that the kernel gave it (`cgroup_key`), 8 bytes, of no family and never used twice.
"""

Family: TypeAlias = Literal[4, 6]

Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_CGROUP_BYTES = 8  # cgroup_id(), linux/cgroup.h

TUNNEL = "tunnel"
"""The traffic class of encapsulation, which only the host's own packets can have."""

UNCLASSIFIED = "unclassified"
"""The traffic class of what crossed a pod's interface and netfilter did not see."""

UNBOUNDED = -math.inf
"""The `created` of a sandbox of which nobody knows when it was made: it may own whatever is pending."""

WHOLE: Address = b""
"""The only address in a catch-all counter (rest and host counters): it stands for all of them.

In an observation it says that the pod has the node's own addresses (hostNetwork).
"""


class Direction(enum.StrEnum):
    """Which way a packet went, seen from the pod or host that the counter belongs to."""

    RECEIVE = "receive"
    TRANSMIT = "transmit"


class Scope(enum.StrEnum):
    """Whose bytes a set of counters holds."""

    POD = "pod"  # one counter per local address
    REST = "rest"  # local-range packets whose address found no room in the pod counters: `unattributed`
    HOST = "host"  # the node's own packets
    HOST_POD = "host-pod"  # those of them that were told apart: one counter per cgroup of a hostNetwork pod


class Count(NamedTuple):
    """Bytes (layer 3) and packets. In the order in which the kernel sends them."""

    bytes: int
    packets: int

    def plus(self, other: Count) -> Count:
        """The sum of two counts."""
        return Count(self.bytes + other.bytes, self.packets + other.packets)

    def minus(self, other: Count) -> Count:
        """The difference of two counts; negative where a counter went backwards."""
        return Count(self.bytes - other.bytes, self.packets - other.packets)


ZERO = Count(0, 0)


class CounterKey(NamedTuple):
    """Names one set of counters; an `Address` picks the counter inside it (`WHOLE` for rest and host counters)."""

    family: Family
    scope: Scope
    direction: Direction
    traffic: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What one set of counters held at one moment.

    `epoch` is the number that the agent put into the set when it made it: a different one means that these counters
    began at zero since. `counts` maps each address that the set holds to its counter.
    """

    key: CounterKey
    epoch: int
    counts: Mapping[Address, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One pass over the kernel's counters. `at` is the time before the first set was read.

    A set that could not be read, or whose epoch is gone (somebody flushed it), is missing from `readings` and named in
    `unreadable`: its counts must wait until the datapath has repaired it and given it a new epoch.
    """

    at: float
    readings: tuple[Reading, ...]
    unreadable: tuple[CounterKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Pod:
    """Whose traffic it is. A VM or a tenant is a pod too, as far as accounting goes."""

    namespace: str
    name: str
    uid: str
    workload_kind: str = ""
    workload: str = ""
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """What one source says of one address: this pod's sandbox holds it (`present`), or no longer does.

    `created` is when the sandbox was made (CLOCK_BOOTTIME seconds, `UNBOUNDED` where unknown); `seen_at` is when the
    source learnt it. Succeeded and Failed pods are observed as not present: they own nothing.
    """

    source: str
    ip: Address
    pod: Pod
    sandbox: str
    created: float
    seen_at: float
    present: bool = True


@dataclass(frozen=True, slots=True)
class Lease:
    """One pod's tenure of one address, from `opened` until `closed` (None while it lasts)."""

    ip: Address
    pod: Pod
    sandbox: str
    created: float
    opened: float
    closed: float | None = None
    sources: frozenset[str] = field(default=frozenset())


class Level(enum.StrEnum):
    """What a total is summed over. Each is a metric of its own, so that no sum counts a byte twice."""

    POD = "pod"
    WORKLOAD = "workload"
    LABEL = "label"
    NAMESPACE = "namespace"
    HOST = "host"
    UNATTRIBUTED = "unattributed"


class SeriesKey(NamedTuple):
    """Names one exported total (bytes and packets).

    `labels` are the values of the level's own labels, in this order: POD (namespace, pod), WORKLOAD (namespace,
    workload_kind, workload), LABEL (namespace, value), NAMESPACE (namespace,), HOST and UNATTRIBUTED ().
    """

    level: Level
    labels: tuple[str, ...]
    direction: Direction
    traffic: str


def key_width(key: CounterKey) -> int:
    """Bytes of what picks a counter from these: an address, a cgroup's number, or nothing (`WHOLE`)."""
    if key.scope is Scope.HOST_POD:
        return _CGROUP_BYTES
    if key.scope is not Scope.POD:
        return 0
    return 4 if key.family == 4 else 16


def pack(text: str) -> Address:
    """The packed form of an address in text form. Raises ValueError for anything else."""
    return ipaddress.ip_address(text).packed


def network(text: str) -> Network:
    """The network of a CIDR, whatever its host bits; an address is one of itself. Raises ValueError for anything else.

    Also for one with a zone, which ipaddress would keep: a network here is the whole node's.
    """
    if "%" in text:
        raise ValueError(f"{text!r} has a zone")
    return ipaddress.ip_network(text, strict=False)


def unpack(ip: Address) -> str:
    """The text form (RFC 5952 for IPv6) of a packed address; `cgroup:NUMBER` of a hostNetwork pod's cgroup."""
    if is_cgroup(ip):
        return f"cgroup:{int.from_bytes(ip, sys.byteorder)}"
    return str(ipaddress.ip_address(ip))


def cgroup_key(number: int) -> Address:
    """The key of a cgroup's counters, in the machine's byte order, as nf_tables compares it."""
    return number.to_bytes(_CGROUP_BYTES, sys.byteorder)


def is_cgroup(ip: Address) -> bool:
    """Whether this stands for a hostNetwork pod's cgroup, which is no address and of both families."""
    return len(ip) == _CGROUP_BYTES


def family_of(ip: Address) -> Family:
    """The family of a packed address, which is no cgroup."""
    return 4 if len(ip) == 4 else 6
