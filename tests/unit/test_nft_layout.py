"""Packets walked through an nftables layout, part by part, against what the policy says of their addresses."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netacct.kernel import nft_layout as nft
from netacct.kernel import nft_many
from netacct.kernel import nft_parts as parts
from netacct.kernel.layout import SENTINEL
from netacct.kernel.nft_many import width_in_set, width_of
from netacct.kernel.plan import Plan, build
from netacct.model import TUNNEL, WHOLE, Address, CounterKey, Direction, Family, Network, Scope, cgroup_key, pack
from netacct.policy import MarkTable, Policy, Prefix, TrafficClass, Tunnel, local_range_fault

HOST_POD = cgroup_key(7)
NAMES = ("pod", "node", "service", "private", "internet", "storage")
MARKS = MarkTable(0x1F, {"pod": 1, "node": 2, "private": 4})


class _EndOfRuleError(Exception):
    """A part did not match."""


class _Away(Exception):  # noqa: N818  # a way to go, no error
    """The packet goes to another chain, or back."""

    def __init__(self, chain: str = "") -> None:
        self.chain = chain


@dataclass
class Packet:
    """What rules can see of a packet; `mark` is written by them."""

    source: Address
    destination: Address
    came_in: int = 2
    goes_out: int = 2
    protocol: int = 6
    port: int = 9
    mark: int = 0
    cgroups: Sequence[Address] = ()  # of its socket, from the root of the tree on; none without a full socket


@dataclass
class Kernel:
    """One layout while packets walk through its chains."""

    layout: parts.Layout
    prefilled: Sequence[Address]
    counted: Counter[tuple[CounterKey, Address]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.chains = {chain.name: chain for chain in self.layout.chains}
        self.sets = {one.name: one for one in self.layout.sets}
        self.counters = {one.name: one for one in self.layout.counters}
        self.members = {name: {*self.prefilled, SENTINEL[self.layout.family]} for name in self.sets}
        self.members |= {name: {HOST_POD, one.sentinel} for name, one in self.sets.items() if one.width == 8}
        self.contents = {
            one.name: dict(zip(one.keys, one.chains or [""] * len(one.keys), strict=True))
            for one in self.layout.contents
        }

    def hook(self, number: int, packet: Packet) -> None:
        """Send a packet through our chain at a hook."""
        for chain in self.layout.chains:
            if chain.hook is not None and chain.hook.number == number:
                self._walk(chain.name, packet)

    def _walk(self, name: str, packet: Packet) -> None:
        for rule in self.chains[name].rules:
            try:
                for part in rule:
                    self._do(part, packet)
            except _EndOfRuleError:
                continue
            except _Away as away:
                if away.chain:
                    self._walk(away.chain, packet)
                return

    def _do(self, part: parts.Part, packet: Packet) -> None:
        match part:
            case parts.Jump(chain):
                self._walk(chain, packet)
            case parts.Goto(chain):
                raise _Away(chain)
            case parts.Return():
                raise _Away
            case parts.Mark(value, mask):
                if packet.mark & mask:
                    raise _EndOfRuleError
                packet.mark |= value
            case parts.Tally(name):
                self.counted[self.counters[name].key, WHOLE] += 1
            case parts.Choose(side, content, length):
                found = self.contents[content].get(_cut(_end(packet, side), length, width_of))
                raise _Away(found) if found else _EndOfRuleError
            case parts.AddTo(side, name):
                self._add(name, _end(packet, side))
            case _:
                if not self._matches(part, packet):
                    raise _EndOfRuleError

    def _add(self, name: str, ip: Address) -> None:
        members = self.members[name]
        if ip not in members and len(members) >= self.sets[name].size:
            raise _EndOfRuleError
        members.add(ip)
        self.counted[self.sets[name].key, ip] += 1

    def _matches(self, part: parts.Part, packet: Packet) -> bool:
        match part:
            case parts.Prefix(side, network):
                return ipaddress.ip_address(_end(packet, side)) in network
            case parts.Member(side, content, length):
                return _cut(_end(packet, side), length, width_in_set) in self.contents[content]
            case parts.NotLoopback(way):
                return (packet.came_in if way == "iif" else packet.goes_out) != 1
            case parts.Protocol(number):
                return packet.protocol == number
            case parts.UdpPort(port):
                return packet.port == port
            case parts.CountAt() | parts.CountOf():
                return self._count(part, packet)
        raise AssertionError(part)

    def _count(self, part: parts.CountAt | parts.CountOf, packet: Packet) -> bool:
        if isinstance(part, parts.CountAt):
            ip = _end(packet, part.side)
        else:
            ip = packet.cgroups[part.level] if part.level < len(packet.cgroups) else b""
        found = ip in self.members[part.name]
        self.counted.update([(self.sets[part.name].key, ip)] if found else [])
        return found


def _end(packet: Packet, side: parts.Side) -> Address:
    return packet.source if side == "src" else packet.destination


def _cut(ip: Address, length: int, width: Callable[[int, int], int]) -> bytes:
    bits = 8 * len(ip)
    whole = (int.from_bytes(ip, "big") >> bits - length << bits - length).to_bytes(len(ip), "big")
    return whole[: width(length, bits)]


def policy(cidrs: dict[Network, str], default: str = "internet") -> Policy:
    """A policy from {CIDR: class}."""
    prefixes = tuple(Prefix(network, traffic, "test") for network, traffic in cidrs.items())
    return Policy(
        "test", "test", "0", tuple(map(TrafficClass, NAMES)), prefixes, default, Tunnel((4789, 8472), (4, 47))
    )


def expected_class(rules: Policy, local: Sequence[Network], own: Sequence[Address], ip: Address) -> str:
    """The class of an address by definition: own ones first, then the longest prefix, then the default."""
    address = ipaddress.ip_address(ip)
    if ip in own or address.is_loopback:
        return "node"
    candidates = [(p.network.prefixlen, 0, p.traffic) for p in rules.prefixes if address in p.network]
    candidates += [(network.prefixlen, 1, "pod") for network in local if address in network]
    return max(candidates)[2] if candidates else rules.default


def kernel_of(plan: Plan, family: Family) -> Kernel:
    """The kernel with one family of a plan installed."""
    part = next(item for item in plan.families if item.family == family)
    return Kernel(next(item for item in nft.build(plan) if item.family == family), part.prefilled)


INPUT, FORWARD, OUTPUT, POSTROUTING = 1, 2, 3, 4
TX, RX = Direction.TRANSMIT, Direction.RECEIVE
CIDRS = {
    ipaddress.ip_network(cidr): traffic
    for cidr, traffic in {
        "10.244.0.0/16": "pod", "192.168.50.0/24": "node", "10.96.0.0/12": "service", "10.0.0.0/8": "private",
        "fd00:10:244::/48": "pod", "fd00::/8": "private", "2001:db8:5::/48": "storage",
    }.items()
}  # fmt: skip
LOCAL = [ipaddress.ip_network("10.244.1.0/28"), ipaddress.ip_network("fd00:10:244:1::/64")]
OWN = [pack("10.244.1.1"), pack("192.168.50.1"), pack("fd00:50::1")]
POD, GATEWAY, NODE, FAR = pack("10.244.1.5"), pack("10.244.1.1"), pack("192.168.50.1"), pack("203.0.113.10")
PLAN = build(policy(CIDRS), LOCAL, OWN, MARKS, dynamic_capacity=2)


def test_an_outer_packet_is_tunnel_and_nothing_else() -> None:
    """Encapsulation on the host's own packets counts once, as `tunnel`: by port, by protocol, in both directions."""
    for packet in (Packet(NODE, FAR, protocol=17, port=8472), Packet(NODE, FAR, protocol=47)):
        kernel = kernel_of(PLAN, 4)
        kernel.hook(OUTPUT, packet)
        kernel.hook(INPUT, Packet(FAR, NODE, protocol=packet.protocol, port=packet.port))
        assert kernel.counted == {(CounterKey(4, Scope.HOST, direction, TUNNEL), WHOLE): 1 for direction in (TX, RX)}


