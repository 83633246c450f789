"""Laws of policies and plans, against an oracle that knows nothing but longest prefix."""

import ipaddress
import random
from collections.abc import Sequence

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from netacct.kernel.plan import PREFILL_LIMIT, FamilyPlan, Plan, build, round_lengths
from netacct.model import Address, Network
from netacct.policy import Policy, Prefix, TrafficClass, canonical, classify, countable_own

NAMES = ("pod", "node", "service", "private", "internet", "storage")
POOLS = ("10.244.0.0/24", "fd00::/120")
"""Where CIDRs and addresses come from: small, so that they nest, touch and repeat."""


LAW = settings(deadline=None)
"""The machine is shared: how long one example takes says nothing."""


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """A network in one of the pools, from the pool's whole family down to a single address."""
    pool = ipaddress.ip_network(draw(st.sampled_from(POOLS)))
    inside = int(pool.network_address) + draw(st.integers(0, 255))
    length = pool.max_prefixlen - draw(st.one_of(st.integers(0, 8), st.integers(0, pool.max_prefixlen)))
    spare = pool.max_prefixlen - length
    address = ipaddress.ip_address((inside >> spare << spare).to_bytes(pool.max_prefixlen // 8, "big"))
    return ipaddress.ip_network(f"{address}/{length}")


@st.composite
def local_ranges(draw: st.DrawFn) -> list[Network]:
    """Local ranges in the pools, small and large enough to be dynamic."""
    narrow = networks().filter(lambda net: net.prefixlen >= net.max_prefixlen - 14)
    return draw(st.lists(narrow, max_size=4))


@st.composite
def addresses(draw: st.DrawFn) -> Address:
    """An address in a pool, or at its edge, or far away, or a loopback one."""
    pool = ipaddress.ip_network(draw(st.sampled_from(POOLS)))
    far = [
        bytes([127, 0, 0, 1]),
        bytes(15) + b"\1",
        bytes([8, 8, 8, 8]),
        bytes([0x20, 1]) + bytes(14),
        b"\xff" * 4,
        bytes(4),
    ]
    near = st.integers(-1, 256).map(
        lambda at: (int(pool.network_address) + at).to_bytes(pool.max_prefixlen // 8, "big")
    )
    return draw(st.one_of(near, near, near, st.sampled_from(far)))


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """A policy of random CIDRs."""
    cidrs = draw(st.dictionaries(networks(), st.sampled_from(NAMES), max_size=24))
    prefixes = tuple(Prefix(net, name, f"p.yaml:{line}") for line, (net, name) in enumerate(cidrs.items(), 1))
    return Policy("p", "p.yaml", "00", tuple(map(TrafficClass, NAMES)), prefixes, draw(st.sampled_from(NAMES)))


def longest_prefix(policy: Policy, address: Address, own: Sequence[Address], local: Sequence[Network]) -> str:
    """The class by the words of the documentation, over all CIDRs one by one."""
    parsed = ipaddress.ip_address(address)
    if parsed.is_loopback or (address in own and not (parsed.version == 6 and parsed.is_link_local)):
        return "node"
    best, traffic = -1, policy.default
    for net, name, _ in policy.prefixes:
        if parsed in net and net.prefixlen > best:
            best, traffic = net.prefixlen, name
    # Of ranges inside of one another only the outermost counts.
    ranges = [net.prefixlen for net in local if parsed in net]
    return "pod" if ranges and min(ranges) >= best else traffic


def walk(plan: Plan, part: FamilyPlan, address: Address, *, backwards: bool) -> str:
    """The class that a datapath finds: own and loopback first, then the layers in order, groups in either order."""
    parsed = ipaddress.ip_address(address)
    if address in part.own or parsed in part.loopback:
        return "node"
    for layer in part.layers:
        hits = [group.traffic for group in layer for net in group.networks if parsed in net]
        assert len(hits) <= 1, "groups of one layer overlap"
        if hits:
            return hits[-1 if backwards else 0]
    return plan.default


@LAW
@given(policies(), local_ranges(), st.lists(addresses(), max_size=4), st.lists(addresses(), min_size=1, max_size=30))
def test_layers_find_the_longest_prefix(
    policy: Policy, local: list[Network], own: list[Address], probes: list[Address]
) -> None:
    """Walking the layers, `classify`, and a naive search for the longest prefix give one and the same class."""
    plan = build(policy, local, own, None)
    parts = {part.family: part for part in plan.families}
    for address in (*probes, *own):
        part = parts[4 if len(address) == 4 else 6]
        expected = longest_prefix(policy, address, own, local)
        assert expected in plan.classes
        assert walk(plan, part, address, backwards=False) == expected
        assert walk(plan, part, address, backwards=True) == expected
        assert classify(policy, address, own, local).traffic == expected


@LAW
@given(policies(), local_ranges(), st.lists(addresses(), max_size=4), st.randoms(use_true_random=False))
def test_order_of_input_is_nothing(
    policy: Policy, local: list[Network], own: list[Address], order: random.Random
) -> None:
    """CIDRs, ranges and addresses in another order, or given twice, make an equal plan."""
    plan = build(policy, local, own, None)
    prefixes, ranges, addresses_ = list(policy.prefixes), local * 2, own * 2
    for items in (prefixes, ranges, addresses_):
        order.shuffle(items)
    shuffled = Policy(policy.name, policy.path, policy.hash, policy.classes, tuple(prefixes), policy.default)
    assert build(shuffled, ranges, addresses_, None, families=(6, 4)) == plan


@LAW
@given(policies(), local_ranges(), st.lists(addresses(), max_size=4))
def test_plan_of_a_plan(policy: Policy, local: list[Network], own: list[Address]) -> None:
    """Ranges and addresses that a plan lists make the same plan again, and so do its layers as a policy."""
    plan = build(policy, local, own, None)
    ranges = [net for part in plan.families for net in part.local]
    mine = [ip for part in plan.families for ip in part.own]
    assert build(policy, ranges, mine, None) == plan
    listed = [
        (net, group.traffic)
        for part in plan.families
        for layer in part.layers
        for group in layer
        for net in group.networks
    ]
    prefixes = dict(listed)
    # Two halves that became their whole can hide an equal CIDR of the layer below, which no policy can say.
    assume(len(prefixes) == len(listed))
    again = Policy(
        "p", "p", "00", policy.classes, tuple(Prefix(*item, "p:1") for item in prefixes.items()), policy.default
    )
    assert [part.layers for part in build(again, ranges, mine, None).families] == [
        part.layers for part in plan.families
    ]


@LAW
@given(policies(), local_ranges(), st.lists(addresses(), max_size=4))
def test_prefill_is_bounded_and_exact(policy: Policy, local: list[Network], own: list[Address]) -> None:
    """Prefilled addresses are local, sorted, each once, none the node's own, and no more than the limit in all."""
    plan = build(policy, local, own, None)
    assert sum(len(part.prefilled) for part in plan.families) <= PREFILL_LIMIT
    for part in plan.families:
        assert list(part.prefilled) == sorted(set(part.prefilled))
        assert not set(part.prefilled) & countable_own(own)
        small = [net for net in part.local if net not in part.dynamic]
        expected = {ip.packed for net in small for ip in net} - countable_own(own)
        assert set(part.prefilled) == expected
        assert part.local == tuple(net for net in canonical(local) if net.version == part.family)
        assert all(a.num_addresses >= b.num_addresses for a in part.dynamic for b in small)


@LAW
@given(policies(), local_ranges())
def test_layers_are_small(policy: Policy, local: list[Network]) -> None:
    """The layers hold no more CIDRs than policy and ranges have, and no empty group."""
    plan = build(policy, local, [], None)
    groups = [group for part in plan.families for layer in part.layers for group in layer]
    assert all(group.networks for group in groups)
    assert sum(len(group.networks) for group in groups) <= len(policy.prefixes) + len(local)


@LAW
@given(st.lists(networks().filter(lambda net: net.prefixlen >= net.max_prefixlen - 10), max_size=6))
def test_round_lengths_keeps_the_addresses(nets: list[Network]) -> None:
    """Split networks have only the given lengths and hold exactly the addresses that the whole ones held."""
    lengths = (22, 26, 29, 32, 118, 122, 125, 128)
    for family in (4, 6):
        mine = [net for net in nets if net.version == family]
        split = round_lengths(mine, [length for length in lengths if (length <= 32) == (family == 4)])
        assert {net.prefixlen for net in split} <= set(lengths)
        assert {ip for net in split for ip in net} == {ip for net in mine for ip in net}
