"""How xtables finds the class of an address: few CIDRs as a tree of rules, many as a set behind prefixes. Pure.

The figures below are from measurements of the packet path: a rule costs 2 to 5 ns, a set lookup 80 ns and 25 more for
each prefix length that occurs in it. A packet that lies outside of the prefixes that cover a set pays a rule for each
of them and no lookup. Where CIDRs lie everywhere and no few prefixes cover them, a bitmap of the /16s that they touch
does (IPv4 only): one more lookup, the cheapest there is, and most packets need no other.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

from netacct.kernel.plan import FamilyPlan, round_lengths
from netacct.model import Address, Network

MAX_RULES_OF_GROUP = 40
"""A group of more CIDRs becomes a set: the tree would be as fast, but each commit by anybody copies all rules."""

MAX_RULES = 96
"""So many rules of groups in one direction; what is beyond, the largest groups first, becomes sets."""

MAX_OWN_RULES = 8
"""More own addresses become a set: IPVS gives a node one for each service."""

MAX_LOCAL_RULES = 4
"""More local ranges (a node with many alias IPs) become a set."""

MAX_COVERS = 4

_USEFUL_SHARE = 0.25
"""Covers and blocks that take more of the address space than this would let few packets past."""

_BLOCK = 16
"""The prefix length of blocks: with 2^16 elements a bitmap is full."""

_WORTH_A_BRANCH = 2
_WORTH_A_SPLIT = 4
"""So many steps below a common prefix, or in two halves, are worth another chain."""

_LENGTH_STEP = 4
"""Prefix lengths in a set are rounded up to multiples of this, which splits a CIDR into eight at most."""

_FINEST_STEP = 64
"""IPv6 prefixes longer than this stay as they are: there are few lengths, and many addresses between them."""


class Members(NamedTuple):
    """A set of prefixes, by the name that it has within its family; all of length `netmask` where that is not 0."""

    name: str
    networks: tuple[Network, ...]
    netmask: int = 0


class Probe(NamedTuple):
    """One way to recognise an address: it lies in `network` (None: anywhere) and in the set `members` ("": no set).

    blocks: a set that is asked before `members`, and has a no for most addresses that are not in it.
    """

    network: Network | None
    members: str = ""
    blocks: str = ""


ANY = Probe(None)


class Step(NamedTuple):
    """One step on the way to a class: what passes the probe is `traffic`."""

    traffic: str
    probe: Probe


class Branch(NamedTuple):
    """What lies in `network` is decided by these nodes alone."""

    network: Network
    nodes: tuple[Node, ...]


Node: TypeAlias = Step | Branch


def covers(networks: Sequence[Network], limit: int = MAX_COVERS) -> tuple[Network | None, ...]:
    """At most `limit` disjoint prefixes that contain all of these; `(None,)` where that is too much of everything."""
    found = parts(networks, limit)
    if sum(2.0**-network.prefixlen for network in found) > _USEFUL_SHARE:
        return (None,)
    return tuple(found)


def parts(networks: Sequence[Network], limit: int) -> list[Network]:
    """At most `limit` disjoint prefixes that contain all of these.

    The sorted networks are cut where neighbours have the shortest prefix in common. Any such cut follows the tree of
    prefixes, so the parts do not overlap.
    """
    ordered = sorted(networks, key=lambda network: (int(network.network_address), network.prefixlen))
    shared = [_common(ordered[i], ordered[i + 1]).prefixlen for i in range(len(ordered) - 1)]
    cuts = sorted(sorted(range(len(shared)), key=shared.__getitem__)[: limit - 1])
    starts, ends = [0, *(cut + 1 for cut in cuts)], [*cuts, len(ordered) - 1]
    return [_common(ordered[start], ordered[end]) for start, end in zip(starts, ends, strict=True)]


def local_probes(family: FamilyPlan) -> tuple[tuple[Members, ...], tuple[Probe, ...]]:
    """The set, if one is needed, and the probes that recognise the addresses of the local ranges."""
    if len(family.local) <= MAX_LOCAL_RULES:
        return (), tuple(Probe(network) for network in family.local)
    return (Members("local", family.local),), _behind_covers("local", family.local)


def own_set(family: FamilyPlan) -> tuple[Members, ...]:
    """The set of the node's own addresses, where they are too many for rules."""
    if len(family.own) <= MAX_OWN_RULES:
        return ()
    return (Members("own", tuple(_host(ip) for ip in family.own)),)