def test_a_host_pods_packets_are_not_the_hosts() -> None:
    """A socket below a known cgroup counts there, once and with the class of the peer; any other is the host's."""
    plan = build(policy(CIDRS), LOCAL, OWN, MARKS, host_pods=(3, 2))
    root, other = cgroup_key(1), cgroup_key(8)
    for cgroups in ([root, root, HOST_POD], [root, root, root, HOST_POD, other]):
        kernel = kernel_of(plan, 4)
        kernel.hook(OUTPUT, Packet(NODE, FAR, cgroups=cgroups))
        kernel.hook(INPUT, Packet(POD, NODE, cgroups=cgroups))
        assert kernel.counted == {
            (CounterKey(4, Scope.HOST_POD, TX, "internet"), HOST_POD): 1,
            (CounterKey(4, Scope.HOST_POD, RX, "pod"), HOST_POD): 1,
            (CounterKey(4, Scope.POD, TX, "node"), POD): 1,
        }
    for cgroups in ([], [root], [root, HOST_POD], [root, root, other, other]):
        kernel = kernel_of(plan, 4)
        kernel.hook(OUTPUT, Packet(NODE, FAR, cgroups=cgroups))
        assert kernel.counted == {(CounterKey(4, Scope.HOST, TX, "internet"), WHOLE): 1}


