"""Laws of merging found cluster ranges into a policy, against an oracle that looks at each address on its own."""

from __future__ import annotations

import ipaddress
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from netacct.kernel.plan import build
from netacct.model import Address, Network
from netacct.policy import CLUSTER, FOUND, NODE, Policy, Prefix, TrafficClass, classify
from netacct.policy_found import RANK, Merging, merge, sure

CLASSES = ("pod", "node", "service", "private", "internet", "storage")
POOLS = ("10.244.0.0/24", "fd00::/120")
"""Where everything is: small, so that networks nest, touch and repeat."""

LAW = settings(deadline=None)
"""The machine is shared: how long one example takes says nothing."""


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """A network in a pool, of the pool's size down to one address."""
    pool = ipaddress.ip_network(draw(st.sampled_from(POOLS)))
    spare = draw(st.integers(0, 8))
    inside = int(pool.network_address) + draw(st.integers(0, 255))
    address = (inside >> spare << spare).to_bytes(pool.max_prefixlen // 8, "big")
    return ipaddress.ip_network((address, pool.max_prefixlen - spare))


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """A policy, with or without a class `cluster`, some of whose prefixes are a built-in list's."""
    names = (*CLASSES, CLUSTER) if draw(st.booleans()) else CLASSES
    cidrs = draw(st.dictionaries(networks(), st.sampled_from(names), max_size=12))
    prefixes = tuple(Prefix(net, name, f"p.yaml:{line}") for line, (net, name) in enumerate(cidrs.items(), 1))
    builtin = frozenset(draw(st.sets(st.sampled_from(sorted(cidrs, key=str)), max_size=6)) if cidrs else ())
    classes = tuple(map(TrafficClass, names))
    return Policy("p", "p.yaml", "00", classes, prefixes, draw(st.sampled_from(names)), builtin=builtin)


facts = st.lists(st.builds(Prefix, networks(), st.sampled_from(FOUND), st.sampled_from(("a", "b"))), max_size=8)
local_ranges = st.lists(networks(), max_size=4)


def addresses() -> list[Address]:
    """Every address of the pools, and one outside of them."""
    found = [int(ipaddress.ip_network(pool).network_address) + at for pool in POOLS for at in range(256)]
    return [number.to_bytes(4 if number < 1 << 32 else 16, "big") for number in found] + [bytes([8, 8, 8, 8])]


def inside(network: Network, other: Network) -> bool:
    """Whether the one lies in the other, or is the same."""
    return network.version == other.version and network.overlaps(other) and network.prefixlen >= other.prefixlen


def longest(prefixes: list[Prefix]) -> Prefix | None:
    """The longest of them."""
    return max(prefixes, key=lambda prefix: prefix.network.prefixlen, default=None)


def by_the_book(policy: Policy, found: list[Prefix], address: Address) -> str:
    """An address's class by the words of the documentation; `found` as `sure` has it."""
    parsed = ipaddress.ip_address(address)
    own = longest([prefix for prefix in policy.prefixes if parsed in prefix.network])
    if own is not None and own.network not in policy.builtin:
        return own.traffic
    names = {item.name for item in policy.classes}
    best, traffic = (own.network.prefixlen - 0.5, own.traffic) if own else (-1.0, policy.default)
    for fact in sorted(found, key=lambda fact: -RANK.index(fact.traffic)):
        around = longest([prefix for prefix in policy.prefixes if inside(fact.network, prefix.network)])
        usable = fact.traffic in names and (around is None or around.network in policy.builtin)
        if usable and parsed in fact.network and fact.network.prefixlen >= best:
            best, traffic = fact.network.prefixlen, fact.traffic
    return traffic


@LAW
@given(policies(), facts, local_ranges)
def test_every_address_gets_the_class_of_the_book(policy: Policy, found: list[Prefix], local: list[Network]) -> None:
    """The longest usable range decides; a built-in list's yields to an equal one, and of equals the first in rank."""
    merged = merge(policy, found, local).policy
    certain = list(sure(policy, found, local))
    for address in addresses():
        assert classify(merged, address).traffic == by_the_book(policy, certain, address)


@LAW
@given(policies(), facts, local_ranges)
def test_the_policys_own_word_stands(policy: Policy, found: list[Prefix], local: list[Network]) -> None:
    """No address that a line of the policy decides gets another class, whatever is found."""
    merged = merge(policy, found, local).policy
    for address in addresses():
        before = classify(policy, address)
        if before.prefix is not None and before.prefix not in policy.builtin:
            after = classify(merged, address)
            assert (after.traffic, after.prefix, after.origin) == (before.traffic, before.prefix, before.origin)


@LAW
@given(policies(), facts, local_ranges, st.randoms(use_true_random=False))
def test_order_and_repetition_mean_nothing(
    policy: Policy, found: list[Prefix], local: list[Network], chance: random.Random
) -> None:
    """Facts and local ranges in any order and number, asked once or again, make the same policy, with the same hash."""
    first = merge(policy, found, local)
    mixed, others = [*found, *found], [*local, *local]
    chance.shuffle(mixed)
    chance.shuffle(others)
    merging = Merging()
    assert merge(policy, mixed, others) == first == merging(policy, mixed, others)
    assert merging(policy, found, local) is merging(policy, mixed, others)
    assert first.policy.hash == policy.hash
    assert first.policy.classes == policy.classes


@LAW
@given(policies(), facts, local_ranges)
def test_what_was_found_is_marked_as_such(policy: Policy, found: list[Prefix], local: list[Network]) -> None:
    """Prefixes stay sorted, each network once; the found ones are facts, and no built-in list's any more."""
    merged = merge(policy, found, local).policy
    nets = [prefix.network for prefix in merged.prefixes]
    assert len(nets) == len(set(nets))
    assert merged.found.isdisjoint(merged.builtin)
    certain = sure(policy, found, local)
    assert all(prefix in certain for prefix in merged.prefixes if prefix.network in merged.found)
    assert {prefix for prefix in merged.prefixes if prefix.network not in merged.found} <= set(policy.prefixes)


@LAW
@given(facts, local_ranges)
def test_a_subnet_with_pods_in_it_is_not_nodes(found: list[Prefix], local: list[Network]) -> None:
    """A found subnet is `node` only if no local range touches it, but one in a smaller pod range inside of it."""
    empty = Policy("p", "p.yaml", "00", tuple(map(TrafficClass, CLASSES)), (), "internet")
    pods = [fact.network for fact in found if fact.traffic == "pod"]
    for fact in sure(empty, found, local):
        if fact.traffic == NODE:
            parts = [net for net in pods if inside(net, fact.network) and net != fact.network]
            touching = [net for net in local if net.version == fact.network.version and net.overlaps(fact.network)]
            assert all(any(inside(net, part) for part in parts) for net in touching)


@LAW
@given(policies(), facts, local_ranges)
def test_the_plan_has_the_same_classes(policy: Policy, found: list[Prefix], local: list[Network]) -> None:
    """The kernel's plan of a merged policy has no class, and no local range, that the policy's own plan lacks."""
    before, after = build(policy, local, (), None), build(merge(policy, found, local).policy, local, (), None)
    assert before.classes == after.classes
    assert [part.local for part in before.families] == [part.local for part in after.families]
