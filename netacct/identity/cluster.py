"""What a node's own files, processes, rules and routes say about the ranges of the whole cluster: values and checks.

A fact is a `policy.Prefix`: a network, the class that it is said to be, and where that was said, in words for people
(`found in /run/flannel/subnet.env (FLANNEL_NETWORK)`). Whether a fact changes what is counted decides
`policy_found.py`, which knows the policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from netacct import model
from netacct.model import Network
from netacct.policy import SERVICE, Prefix, local_range_fault, sort_key

PROVIDERS = ("flannel", "cni", "kubernetes", "rules", "routes", "cloud")
"""Every provider of cluster ranges, in the order in which they are named where several say the same."""

SHORTEST: Mapping[int, int] = {4: 8, 6: 16}
"""The shortest prefix that is believed, by IP version: whatever says more than that says nothing about a cluster."""


class Reading(NamedTuple):
    """What one kind of place says now.

    kind:   always the same for one kind (`flannel`, `kube-proxy` …), however its files and processes come and go.
    facts:  what was found.
    faults: what was there and could not be understood or believed, in words.
    """

    kind: str
    facts: tuple[Prefix, ...] = ()
    faults: tuple[str, ...] = ()


class Kept(NamedTuple):
    """What holds after a look: the facts of each kind, and the kinds of which something earlier holds on."""

    facts: Mapping[str, tuple[Prefix, ...]]
    stale: frozenset[str] = frozenset()

    @property
    def all(self) -> tuple[Prefix, ...]:
        """Each network once in each class, sorted; of several that say the same, the kind that was read first."""
        best: dict[tuple[Network, str], Prefix] = {}
        for facts in self.facts.values():
            for fact in facts:
                best.setdefault((fact.network, fact.traffic), fact)
        return tuple(sorted(best.values(), key=lambda fact: (sort_key(fact.network), fact.traffic)))


def keep(before: Kept, readings: Iterable[Reading]) -> Kept:
    """The facts of now: what a kind said last holds until it says something else, also where it was not asked.

    A kind that says nothing any more is being written anew, or restarts, or was never told again: a cluster does not
    lose its ranges while a node is up. Where only a part could be read, the rest of what it said before holds besides.
    """
    facts = dict(before.facts)
    stale = set(before.stale)
    for reading in readings:
        stale.discard(reading.kind)
        earlier = before.facts.get(reading.kind, ())
        whole = bool(reading.facts) and not reading.faults
        known = {(fact.network, fact.traffic) for fact in reading.facts}
        rest = () if whole else tuple(fact for fact in earlier if (fact.network, fact.traffic) not in known)
        facts[reading.kind] = reading.facts + rest
        if rest:
            stale.add(reading.kind)
    return Kept(facts, frozenset(stale))


def fault(network: Network) -> str:
    """Why a network cannot be a range of a cluster, in words; "" where it can."""
    shortest = SHORTEST[network.version]
    if network.prefixlen < shortest:
        return f"{network} is wider than /{shortest}, which says nothing about a cluster"
    if network.is_link_local:
        return f"{network} is link-local, which no router forwards"
    return local_range_fault(network)


def read_cidrs(text: str, traffic: str, origin: str) -> tuple[list[Prefix], list[str]]:
    """The facts in a list of CIDRs with commas, as Kubernetes writes them, and what is wrong with the others.

    Host bits are dropped, as the programs do that read such a list. A single address is one of itself. A Service with a
    link-local address, which NodeLocal DNSCache has, is none of the cluster, and no fault.
    """
    facts, faults = [], []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            network = model.network(word)
        except ValueError:
            faults.append(f"{word[:60]!r} is no CIDR ({origin})")
            continue
        why = fault(network)
        if why and not (traffic == SERVICE and network.is_link_local):  # the node's own DNS cache
            faults.append(f"{why} ({origin})")
        elif not why:
            facts.append(Prefix(network, traffic, origin))
    return facts, faults


def reading(kind: str, parts: Iterable[tuple[list[Prefix], list[str]]]) -> Reading:
    """One reading of what several places of a kind say."""
    facts: list[Prefix] = []
    faults: list[str] = []
    for good, bad in parts:
        facts += good
        faults += bad
    return Reading(kind, tuple(dict.fromkeys(facts)), tuple(dict.fromkeys(faults)))