def test_a_tunnel_is_no_host_pods() -> None:
    """Encapsulation stays with the host, also from a socket that a hostNetwork pod made."""
    kernel = kernel_of(build(policy(CIDRS), LOCAL, OWN, MARKS, host_pods=(2,)), 4)
    kernel.hook(OUTPUT, Packet(NODE, FAR, protocol=47, cgroups=[HOST_POD] * 3))
    assert kernel.counted == {(CounterKey(4, Scope.HOST, TX, TUNNEL), WHOLE): 1}


def test_other_datagrams_of_the_host_have_the_class_of_their_peer() -> None:
    """UDP to another port is not taken for encapsulation."""
    kernel = kernel_of(PLAN, 4)
    kernel.hook(OUTPUT, Packet(NODE, FAR, protocol=17, port=53))
    assert kernel.counted == {(CounterKey(4, Scope.HOST, TX, "internet"), WHOLE): 1}


def test_loopback_is_nobodys_traffic() -> None:
    """What stays on lo is not counted, whatever addresses it has."""
    kernel = kernel_of(PLAN, 4)
    for source, destination in ((NODE, GATEWAY), (NODE, POD), (POD, NODE), (POD, POD)):
        for hook in (OUTPUT, POSTROUTING, INPUT):
            kernel.hook(hook, Packet(source, destination, came_in=1, goes_out=1))
    assert not kernel.counted


def test_an_address_of_a_dynamic_range_counts_from_its_first_packet_on() -> None:
    """The first two new addresses get counters with their first packet; what has no room counts in the rest."""
    kernel = kernel_of(PLAN, 6)
    ips = [pack(f"fd00:10:244:1::{host}") for host in (1, 2, 3)]
    for ip in (*ips, *ips):
        kernel.hook(FORWARD, Packet(ip, pack("2001:db8:5::1")))
    storage = CounterKey(6, Scope.POD, TX, "storage")
    rest = CounterKey(6, Scope.REST, TX, "storage")
    assert kernel.counted == {(storage, ips[0]): 2, (storage, ips[1]): 2, (rest, WHOLE): 2}


def test_marks_are_values_inside_the_mask_on_unmarked_packets() -> None:
    """A packet gets its class's value where our bits are 0, and keeps its bits where they are not."""
    kernel = kernel_of(PLAN, 4)
    marked = {}
    for before in (0, 0x4000, 0x10):
        packet = Packet(POD, pack("10.1.2.3"), mark=before)
        kernel.hook(FORWARD, packet)
        marked[before] = packet.mark
    assert marked == {0: 4, 0x4000: 0x4004, 0x10: 0x10}


def test_who_has_no_counter_is_marked_and_counted_once() -> None:
    """What misses its counter where the class is found goes on to the rest of the class, with the mark it got there."""
    kernel = kernel_of(PLAN, 6)
    packets = [Packet(pack(f"fd00:10:244:1::{host}"), pack("fd00:9::1")) for host in (1, 2, 3)]
    for packet in packets:
        kernel.hook(FORWARD, packet)
    pod, rest = CounterKey(6, Scope.POD, TX, "private"), CounterKey(6, Scope.REST, TX, "private")
    assert kernel.counted == {(pod, packets[0].source): 1, (pod, packets[1].source): 1, (rest, WHOLE): 1}
    assert [packet.mark for packet in packets] == [4, 4, 4]


def test_marks_make_the_output_chain_one_that_routes() -> None:
    """Only with marks does our chain at OUTPUT make the kernel look a route up again, as mangle does."""
    kinds = []
    for marks in (MARKS, None):
        layout = nft.build(build(policy(CIDRS), LOCAL, OWN, marks))[0]
        kinds.append([chain.hook.type for chain in layout.chains if chain.hook and chain.hook.number == OUTPUT])
    assert kinds == [["route"], ["filter"]]


def test_a_node_without_pods_counts_itself_only() -> None:
    """Without local ranges there is no hook for forwarded packets."""
    layout = nft.build(build(policy(CIDRS), [], OWN, None))[0]
    assert {chain.hook.number for chain in layout.chains if chain.hook} == {INPUT, OUTPUT}


def test_joining_addresses_have_room_in_the_sets_that_are_there() -> None:
    """A single address more in the local ranges asks for no larger sets, so no counter loses its epoch."""
    more = build(policy(CIDRS), [*LOCAL, ipaddress.ip_network("10.9.9.9")], OWN, MARKS, dynamic_capacity=2)
    assert nft.build(more)[0].sets == nft.build(PLAN)[0].sets


