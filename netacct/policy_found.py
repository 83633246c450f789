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
from netacct.policy import CLUSTER, NODE, POD, SERVICE, Policy, Prefix, sort_key

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
    """What was found, sorted, with `cluster` for networks of which it is not certain that only nodes, or pods, are in.

    Arguments as for `merge`.
    """
    return _resolved(_known(policy, found), local)


class Merging:
    """`merge`, which costs next to nothing where neither policy nor facts have changed since the last time."""

    def __init__(self) -> None:
        self._policy: Policy | None = None
        self._found: Collection[Prefix] = ()
        self._known = _Known((), (), ())
        self._facts: tuple[Prefix, ...] = ()
        self._merged: Merged | None = None

    def __call__(self, policy: Policy, found: Collection[Prefix], local: Iterable[Network]) -> Merged:
        """As `merge`."""
        if policy is not self._policy:
            self._policy, self._known, self._merged = policy, _known(policy, found), None
        elif found != self._found:
            self._known = _known(policy, found)
        self._found, facts = found, _resolved(self._known, local)
        if self._merged is None or facts != self._facts:
            self._facts, self._merged = facts, _insert(policy, facts)
        return self._merged


class _Known(NamedTuple):
    """What was found, sorted; the subnets among it whose class the policy leaves open; and all ranges of pods."""

    facts: tuple[Prefix, ...]
    subnets: tuple[Network, ...]
    pods: tuple[Network, ...]


def _known(policy: Policy, found: Iterable[Prefix]) -> _Known:
    facts = tuple(sorted(set(found), key=_order))
    subnets = (fact.network for fact in facts if fact.traffic == NODE)
    pods = (fact.network for fact in (*policy.prefixes, *facts) if fact.traffic == POD)
    return _Known(facts, tuple(net for net in subnets if not _is_said_to_be_nodes(policy, net)), tuple(pods))


def _resolved(known: _Known, local: Iterable[Network]) -> tuple[Prefix, ...]:
    ranges = tuple(local)
    doubts = {subnet: _doubt(subnet, ranges, known.pods) for subnet in known.subnets}
    shared = {subnet: why for subnet, why in doubts.items() if why}
    return tuple(sorted((_doubted(fact, shared) for fact in known.facts), key=_order)) if shared else known.facts


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
    if not apart and not any(net.version == subnet.version and not net.overlaps(subnet) for net in (*local, *pods)):
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
    """Whether one network lies in another, or is the same; a third of what `subnet_of` costs, across families too."""
    if inner.version != outer.version or inner.prefixlen < outer.prefixlen:
        return False
    spare = outer.max_prefixlen - outer.prefixlen
    return int(inner.network_address) >> spare == int(outer.network_address) >> spare
