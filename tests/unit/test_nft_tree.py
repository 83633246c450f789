"""The tree of comparisons that nf_tables walks, against the steps one after the other."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from netacct.kernel.classify import ANY, Branch, Node, Probe, Step
from netacct.kernel.nft_tree import WIDTH, tree
from netacct.model import Family, Network

EVERYWHERE: dict[Family, Network] = {4: ipaddress.ip_network("0.0.0.0/0"), 6: ipaddress.ip_network("::/0")}
PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "224.0.0.0/4")
STEPS = [
    Step("node", Probe(ipaddress.ip_network("127.0.0.0/8"))),
    Step("node", Probe(ipaddress.ip_network("192.168.50.0/24"))),
    Step("pod", Probe(ipaddress.ip_network("10.244.0.0/16"))),
    Step("service", Probe(ipaddress.ip_network("10.96.0.0/12"))),
    *(Step("private", Probe(ipaddress.ip_network(cidr))) for cidr in PRIVATE),
]


def _walk(nodes: Sequence[Node], number: int, members: Collection[int] = ()) -> str:
    """Where an address, as a number, is sent; `members` are in the one set that there is."""
    for node in nodes:
        network = node.network if isinstance(node, Branch) else node.probe.network
        if network is not None and not int(network.network_address) <= number <= int(network.broadcast_address):
            continue
        if isinstance(node, Branch):
            return _walk(node.nodes, number, members)
        if not node.probe.members or number in members:
            return node.traffic
    raise AssertionError(number)


def _chains(nodes: Sequence[Node], depth: int = 0) -> Iterator[tuple[int, int]]:
    """The depth and the number of comparisons of each chain."""
    yield depth, sum(isinstance(node, Branch) or node.probe.network is not None for node in nodes)
    for node in nodes:
        if isinstance(node, Branch):
            yield from _chains(node.nodes, depth + 1)


@st.composite
def networks(draw: st.DrawFn, family: Family) -> Network:
    """A network that nests with others, touches them or is one of them."""
    base = 0x0AF40000 if family == 4 else 0xFD00_0010_0244 << 80
    kind = ipaddress.IPv4Network if family == 4 else ipaddress.IPv6Network
    bits = EVERYWHERE[family].max_prefixlen
    length = draw(st.integers(1, bits))
    number = base ^ draw(st.integers(0, 7)) << draw(st.integers(0, bits - 3))
    return kind((number >> bits - length << bits - length, length))


@settings(deadline=None)  # two cores, many tenants
@given(st.data(), st.sampled_from((4, 6)), st.integers(0, 8))
def test_the_tree_decides_as_the_steps_in_order(data: st.DataObject, family: Family, deepest: int) -> None:
    """Each address gets to the first step that takes it; no way is longer than told, and chains are as wide at most."""
    some = data.draw(st.lists(st.tuples(networks(family), st.booleans()), max_size=30))
    steps = [Step(str(at), Probe(network, "own" if of_set else "")) for at, (network, of_set) in enumerate(some)]
    ends = {end for network, _ in some for end in (int(network.network_address), int(network.broadcast_address))}
    numbers = sorted(
        {number for end in ends for number in (end - 1, end, end + 1)} - {-1, 1 << EVERYWHERE[family].max_prefixlen}
    )
    members = data.draw(st.sets(st.sampled_from(numbers))) if numbers else set()
    nodes = tree(steps, "internet", EVERYWHERE[family], deepest)
    for number in numbers:
        assert _walk(nodes, number, members) == _walk([*steps, Step("internet", ANY)], number, members)
    for depth, width in _chains(nodes):
        assert depth <= deepest
        assert width <= WIDTH or depth == deepest


def test_the_internet_falls_through_the_first_chain() -> None:
    """With all private ranges, what is far from each of them meets one chain, and a pod's address two."""
    head = tree(STEPS, "internet", EVERYWHERE[4])
    assert _met(head, "203.0.113.10") == ["internet"]
    assert _met(head, "10.244.7.7") == ["10.0.0.0/8", "pod"]


def _met(nodes: Sequence[Node], ip: str) -> list[str]:
    """The prefixes of the branches that an address takes, and its class."""
    for node in nodes:
        if isinstance(node, Branch):
            if ipaddress.ip_address(ip) in node.network:
                return [str(node.network), *_met(node.nodes, ip)]
        elif node.probe.network is None or ipaddress.ip_address(ip) in node.probe.network:
            return [node.traffic]
    raise AssertionError(ip)


def test_few_prefixes_stay_in_order() -> None:
    """What one chain has room for is no tree."""
    assert tree(STEPS[:WIDTH], "internet", EVERYWHERE[4]) == (*STEPS[:WIDTH], Step("internet", ANY))
