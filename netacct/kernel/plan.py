"""What the kernel shall count: policy, local ranges and the node's own addresses, made into one value.

The goal: turn "longest prefix wins" into tests that a datapath can afford. ipset and nftables can tell whether an
address is in a set of CIDRs; neither finds the longest prefix over several sets by itself, and thousands of rules in a
row would cost every packet. So the CIDRs are sorted into *layers*: walk the layers in order, ask in each which group
the address is in, stop at the first yes. A policy of disjoint CIDRs needs one layer, an exception inside one CIDR a
second, however many CIDRs there are.

How the layers come about: the CIDRs form a forest (two CIDRs nest or are apart). A CIDR of the same class as the
nearest one around it decides nothing and goes; around the outermost ones lies the default class. The depth of what
remains is the number of class changes on the way in from there, and the layer holds everything of one depth, deepest
first. Two CIDRs of one depth never overlap (if one were inside the other it would be deeper), so inside a layer no
order matters.

The tensions:

- Fewer layers make faster packets, and a canonical form makes equal plans compare equal; yet the meaning may not change
  by a single address. Hence the one rewriting that is safe: two halves of a CIDR, of one class and depth, become the
  whole, because their union stays what it was.
- Counters that exist before the first packet lose nothing and need nobody's announcement, but each costs kernel memory
  and reading time in every class. Hence PREFILL_LIMIT, spent on the smallest ranges first: many pods on few addresses.
- Whether a range is prefilled must not flap. It depends on the set of local ranges only, not on the node's own
  addresses, which come and go.

Invariants: equal arguments in any order give equal plans; every address has exactly one class; the prefilled addresses
lie in the local ranges, are none of the node's own, and are at most PREFILL_LIMIT over all families.

Everything here is pure and takes values to values: any thread may call it.
"""

from __future__ import annotations

import bisect
import ipaddress
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from netacct.model import Address, CounterKey, Direction, Family, Network, Scope, family_of
from netacct.policy import (
    LOOPBACK,
    POD,
    MarkTable,
    Policy,
    Tunnel,
    canonical,
    countable_own,
    local_range_fault,
    sort_key,
)

PREFILL_LIMIT = 4096
"""So many local addresses, over both families, have their counters from the start."""

HOST_POD_LIMIT = 512
"""So many hostNetwork pods can be told apart, where that is asked for; kubelets run 110 pods, or some more."""


LEGS = {
    "tx": (Scope.POD, Direction.TRANSMIT),
    "rx": (Scope.POD, Direction.RECEIVE),
    "to": (Scope.REST, Direction.TRANSMIT),
    "ro": (Scope.REST, Direction.RECEIVE),
    "hi": (Scope.HOST, Direction.RECEIVE),
    "ho": (Scope.HOST, Direction.TRANSMIT),
    "pi": (Scope.HOST_POD, Direction.RECEIVE),
    "po": (Scope.HOST_POD, Direction.TRANSMIT),
}
"""What a set of counters is called after, on both datapaths: whose packets, which way."""


class Group(NamedTuple):
    """CIDRs of one class that lie in one layer."""

    traffic: str
    networks: tuple[Network, ...]