@st.composite
def networks(draw: st.DrawFn, spare_bits: int = 128) -> Network:
    """A network of either family around a few addresses, so that they nest, touch and repeat."""
    base = ipaddress.ip_address(draw(st.sampled_from(("10.244.0.0", "198.51.100.0", "fd00::", "2001:db8:5::"))))
    number = int(base) ^ draw(st.integers(0, 3)) << draw(st.integers(0, base.max_prefixlen - 8))
    length = draw(st.integers(max(0, base.max_prefixlen - spare_bits), base.max_prefixlen))
    spare = base.max_prefixlen - length
    kind = ipaddress.IPv4Network if base.version == 4 else ipaddress.IPv6Network
    return kind((number >> spare << spare, length))


RANGES = networks(12).filter(lambda network: not local_range_fault(network))


def _edges(nets: Sequence[Network]) -> Iterator[Address]:
    """The first and last address of each network, and what lies right outside."""
    for network in nets:
        for at in (int(network.network_address), int(network.broadcast_address)):
            for number in (at - 1, at, at + 1):
                if 0 <= number < 1 << network.max_prefixlen:
                    yield number.to_bytes(network.max_prefixlen // 8, "big")


@settings(deadline=None)
@given(
    st.dictionaries(networks(), st.sampled_from(NAMES), max_size=20),
    st.lists(RANGES, max_size=6),
    st.lists(networks(), max_size=12),
    st.sampled_from(NAMES),
    st.sampled_from((0, 96)),
    st.sampled_from((range(0), range(1, 1 << 15))),
)
def test_every_address_finds_its_longest_prefix(
    cidrs: dict[Network, str], local: list[Network], own: list[Network], default: str, few: int, asked: range
) -> None:
    """Whether by comparisons or by maps, a packet of the host counts in the class of the longest prefix, and once."""
    rules, mine = policy(cidrs, default), [network.network_address.packed for network in own]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nft_many, "FEW", few)
        patched.setattr(nft_many, "_MOST_BLOCKS", 40)  # fewer entries to make, and more ways to decide
        patched.setattr(nft_many, "_ASKED_FIRST", asked)
        plan = build(rules, local, mine, None)
        kernels = {family: kernel_of(plan, family) for family in (4, 6)}
    for ip in _edges([*cidrs, *local, *own]):
        family: Family = 4 if len(ip) == 4 else 6
        part = plan.families[0 if family == 4 else 1]
        kernel = kernels[family]
        kernel.counted.clear()
        kernel.hook(INPUT, Packet(ip, bytes(len(ip))))
        host = {key.traffic: count for (key, _), count in kernel.counted.items() if key.scope is Scope.HOST}
        wanted = expected_class(rules, part.local, part.own, ip)
        assert host == {wanted: 1}, ipaddress.ip_address(ip)


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(networks(), st.sampled_from(NAMES), max_size=12),
    st.lists(RANGES, min_size=1, max_size=9),
    st.lists(networks(), max_size=4),
    st.sampled_from((0, 96)),
)
def test_a_forwarded_packet_counts_once_for_each_end_that_is_a_pod(
    cidrs: dict[Network, str], local: list[Network], own: list[Network], few: int
) -> None:
    """Whatever local ranges nest or touch, each end in one counts once, in the class of the other end; no host does."""
    rules, mine = policy(cidrs), [network.network_address.packed for network in own]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nft_many, "FEW", few)
        patched.setattr(nft_many, "_MOST_BLOCKS", 40)
        plan = build(rules, local, mine, MARKS)
        kernels = {family: kernel_of(plan, family) for family in (4, 6)}
    for ip in _edges([*cidrs, *local, *own]):
        part = plan.families[0 if len(ip) == 4 else 1]
        for pod in [network.network_address.packed for network in part.local][:2]:
            for source, destination in ((pod, ip), (ip, pod)):
                counted = kernels[part.family].counted
                counted.clear()
                for hook in (FORWARD, POSTROUTING):
                    kernels[part.family].hook(hook, Packet(source, destination))
                wanted = Counter(
                    (direction, expected_class(rules, part.local, part.own, peer))
                    for direction, owner, peer in ((TX, source, destination), (RX, destination, source))
                    if owner not in part.own and any(ipaddress.ip_address(owner) in net for net in part.local)
                )
                found = Counter({(key.direction, key.traffic): 0 for key, _ in counted})
                for (key, _), count in counted.items():
                    found[key.direction, key.traffic] += count
                assert found == wanted, (ipaddress.ip_address(source), ipaddress.ip_address(destination))
                assert all(key.scope in (Scope.POD, Scope.REST) for key, _ in counted)
