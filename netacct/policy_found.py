"""Cluster ranges that were found at run time, merged into a policy.

The policy's word stands: no address that one of its own lines (or a cloud's list that it takes) decides gets another
class. What was found counts where only a built-in list or the default class would, and there the longest prefix wins,
as always. So:

- a found range inside of a CIDR of the policy's own is not used, and one around it yields to it;
- a found range beats an equal CIDR of a built-in list;
- of equal found ranges the class that stands first in `RANK` wins;
- one that lies in a found range of its own class changes nothing and is left out.

Where the nodes are is known less well than where pods are: the node's connected subnet surely has other nodes in it,
and with some networks (Azure on a node subnet, EKS) also their pods. It is `node` only where pods are known to be
elsewhere: this node's own pods (local ranges), or the pod ranges that are known. Where they are not, the subnet, and
each pod range around it, is `cluster`: pods and nodes that no CIDR tells apart. A policy without that class does not
use it.

Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from netacct.model import Network
from netacct.policy import CLUSTER, NODE, POD, SERVICE, Policy, Prefix, canonical, sort_key

RANK = (NODE, POD, SERVICE, CLUSTER)
"""Which class an equal range that was found in several gets: the first."""


class Unused(NamedTuple):
    """A found range that the policy does not use, and why, in words."""

    fact: Prefix
    why: str


class Merged(NamedTuple):
    """A policy with what was found, and what it does not use of that. Its hash is that of the file."""

    policy: Policy
    unused: tuple[Unused, ...] = ()


def merge(policy: Policy, found: Iterable[Prefix], local: Iterable[Network] = ()) -> Merged:
    """The policy with found ranges as prefixes besides its own; `origin` of each says where it was found.

    Args:
        policy: as the file has it.
        found: what was found, in any order; `node` stands for connected subnets.
        local: the local ranges of this node's pods, which tell whether pods share the nodes' subnet.
    """
    return _insert(policy, sure(policy, found, local))


def sure(policy: Policy, found: Iterable[Prefix], local: Iterable[Network]) -> tuple[Prefix, ...]:
    """What was found, with `cluster` for each network of which it is not certain that only nodes, or pods, are there.

    The result is sorted; each network is there once in each class.
    """
    facts = sorted(set(found), key=_order)
    ranges = [*canonical(local)]
    known = [fact.network for fact in (*policy.prefixes, *facts) if fact.traffic == POD]
    shared: dict[Network, str] = {}
    for fact in facts:
        if fact.traffic == NODE and not _is_said_to_be_nodes(policy, fact.network):
            why = _doubt(fact.network, ranges, known)
            if why:
                shared[fact.network] = why
    return tuple(sorted((_doubted(fact, shared) for fact in facts), key=_order))


class Merging:
    """`merge`, which costs nothing where nothing has changed since the last time."""

    def __init__(self) -> None:
        self._key: tuple[Policy, tuple[Prefix, ...]] | None = None
        self._merged: Merged | None = None

    def __call__(self, policy: Policy, found: Collection[Prefix], local: Iterable[Network]) -> Merged:
        """As `merge`."""
        facts = sure(policy, found, local) if found else ()
        if self._merged is None or self._key is None or self._key[0] is not policy or self._key[1] != facts:
            self._key, self._merged = (policy, facts), _insert(policy, facts)
        return self._merged


def _order(fact: Prefix) -> tuple[tuple[int, int, int], int, str]:
    return sort_key(fact.network), RANK.index(fact.traffic), fact.origin


def _is_said_to_be_nodes(policy: Policy, network: Network) -> bool:
    around = [prefix for prefix in policy.prefixes if _inside(network, prefix.network)]
    longest = max(around, key=lambda prefix: prefix.network.prefixlen, default=None)
    return longest is not None and longest.traffic == NODE


def _doubt(subnet: Network, local: Iterable[Network], pods: Iterable[Network]) -> str:
    """Why it is not certain that no pod is in a subnet of nodes; "" where it is."""
    apart = [net for net in pods if net != subnet and _inside(net, subnet)]  # their own part of the subnet
    for net in local:
        if (_inside(net, subnet) or _inside(subnet, net)) and not any(_inside(net, part) for part in apart):
            return f"pods of this node are in {subnet}, too"
    elsewhere = (net for net in (*local, *pods) if net.version == subnet.version and not net.overlaps(subnet))
    if not apart and next(elsewhere, None) is None:
        return f"whether pods are in {subnet}, too, is not known"
    return ""


def _doubted(fact: Prefix, shared: dict[Network, str]) -> Prefix:
    """The fact as it is, or in class `cluster`, its origin with the reason."""
    if fact.traffic == NODE and fact.network in shared:
        return fact._replace(traffic=CLUSTER, origin=f"{fact.origin}; {shared[fact.network]}")
    if fact.traffic == POD:
        for subnet in shared:
            if _inside(subnet, fact.network):
                return fact._replace(traffic=CLUSTER, origin=f"{fact.origin}; nodes are in {subnet}, too")
    return fact


def _insert(policy: Policy, facts: Iterable[Prefix]) -> Merged:
    """Put facts among the policy's prefixes, each below what covers it."""
    names = {item.name for item in policy.classes}
    kept = {prefix.network: prefix for prefix in policy.prefixes}
    taken: set[Network] = set()
    unused: list[Unused] = []
    around: list[tuple[bool, Prefix]] = []
    for is_fact, prefix in _in_order(policy.prefixes, facts):
        while around and not _inside(prefix.network, around[-1][1].network):
            around.pop()
        if is_fact:
            why = _refusal(policy, names, prefix, around)
            if why:
                unused.append(Unused(prefix, why))
            if why is not None:
                continue
            kept[prefix.network] = prefix
            taken.add(prefix.network)
        around.append((is_fact, prefix))
    if taken:
        ordered = tuple(kept[network] for network in sorted(kept, key=sort_key))
        policy = replace(policy, prefixes=ordered, builtin=policy.builtin - taken, found=frozenset(taken))
    return Merged(policy, tuple(unused))


def _in_order(own: Iterable[Prefix], facts: Iterable[Prefix]) -> Iterator[tuple[bool, Prefix]]:
    """Each prefix just before what lies inside it; of equal ones the policy's own first, then by rank."""
    both = [*((False, prefix) for prefix in own), *((True, fact) for fact in facts)]
    yield from sorted(
        both, key=lambda item: (sort_key(item[1].network), item[0], *(_order(item[1]) if item[0] else ()))
    )


def _refusal(policy: Policy, names: Collection[str], fact: Prefix, around: list[tuple[bool, Prefix]]) -> str | None:
    """Why a fact is not used; "" where it would change nothing, None where it counts.

    `around`: what covers it, the shortest first, with whether that is a fact itself.
    """
    if fact.traffic not in names:
        return f"the policy has no class {fact.traffic}"
    own = next((prefix for is_fact, prefix in reversed(around) if not is_fact), None)
    if own is not None and own.network not in policy.builtin:
        return "" if own.traffic == fact.traffic else f"the policy's own {own.network} is {own.traffic} ({own.origin})"
    if around and around[-1][1].traffic == fact.traffic:
        return ""
    if around and around[-1][0] and around[-1][1].network == fact.network:
        return f"{fact.network} is {around[-1][1].traffic}: {around[-1][1].origin}"
    return None


def _inside(inner: Network, outer: Network) -> bool:
    """Whether one network lies in another, or is the same. Also answers across families."""
    return inner.version == outer.version and inner.prefixlen >= outer.prefixlen and outer.overlaps(inner)