def own_probes(own: Collection[Address]) -> tuple[Probe, ...]:
    """The probes that recognise `own`, which are some or all of the node's own addresses of one family."""
    hosts = [_host(ip) for ip in own]
    return tuple(Probe(host) for host in hosts) if len(hosts) <= MAX_OWN_RULES else _behind_covers("own", hosts)


def class_steps(family: FamilyPlan) -> tuple[tuple[Members, ...], tuple[Step, ...]]:
    """The sets and steps that give each address its class; what no step takes is the default class.

    The node's own addresses and the loopback range come first. Then the layers in order, and in each layer the rules
    before the sets: which one comes first makes no difference there but to the time that it takes.
    """
    sets = [*own_set(family)]
    steps = [Step("node", Probe(family.loopback))]
    steps += [Step("node", probe) for probe in own_probes(family.own)]
    large = _large_groups(family)
    for depth, layer in enumerate(family.layers):
        for group in layer:
            if (depth, group.traffic) not in large:
                steps += [Step(group.traffic, Probe(network)) for network in group.networks]
        for group in layer:
            if (depth, group.traffic) in large:
                made, probes = _set_of(f"{depth}-{group.traffic}", group.networks)
                sets += made
                steps += [Step(group.traffic, probe) for probe in probes]
    return tuple(sets), tuple(steps)


def tree(steps: Sequence[Step], default: str, within: Network) -> tuple[Node, ...]:
    """The same decision as the steps one after the other, in which an address meets few of them.

    A dozen CIDRs in a row cost a packet to the internet 60 ns, a tree of them 20. Where all steps below `within` have
    a longer prefix in common, they become the branch of that prefix; where they lie in both halves, one half becomes a
    branch and the other follows it.

    Args:
        steps: as `class_steps` gives them.
        default: the class of what no step takes; the last node is always a step with an empty probe.
        within: where the addresses lie that get here; at first the whole address space.
    """
    chosen = relevant(steps, default, within)
    below = [step.probe.network for step in chosen if step.probe.network is not None]
    if len(below) < _WORTH_A_BRANCH:
        return tuple(chosen)
    cover = common_prefix(below)
    if cover != within:
        around = [step for step in chosen if step.probe.network is None]
        return (_branch(chosen, default, cover), *around)
    if len(below) < _WORTH_A_SPLIT:
        return tuple(chosen)
    low, high = within.subnets()
    return (_branch(chosen, default, low), *tree(chosen, default, high))


def _branch(steps: Sequence[Step], default: str, network: Network) -> Node:
    nodes = tree(steps, default, network)
    only = nodes[0]
    return Step(only.traffic, Probe(network)) if len(nodes) == 1 and isinstance(only, Step) else Branch(network, nodes)


def relevant(steps: Sequence[Step], default: str, within: Network) -> list[Step]:
    """The steps that an address in `within` may be taken by, up to the one that takes all of them."""
    chosen: list[Step] = []
    last = Step(default, ANY)
    for traffic, probe in steps:
        covered = probe.network is None or contains(probe.network, within)
        if covered and not probe.members:
            last = Step(traffic, ANY)
            break
        if covered:
            chosen.append(Step(traffic, probe._replace(network=None)))
        elif probe.network is not None and contains(within, probe.network):
            chosen.append(Step(traffic, probe))
    while chosen and chosen[-1].traffic == last.traffic:
        chosen.pop()
    return [*chosen, last]


