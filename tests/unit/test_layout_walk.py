"""Packets walked through a layout, rule by rule, against what the policy says of their addresses."""

from __future__ import annotations

import ipaddress
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netacct.kernel import layout as xt
from netacct.kernel.plan import Plan, build
from netacct.model import TUNNEL, WHOLE, Address, CounterKey, Direction, Family, Network, Scope, pack
from netacct.policy import MarkTable, Policy, Prefix, TrafficClass, Tunnel

NAMES = ("pod", "node", "service", "private", "internet", "storage")
MARKS = MarkTable(0x1F, {"pod": 1, "node": 2, "private": 4})


@dataclass
class Packet:
    """What the rules can see of a packet; `mark` is written by them."""

    source: Address
    destination: Address
    came_in: str = ""
    goes_out: str = ""
    protocol: int = 17
    port: int = 9
    mark: int = 0


@dataclass
class Kernel:
    """The sets of one layout while packets walk through its chains."""

    layout: xt.Layout
    prefilled: Sequence[Address]
    members: dict[str, set[Address]] = field(default_factory=dict)
    counted: Counter[tuple[CounterKey, Address]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.specs = {spec.name: spec for spec in self.layout.sets}
        self.chains = {chain.name: chain.rules for chain in (*self.layout.chains, *self.layout.hooks)}
        for spec in self.layout.sets:
            if spec.key is not None and spec.key.scope is Scope.POD:
                self.members[spec.name] = {*self.prefilled, spec.sentinel}

    def hook(self, name: str, packet: Packet) -> None:
        """Send a packet through one hook. Not one rule of ours may end its journey."""
        for rule in self.chains.get(name, ()):
            if self._matches(rule, packet):
                assert isinstance(rule.target, xt.Jump)
                self._walk(rule.target.chain, packet)

    def _walk(self, chain: str, packet: Packet) -> None:
        for rule in self.chains[chain]:
            if not self._matches(rule, packet):
                continue
            match rule.target:
                case xt.Jump(name, goto):
                    self._walk(name, packet)
                    if goto:
                        return
                case xt.Return():
                    return
                case xt.SetMark(value, mask):
                    packet.mark = (packet.mark & ~mask) ^ value
                case xt.AddToSet(name, side):
                    self._add(name, _end(packet, side))
                case None:
                    pass

    def _add(self, name: str, ip: Address) -> None:
        spec, members = self.specs[name], self.members[name]
        if ip not in members and len(members) < spec.size:
            assert spec.key is not None
            members.add(ip)
            self.counted[spec.key, ip] += 1

    def _matches(self, rule: xt.Rule, packet: Packet) -> bool:
        plain = (
            (rule.source is None or _inside(packet.source, rule.source))
            and (rule.destination is None or _inside(packet.destination, rule.destination))
            and not (rule.not_in and packet.came_in == rule.not_in)
            and not (rule.not_out and packet.goes_out == rule.not_out)
            and rule.protocol in (None, packet.protocol)
            and (not rule.udp_ports or (packet.protocol == 17 and packet.port in rule.udp_ports))
            and (rule.unmarked is None or not packet.mark & rule.unmarked)
        )
        return plain and all(self._in_set(match, packet) for match in rule.sets)

    def _in_set(self, match: xt.SetMatch, packet: Packet) -> bool:
        spec, ip = self.specs[match.name], _end(packet, match.side)
        if spec.key is None:
            found = any(_inside(ip, network) for network in spec.networks)
        else:
            found = spec.catch_all or ip in self.members[spec.name]
            if found and match.update_counters:
                self.counted[spec.key, WHOLE if spec.catch_all else ip] += 1
        return found != match.negate


def _end(packet: Packet, side: xt.Side) -> Address:
    return packet.source if side == "src" else packet.destination


def _inside(ip: Address, network: Network) -> bool:
    return len(ip) * 8 == network.max_prefixlen and ipaddress.ip_address(ip) in network


def nets(*texts: str) -> list[Network]:
    """CIDRs from text."""
    return [ipaddress.ip_network(text) for text in texts]


def policy(cidrs: dict[str, str], default: str = "internet", tunnel: Tunnel | None = None) -> Policy:
    """A policy from {cidr: class}."""
    prefixes = tuple(Prefix(ipaddress.ip_network(cidr), traffic, "test") for cidr, traffic in cidrs.items())
    classes = tuple(TrafficClass(name) for name in NAMES)
    return Policy("test", "test", "0", classes, prefixes, default, tunnel or Tunnel())


def expected_class(rules: Policy, local: Sequence[Network], own: Sequence[Address], ip: Address) -> str:
    """The class of an address by definition: own ones first, then the longest prefix, then the default."""
    if ip in own or ipaddress.ip_address(ip).is_loopback:
        return "node"
    candidates = [(p.network.prefixlen, 0, p.traffic) for p in rules.prefixes if _inside(ip, p.network)]
    candidates += [(network.prefixlen, 1, "pod") for network in local if _inside(ip, network)]
    return max(candidates)[2] if candidates else rules.default


def kernel_of(plan: Plan, family: Family) -> Kernel:
    """The kernel with one family of a plan installed."""
    part = next(item for item in plan.families if item.family == family)
    return Kernel(next(item for item in xt.build(plan) if item.family == family), part.prefilled)


CIDRS = {
    "10.244.0.0/16": "pod", "192.168.50.0/24": "node", "10.96.0.0/12": "service", "10.0.0.0/8": "private",
    "fd00:10:244::/48": "pod", "fd00::/8": "private", "2001:db8:5::/48": "storage",
}  # fmt: skip
LOCAL = ("10.244.1.0/28", "fd00:10:244:1::/64")
OWN = (pack("10.244.1.1"), pack("192.168.50.1"), pack("fd00:50::1"))
PLAN = build(policy(CIDRS), nets(*LOCAL), OWN, MARKS, dynamic_capacity=2)
POD, GATEWAY, NODE, FAR = pack("10.244.1.5"), pack("10.244.1.1"), pack("192.168.50.1"), pack("203.0.113.10")


def key(family: Family, scope: Scope, direction: Direction, traffic: str) -> CounterKey:
    """Short for a CounterKey."""
    return CounterKey(family, scope, direction, traffic)


RX, TX = Direction.RECEIVE, Direction.TRANSMIT


def test_a_pod_that_sends_to_the_internet_is_counted_once() -> None:
    """A forwarded packet of a pod counts at its address, in the class of the destination, and nowhere else."""
    kernel, packet = kernel_of(PLAN, 4), Packet(POD, FAR, "veth", "up0")
    kernel.hook("FORWARD", packet)
    kernel.hook("POSTROUTING", packet)
    assert kernel.counted == {(key(4, Scope.POD, TX, "internet"), POD): 1}


def test_a_packet_between_local_pods_is_one_transmit_and_one_receive() -> None:
    """Each end of a packet between two local pods is booked once."""
    kernel, packet = kernel_of(PLAN, 4), Packet(POD, pack("10.244.1.6"), "veth", "veth2")
    kernel.hook("FORWARD", packet)
    kernel.hook("POSTROUTING", packet)
    assert kernel.counted == {
        (key(4, Scope.POD, TX, "pod"), POD): 1,
        (key(4, Scope.POD, RX, "pod"), pack("10.244.1.6")): 1,
    }


def test_a_pod_that_talks_to_the_node_counts_at_both_ends() -> None:
    """INPUT books a pod's packet as pod transmit to `node`, and as host receive from `pod`."""
    kernel = kernel_of(PLAN, 4)
    kernel.hook("INPUT", Packet(POD, NODE, "veth"))
    assert kernel.counted == {
        (key(4, Scope.POD, TX, "node"), POD): 1,
        (key(4, Scope.HOST, RX, "pod"), WHOLE): 1,
    }


def test_loopback_is_not_counted() -> None:
    """What stays on the loopback interface is nobody's traffic, also between pods' addresses (a local proxy)."""
    kernel = kernel_of(PLAN, 4)
    for source, destination in ((pack("127.0.0.1"),) * 2, (NODE, GATEWAY), (NODE, POD), (POD, NODE), (POD, POD)):
        packet = Packet(source, destination, "lo", "lo")
        for hook in ("OUTPUT", "POSTROUTING", "INPUT"):
            kernel.hook(hook, packet)
    assert not kernel.counted


def test_the_gateway_inside_the_local_range_is_the_host() -> None:
    """A node address inside a local range sends as the host and receives as the host, never as a pod."""
    kernel = kernel_of(PLAN, 4)
    sent = Packet(GATEWAY, POD, goes_out="veth")
    kernel.hook("OUTPUT", sent)
    kernel.hook("POSTROUTING", sent)
    kernel.hook("INPUT", Packet(POD, GATEWAY, "veth"))
    assert kernel.counted == {
        (key(4, Scope.HOST, TX, "pod"), WHOLE): 1,
        (key(4, Scope.POD, RX, "node"), POD): 1,
        (key(4, Scope.POD, TX, "node"), POD): 1,
        (key(4, Scope.HOST, RX, "pod"), WHOLE): 1,
    }


def test_an_own_address_that_is_forwarded_is_still_no_pod() -> None:
    """Even a packet that should not exist, forwarded with the node's own address, is not booked to a pod or to rest."""
    kernel = kernel_of(PLAN, 4)
    kernel.hook("FORWARD", Packet(GATEWAY, FAR, "veth", "up0"))
    kernel.hook("POSTROUTING", Packet(FAR, GATEWAY, "up0", "veth"))
    assert not kernel.counted


def test_the_host_does_not_transmit_what_carries_a_pods_address() -> None:
    """A packet that the node makes in a pod's name (a TCP reset by a firewall rule) is not the host's."""
    kernel = kernel_of(PLAN, 4)
    kernel.hook("OUTPUT", Packet(POD, FAR, goes_out="up0"))
    assert not kernel.counted


def test_encapsulation_is_tunnel_at_the_host_only() -> None:
    """VXLAN ports and IP protocols of the policy's tunnel are the host's `tunnel`, whatever the addresses."""
    kernel = kernel_of(PLAN, 4)
    kernel.hook("OUTPUT", Packet(NODE, pack("192.168.50.2"), goes_out="up0", port=8472))
    kernel.hook("INPUT", Packet(pack("192.168.50.2"), NODE, "up0", protocol=50))
    assert kernel.counted == {
        (key(4, Scope.HOST, TX, TUNNEL), WHOLE): 1,
        (key(4, Scope.HOST, RX, TUNNEL), WHOLE): 1,
    }


def test_more_ports_than_one_multiport_match_takes_are_all_tunnel() -> None:
    """A policy with forty tunnel ports is laid out in rules of fifteen, and each port is tunnel."""
    plan = build(policy({}, tunnel=Tunnel(udp=tuple(range(7000, 7040)))), [], OWN, None)
    kernel = kernel_of(plan, 4)
    for port in range(7000, 7040):
        kernel.hook("OUTPUT", Packet(NODE, FAR, goes_out="up0", port=port))
    assert kernel.counted == {(key(4, Scope.HOST, TX, TUNNEL), WHOLE): 40}
    assert all(len(rule.udp_ports) <= 15 for chain in kernel.layout.chains for rule in chain.rules)


def test_a_new_address_of_a_dynamic_range_is_exact_from_its_first_packet() -> None:
    """The packet that makes an element is counted once, in the element, and so is every one after it."""
    kernel, pod = kernel_of(PLAN, 6), pack("fd00:10:244:1::5")
    for _ in range(3):
        kernel.hook("FORWARD", Packet(pod, pack("2001:db8::1"), "veth", "up0"))
    assert kernel.counted == {(key(6, Scope.POD, TX, "internet"), pod): 3}


def test_addresses_that_find_no_room_are_counted_as_rest() -> None:
    """With a full set, the packets of further addresses land in the rest counter of their class."""
    kernel = kernel_of(PLAN, 6)
    for number in range(5, 10):
        kernel.hook("FORWARD", Packet(pack(f"fd00:10:244:1::{number}"), pack("2001:db8::1"), "veth", "up0"))
    assert kernel.counted[key(6, Scope.REST, TX, "internet"), WHOLE] == 3


def test_without_a_local_range_no_pod_is_looked_for() -> None:
    """A node without local ranges has the host's counters only, and no hook in FORWARD or POSTROUTING."""
    (layout,) = xt.build(build(policy(CIDRS), [], OWN, None, families=(4,)))
    assert {hook.name for hook in layout.hooks} == {"INPUT", "OUTPUT"}
    assert {spec.key.scope for spec in layout.sets if spec.key} == {Scope.HOST}


def test_marks_touch_no_foreign_bit_and_no_marked_packet() -> None:
    """A class sets its value where our bits are 0; other bits stay, and bits of ours that are set stay."""
    kernel = kernel_of(PLAN, 4)
    fresh, taken = Packet(POD, FAR, mark=0x4000), Packet(POD, NODE, "veth", mark=0x4004)
    kernel.hook("FORWARD", fresh)
    kernel.hook("INPUT", taken)
    assert (fresh.mark, taken.mark) == (0x4000, 0x4004)
    cluster = Packet(POD, pack("10.244.7.7"), mark=0x4000)
    kernel.hook("FORWARD", cluster)
    assert cluster.mark == 0x4001


def test_marks_change_no_set_and_no_counting_rule() -> None:
    """With and without marks a layout differs in mark rules only, so that switching them resets nothing."""
    bare = xt.build(replace(PLAN, marks=None))
    for marked, plain in zip(xt.build(PLAN), bare, strict=True):
        assert (marked.sets, marked.hooks) == (plain.sets, plain.hooks)
        stripped = [
            xt.Chain(chain.name, tuple(rule for rule in chain.rules if not isinstance(rule.target, xt.SetMark)))
            for chain in marked.chains
        ]
        assert stripped == list(plain.chains)


def test_names_fit_the_kernel_with_the_longest_class_name() -> None:
    """Chains have at most 28 characters, sets 31 with a catch-all's epoch, for a class name of fifteen."""
    long = "abcdefghijklmno"
    rules = replace(policy({}), classes=(TrafficClass(long), *(TrafficClass(name) for name in NAMES)))
    cidrs = tuple(
        Prefix(network, long, "test") for network in ipaddress.ip_network("100.64.0.0/10").subnets(new_prefix=17)
    )
    rules = replace(rules, prefixes=cidrs[::2], default=long)
    for layout in xt.build(build(rules, nets(*LOCAL), OWN, None)):
        assert all(len(chain.name) <= 28 for chain in layout.chains)
        assert all(len(spec.name) + 7 * spec.catch_all <= 31 for spec in layout.sets)
        assert len({spec.name for spec in layout.sets}) == len(layout.sets)


def _draw_address(rng: random.Random, rules: Policy, extra: Sequence[Network], family: Family) -> Address:
    """An address that is likely at or beside the edge of some prefix."""
    size = 32 if family == 4 else 128
    networks = [p.network for p in rules.prefixes if p.network.version == family] + list(extra)
    if not networks or rng.random() < 0.2:
        number = rng.getrandbits(size)
    else:
        network = rng.choice(networks)
        first, last = int(network.network_address), int(network.broadcast_address)
        number = rng.choice([first, last, first - 1, last + 1, rng.randint(first, last)]) % (1 << size)
    return number.to_bytes(size // 8, "big")


def _draw_network(rng: random.Random, family: Family) -> Network:
    size, least = (32, 4) if family == 4 else (128, 8)
    length = rng.randint(least, size if rng.random() < 0.3 else size // 2)
    # A few high bits only, so that prefixes nest.
    top = rng.choice([0x0A, 0xC0, 0xFD, rng.getrandbits(8)]) << (size - 8)
    number = (top | rng.getrandbits(size - 8)) >> (size - length) << (size - length)
    return ipaddress.ip_network((number.to_bytes(size // 8, "big"), length))


@settings(deadline=None)  # two cores, many tenants
@given(seed=st.integers(0, 2**32), prefixes=st.sampled_from([0, 3, 20, 200]), family=st.sampled_from([4, 6]))
def test_any_layout_gives_the_class_of_the_longest_prefix(seed: int, prefixes: int, family: Family) -> None:
    """Rules, sets, covers and layers together give each packet the class that the policy's definition gives."""
    rng = random.Random(seed)
    cidrs = {str(_draw_network(rng, family)): rng.choice(NAMES) for _ in range(prefixes)}
    rules = policy(cidrs, default=rng.choice(NAMES))
    pods = ipaddress.ip_network("10.9.0.0/16" if family == 4 else "fd00:9::/112")
    ranges: Iterable[Network] = pods.subnets(new_prefix=pods.max_prefixlen - 4)
    local = list(ranges)[: rng.choice([1, 3, 12]) * 2 : 2]
    own = [_draw_address(rng, rules, local, family) for _ in range(rng.choice([1, 3, 12]))]
    own += [pack("203.0.113.1" if family == 4 else "2001:db8::9")]
    plan = build(rules, local, own, None, families=(family,))
    own = list(plan.families[0].own)  # without loopback and link-local ones
    kernel = kernel_of(plan, family)
    pod = plan.families[0].prefilled[0]
    for _ in range(30):
        peer = _draw_address(rng, rules, local, family)
        traffic = expected_class(rules, local, own, peer)
        kernel.counted.clear()
        kernel.hook("FORWARD", Packet(pod, peer, "veth", "up0"))
        kernel.hook("POSTROUTING", Packet(peer, pod, "up0", "veth"))
        assert kernel.counted == {
            (key(family, Scope.POD, TX, traffic), pod): 1,
            (key(family, Scope.POD, RX, traffic), pod): 1,
        }
        kernel.hook("OUTPUT", Packet(own[0], peer, goes_out="up0"))
        kernel.hook("INPUT", Packet(peer, own[0], "up0"))
        assert kernel.counted[key(family, Scope.HOST, TX, traffic), WHOLE] == 1
        assert kernel.counted[key(family, Scope.HOST, RX, traffic), WHOLE] == 1


def test_many_cidrs_cost_one_lookup_and_few_rules() -> None:
    """A class of 2,000 CIDRs is one set with few prefix lengths; the chain that picks the class stays short."""
    rng = random.Random(7)
    cidrs = {
        str(
            ipaddress.ip_network((rng.randrange(1 << 25, 1 << 31) >> 9 << 9, rng.randint(14, 23)), strict=False)
        ): "storage"
        for _ in range(2000)
    }
    (layout,) = xt.build(build(policy(cidrs | CIDRS), nets(LOCAL[0]), OWN, None, families=(4,)))
    large = [spec for spec in layout.sets if spec.key is None]
    assert large
    assert all(len({network.prefixlen for network in spec.networks}) <= 5 for spec in large)
    assert all(len(chain.rules) < 10 for chain in layout.chains)


def test_cidrs_all_over_the_address_space_are_behind_a_bitmap_of_their_blocks() -> None:
    """Where no prefixes cover a class, IPv4 packets pass a bitmap of /16s first, and each still gets its class."""
    rng = random.Random(8)
    cidrs = [ipaddress.IPv4Network((rng.getrandbits(32), rng.randint(14, 32)), strict=False) for _ in range(400)]
    rules = policy({**dict.fromkeys(map(str, cidrs), "storage"), **CIDRS})
    kernel = kernel_of(build(rules, nets(LOCAL[0]), OWN, None, families=(4,)), 4)
    large = [spec for spec in kernel.layout.sets if spec.key is None]
    assert [(spec.type, spec.netmask) for spec in large] == [("bitmap:ip", 16), ("hash:net", 0)]
    for _ in range(300):
        peer = _draw_address(rng, rules, nets(LOCAL[0]), 4)
        kernel.counted.clear()
        kernel.hook("FORWARD", Packet(POD, peer, "veth", "up0"))
        assert kernel.counted == {
            (key(4, Scope.POD, TX, expected_class(rules, nets(LOCAL[0]), OWN, peer)), POD): 1,
        }


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        (["10.244.1.0/24"], ("10.244.1.0", "10.244.2.0")),
        (["10.244.1.0/26", "10.244.1.192/28"], ("10.244.1.0", "10.244.2.0")),
        (["10.244.0.0/20"], ("10.244.0.0", "10.244.16.0")),
        (["192.0.2.7/32"], ("192.0.2.7", "192.0.2.8")),
        (["10.244.15.0/24", "10.244.16.0/24"], None),
        (["10.244.0.0/19"], None),
        (["10.244.1.0/24", "10.245.0.0/16"], None),
        (["255.255.255.254/32"], ("255.255.255.254", "255.255.255.255")),
    ],
)
def test_near_ranges_are_counted_by_bitmaps(local: list[str], expected: tuple[str, str] | None) -> None:
    """IPv4 ranges within 4,096 addresses share bitmaps that end at a sentinel past them; others take hashes."""
    layouts = xt.build(build(policy(CIDRS), nets(*local, LOCAL[1]), OWN, None))
    pods = [spec for one in layouts for spec in one.sets if spec.key is not None and spec.key.scope is Scope.POD]
    ends = expected and (pack(expected[0]), pack(expected[1]))
    assert {(spec.type, spec.range, spec.sentinel) for spec in pods if spec.family == 4} == {
        ("bitmap:ip", ends, ends[1]) if ends else ("hash:ip", None, b"\xff" * 4)
    }
    assert {(spec.type, spec.sentinel) for spec in pods if spec.family == 6} == {("hash:ip", b"\xff" * 16)}


def test_a_sentinel_at_the_very_end_leaves_no_room_for_a_bitmap() -> None:
    """A range that ends with the last address of all has none past it, and is counted by hashes."""
    layout = xt.build(build(policy(CIDRS), nets("255.255.255.240/29", "255.255.255.248/30"), OWN, None))[0]
    assert {spec.type for spec in layout.sets if spec.key and spec.key.scope is Scope.POD} == {"hash:ip"}


def _evaluated(kernel: Kernel, chain: str, packet: Packet) -> int:
    """How many rules a packet meets until its class is found."""
    for met, rule in enumerate(kernel.chains[chain], start=1):
        if kernel._matches(rule, packet):
            if isinstance(rule.target, xt.Return):  # counted already, in the default class
                return met
            assert isinstance(rule.target, xt.Jump)
            known = rule.target.chain.removeprefix("NETACCT-TX-") in NAMES
            return met if known else met + _evaluated(kernel, rule.target.chain, packet)
    raise AssertionError(f"{chain} does not decide")


def test_a_packet_meets_few_rules() -> None:
    """With a whole policy of private ranges, node and service CIDRs, a packet meets nine rules at most."""
    private = ("0.0.0.0/32", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "224.0.0.0/4")
    cidrs = CIDRS | dict.fromkeys((*private, "255.255.255.255/32"), "private")
    kernel = kernel_of(build(policy(cidrs), nets(LOCAL[0]), OWN, None), 4)
    rng = random.Random(3)
    peers = [rng.getrandbits(32).to_bytes(4, "big") for _ in range(200)] + [FAR, NODE, GATEWAY, pack("10.96.0.1")]
    assert max(_evaluated(kernel, "NETACCT-TX", Packet(POD, peer)) for peer in peers) <= 9
    assert _evaluated(kernel, "NETACCT-TX", Packet(POD, FAR)) <= 6


def test_an_own_address_inside_a_node_cidr_needs_no_rule() -> None:
    """What the CIDRs call `node` anyway is not said twice, so that an address that comes or goes changes no rule."""
    assert xt.build(PLAN)[0].chains == xt.build(_with_own(PLAN, pack("192.168.50.7")))[0].chains


def _with_own(plan: Plan, extra: Address) -> Plan:
    """The plan with one more own address in its first family."""
    first, *others = plan.families
    return replace(plan, families=(replace(first, own=tuple(sorted((*first.own, extra)))), *others))