@dataclass(frozen=True, slots=True)
class FamilyPlan:
    """The plan for one address family.

    local:     the local ranges, canonical (no overlaps, sorted).
    dynamic:   those of them that are too large to prefill: an address gets its counters by lease or first packet.
    prefilled: every address of the others, minus the node's own, sorted.
    own:       the node's own addresses (no loopback ones, no IPv6 link-local ones), sorted: class `node`, ahead of
               every CIDR.
    loopback:  127.0.0.0/8 or ::1/128: class `node`, ahead of every CIDR.
    layers:    all CIDRs, so that testing the layers in order, and each layer's groups in any order, gives the class
               with the longest prefix; what no group covers is the plan's default class. Redundant CIDRs are gone.
               Groups stand in the policy's order of classes, networks sorted. A network may be 0.0.0.0/0 or ::/0.
    """

    family: Family
    local: tuple[Network, ...]
    dynamic: tuple[Network, ...]
    prefilled: tuple[Address, ...]
    own: tuple[Address, ...]
    loopback: Network
    layers: tuple[tuple[Group, ...], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a datapath installs. Equal plans mean the same kernel state.

    classes: every class of the policy, default included, `tunnel` not; in the policy's order. `pod`, `node` and
             `service` are there even while no CIDR leads to them, so that finding one at run time adds no counters.
    marks:   None where no mark shall be set.
    dynamic_capacity: counters for so many addresses of dynamic ranges fit in, per family.
    host_pods: how deep in the cgroup tree hostNetwork pods are (the root is 0), sorted; empty: they are the host.
    """

    policy: str
    policy_hash: str
    classes: tuple[str, ...]
    default: str
    tunnel: Tunnel
    marks: MarkTable | None
    families: tuple[FamilyPlan, ...]
    dynamic_capacity: int = 16384
    host_pods: tuple[int, ...] = ()


def host_pod_keys(plan: Plan) -> list[CounterKey]:
    """What is counted for hostNetwork pods: all but encapsulation, which is not theirs but who made the tunnel."""
    return [
        CounterKey(family.family, Scope.HOST_POD, direction, traffic)
        for family in plan.families
        for direction in Direction
        for traffic in (plan.classes if plan.host_pods else ())
    ]


def build(
    policy: Policy,
    local: Iterable[Network],
    own: Iterable[Address],
    marks: MarkTable | None,
    families: Sequence[Family] = (4, 6),
    dynamic_capacity: int = 16384,
    host_pods: Iterable[int] = (),
) -> Plan:
    """The plan for a policy on a node.

    Args:
        policy: the traffic classes.
        local: the local ranges, of any family, in any order; overlapping ones are collapsed.
        own: the node's own addresses, packed; loopback and IPv6 link-local ones are left out.
        marks: the marks to set, or None; the policy's own table says nothing here, because the caller decides.
        families: those to count.
        dynamic_capacity: counters per family for addresses of ranges that are too large to prefill.
        host_pods: the levels of the cgroup tree at which hostNetwork pods are told apart.

    Raises:
        ValueError: a local range cannot be one (`policy.local_range_fault` says why); check before.
    """
    ranges = canonical(net for net in local if net.version in families)
    for net in ranges:
        if fault := local_range_fault(net):
            raise ValueError(fault)
    addresses = countable_own(own)
    small = _small_enough(ranges)
    classes = tuple(item.name for item in policy.classes)
    return Plan(
        policy=policy.name,
        policy_hash=policy.hash,
        classes=classes,
        default=policy.default,
        tunnel=policy.tunnel,
        marks=marks,
        families=tuple(
            _family(family, policy, tuple(net for net in ranges if net.version == family), small, addresses)
            for family in sorted(set(families))
        ),
        dynamic_capacity=dynamic_capacity,
        host_pods=tuple(sorted(set(host_pods))),
    )


def _family(
    family: Family, policy: Policy, local: tuple[Network, ...], small: Collection[Network], own: frozenset[Address]
) -> FamilyPlan:
    mine = tuple(sorted(ip for ip in own if family_of(ip) == family))
    return FamilyPlan(
        family=family,
        local=local,
        dynamic=tuple(net for net in local if net not in small),
        prefilled=tuple(ip for net in local if net in small for ip in _addresses(net) if ip not in own),
        own=mine,
        loopback=LOOPBACK[family],
        layers=_layers(family, policy, local),
    )


def _small_enough(ranges: Iterable[Network]) -> frozenset[Network]:
    """The ranges to prefill: the smallest first, as long as all of their addresses fit into PREFILL_LIMIT."""
    left = PREFILL_LIMIT
    chosen: list[Network] = []
    for net in sorted(ranges, key=lambda net: (net.num_addresses, sort_key(net))):
        if net.num_addresses > left:
            break
        left -= net.num_addresses
        chosen.append(net)
    return frozenset(chosen)


def _addresses(net: Network) -> Iterable[Address]:
    """Every address of a range, packed, sorted. The first and last too: alias ranges give them to pods."""
    first, size = int(net.network_address), net.max_prefixlen // 8
    return (number.to_bytes(size, "big") for number in range(first, first + net.num_addresses))


class _Cidr(NamedTuple):
    """A CIDR as numbers, which compare and nest some twenty times faster than ipaddress objects."""

    first: int
    length: int
    traffic: str


def _layers(family: Family, policy: Policy, local: Iterable[Network]) -> tuple[tuple[Group, ...], ...]:
    """All CIDRs of a family by depth, deepest first (see the module's beginning)."""
    classes = {
        (int(p.network.network_address), p.network.prefixlen): p.traffic
        for p in policy.prefixes
        if p.network.version == family
    }
    # After the policy's: a local range wins over an equal CIDR of another class.
    classes.update({(int(net.network_address), net.prefixlen): POD for net in local})
    by_depth: dict[int, dict[str, list[tuple[int, int]]]] = {}
    bits = LOOPBACK[family].max_prefixlen
    around: list[_Cidr] = []
    # In this order a CIDR comes right after those that enclose it, outermost first.
    for first, length in sorted(classes):
        while around and first >= around[-1].first + (1 << bits - around[-1].length):
            around.pop()
        traffic = classes[first, length]
        if traffic == (around[-1].traffic if around else policy.default):
            continue
        around.append(_Cidr(first, length, traffic))
        by_depth.setdefault(len(around), {}).setdefault(traffic, []).append((first, length))
    order = [item.name for item in policy.classes]
    return tuple(
        tuple(Group(name, _merged(family, by_depth[depth][name])) for name in order if name in by_depth[depth])
        for depth in sorted(by_depth, reverse=True)
    )


def _merged(family: Family, cidrs: Iterable[tuple[int, int]]) -> tuple[Network, ...]:
    """Disjoint sorted CIDRs with the two halves of one made into the whole, again and again."""
    kind = ipaddress.IPv4Network if family == 4 else ipaddress.IPv6Network
    bits = LOOPBACK[family].max_prefixlen
    kept: list[tuple[int, int]] = []
    for cidr in cidrs:
        kept.append(cidr)
        while len(kept) > 1 and _halves(kept[-2], kept[-1], bits):
            kept[-2:] = [(kept[-2][0], kept[-2][1] - 1)]
    return tuple(kind(cidr) for cidr in kept)


def _halves(low: tuple[int, int], high: tuple[int, int], bits: int) -> bool:
    return low[1] == high[1] and low[0] ^ high[0] == 1 << bits - low[1]


def round_lengths(networks: Iterable[Network], lengths: Iterable[int]) -> tuple[Network, ...]:
    """Networks split so that only the given prefix lengths occur; sorted, each once, the same addresses as before.

    For `hash:net` sets, whose lookup probes once for each length in them. A network is split to the next length that
    is not shorter than its own, so a large gap between lengths makes many of few: a /9 over (8, 16) becomes 128.

    Raises:
        ValueError: a network is longer than every length, and so cannot be split.
    """
    steps = sorted(set(lengths))
    found: set[Network] = set()
    for net in networks:
        at = bisect.bisect_left(steps, net.prefixlen)
        if at == len(steps):
            raise ValueError(f"{net} is longer than every one of the lengths {steps}")
        found.update(net.subnets(new_prefix=steps[at]))
    return tuple(sorted(found, key=sort_key))