def rounded(networks: Sequence[Network]) -> tuple[Network, ...]:
    """The same addresses in prefixes of fewer lengths, where that saves lookups (the kernel tries each length)."""
    lengths = {network.prefixlen for network in networks}
    if lengths == {0}:  # hash:net has no /0
        return tuple(networks[0].subnets())
    widest = networks[0].max_prefixlen
    steps = range(_LENGTH_STEP, min(widest, _FINEST_STEP) + 1, _LENGTH_STEP)
    allowed = sorted({*steps, *(length for length in lengths if length > _FINEST_STEP)})
    finer = tuple(round_lengths(networks, allowed))
    return finer if len({network.prefixlen for network in finer}) < len(lengths) else tuple(networks)


def _large_groups(family: FamilyPlan) -> set[tuple[int, str]]:
    """The groups, by layer and class, that become sets."""
    sizes: Counter[tuple[int, str]] = Counter()
    for depth, layer in enumerate(family.layers):
        for group in layer:
            sizes[depth, group.traffic] += len(group.networks)
    rules = sum(sizes.values())
    large = set()
    for name, size in sizes.most_common():
        if size <= MAX_RULES_OF_GROUP and rules <= MAX_RULES:
            break
        large.add(name)
        rules -= size
    return large


def _set_of(name: str, networks: Sequence[Network]) -> tuple[tuple[Members, ...], tuple[Probe, ...]]:
    """The set of a large group behind its covers or, where it has none, its blocks."""
    members = Members(f"c{name}", rounded(networks))
    found = covers(members.networks)
    touched = blocks(networks) if found == (None,) else ()
    if not touched:
        return (members,), tuple(Probe(cover, members.name) for cover in found)
    wide = Members(f"b{name}", touched, _BLOCK)
    return (wide, members), (Probe(None, members.name, wide.name),)


def blocks(networks: Sequence[Network]) -> tuple[Network, ...]:
    """The /16s in which these IPv4 networks lie, sorted; none for IPv6, or where they are too much of everything."""
    if networks[0].version != 4 or sum(2.0**-network.prefixlen for network in networks) > _USEFUL_SHARE:
        return ()
    shift = 32 - _BLOCK
    touched = {
        number
        for network in networks
        for number in range(int(network.network_address) >> shift, (int(network.broadcast_address) >> shift) + 1)
    }
    if len(touched) > _USEFUL_SHARE * 2**_BLOCK:
        return ()
    return tuple(ipaddress.IPv4Network((number << shift, _BLOCK)) for number in sorted(touched))


def _behind_covers(name: str, networks: Sequence[Network]) -> tuple[Probe, ...]:
    return tuple(Probe(cover, name) for cover in covers(networks))


def _host(ip: Address) -> Network:
    return ipaddress.ip_network(ip)


def contains(outer: Network, inner: Network) -> bool:
    """`inner.subnet_of(outer)`, which is twenty times slower."""
    shift = outer.max_prefixlen - outer.prefixlen
    same = int(outer.network_address) >> shift == int(inner.network_address) >> shift
    return outer.prefixlen <= inner.prefixlen and same


def common_prefix(networks: Sequence[Network]) -> Network:
    """The longest prefix that contains all of these."""
    cover = networks[0]
    for network in networks[1:]:
        cover = _common(cover, network)
    return cover


def _common(first: Network, second: Network) -> Network:
    """The longest prefix that contains both."""
    bits = first.max_prefixlen
    differing = (int(first.network_address) ^ int(second.network_address)).bit_length()
    length = min(bits - differing, first.prefixlen, second.prefixlen)
    base = int(first.network_address) >> (bits - length) << (bits - length)
    return ipaddress.IPv4Network((base, length)) if bits == 32 else ipaddress.IPv6Network((base, length))
