"""A plan laid out for xtables and ipset: which sets, chains and rules, as values. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from netacct.kernel import classify
from netacct.kernel.plan import PREFILL_LIMIT, FamilyPlan, Plan
from netacct.model import TUNNEL, Address, CounterKey, Direction, Family, Network, Scope

CHAIN_PREFIX = "NETACCT-"
"""Every chain of ours starts with this, and no chain of anybody else."""

SET_PREFIX = "nacc"
"""Every ipset of ours starts with this; the family (4 or 6) follows."""

SENTINEL: dict[Family, Address] = {4: b"\xff" * 4, 6: b"\xff" * 16}
"""The element of a `hash:ip` counter set that carries its epoch: packets 1, bytes the number. No pod can have it."""

EVERYWHERE: tuple[Address, Address] = (b"\0" * 4, b"\xff" * 4)
"""The range of a bitmap whose netmask makes all IPv4 addresses few enough."""

HALVES: dict[Family, tuple[str, str]] = {4: ("0.0.0.0/1", "128.0.0.0/1"), 6: ("::/1", "8000::/1")}
"""The elements of a catch-all set: no type that counts has a /0, so each half has a counter."""

MULTIPORT_LIMIT = 15
"""So many ports fit into one multiport match (XT_MULTI_PORTS in linux/netfilter/xt_multiport.h)."""

_LEAST_HASHSIZE = 64

Side: TypeAlias = Literal["src", "dst"]
SetType: TypeAlias = Literal["hash:ip", "hash:net", "bitmap:ip"]


@dataclass(frozen=True, slots=True)
class SetSpec:
    """One ipset.

    key:        the counters it holds; None where it only classifies.
    catch_all:  one counter for every address (a rest or host counter). The kernel name is `name` + "-" + six
                characters of [0-9a-z] that are its epoch, because it has no room for a sentinel.
    networks:   the whole content of a classifying set.
    size:       elements it must hold without ever growing (the sentinel included).
    range:      the first and last address of a bitmap; None for a hash.
    netmask:    a bitmap has one element for each network of this length; 0: for each address.
    """

    name: str
    type: SetType
    family: Family
    key: CounterKey | None = None
    catch_all: bool = False
    networks: tuple[Network, ...] = ()
    size: int = 0
    range: tuple[Address, Address] | None = None
    netmask: int = 0

    @property
    def sentinel(self) -> Address:
        """The element of a pod counter set that carries its epoch: no packet of a pod of this plan looks it up."""
        return SENTINEL[self.family] if self.range is None else self.range[1]


@dataclass(frozen=True, slots=True)
class SetMatch:
    """`-m set [!] --match-set NAME SIDE [! --update-counters]`. `name` is a SetSpec's name."""

    name: str
    side: Side
    negate: bool = False
    update_counters: bool = True


@dataclass(frozen=True, slots=True)
class Jump:
    """`-j CHAIN`, or `-g CHAIN`."""

    chain: str
    goto: bool = False


@dataclass(frozen=True, slots=True)
class Return:
    """`-j RETURN`."""


@dataclass(frozen=True, slots=True)
class SetMark:
    """`-j MARK --set-xmark VALUE/MASK`."""

    value: int
    mask: int


@dataclass(frozen=True, slots=True)
class AddToSet:
    """`-j SET --add-set NAME SIDE`, without --exist: an element that is there keeps its counters."""

    name: str
    side: Side


Target: TypeAlias = Jump | Return | SetMark | AddToSet | None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; a field left at its default does not match on anything.

    not_in / not_out: `! -i NAME` / `! -o NAME`. udp_ports: `-p udp -m multiport --dports`.
    unmarked: `-m mark --mark 0/MASK`.
    """

    target: Target = None
    source: Network | None = None
    destination: Network | None = None
    not_in: str = ""
    not_out: str = ""
    protocol: int | None = None
    udp_ports: tuple[int, ...] = ()
    unmarked: int | None = None
    sets: tuple[SetMatch, ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of ours with all of its rules, or a built-in chain (a hook) with those rules of ours at its head."""

    name: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything of one family, in an order in which it can be made: sets, then chains, then hooks."""

    family: Family
    sets: tuple[SetSpec, ...]
    chains: tuple[Chain, ...]
    hooks: tuple[Chain, ...]


@dataclass(frozen=True, slots=True)
class _Leg:
    """One way that a packet can be counted: what is looked at, and how its chains and sets are named.

    chain:    where the class is chosen.
    peer:     the end of the packet that has the class.
    owner:    the end of the packet that is counted, for pods.
    counters, catch_all: the infixes of the set names.
    """

    scope: Scope
    direction: Direction
    chain: str
    peer: Side
    owner: Side
    counters: str
    catch_all: str

    def class_chain(self, traffic: str) -> str:
        return f"{CHAIN_PREFIX}{self.counters.upper()}-{traffic}"


_TX = _Leg(Scope.POD, Direction.TRANSMIT, CHAIN_PREFIX + "TX", "dst", "src", "tx", "to")
_RX = _Leg(Scope.POD, Direction.RECEIVE, CHAIN_PREFIX + "RX", "src", "dst", "rx", "ro")
_HI = _Leg(Scope.HOST, Direction.RECEIVE, CHAIN_PREFIX + "HI", "src", "dst", "hi", "hi")
_HO = _Leg(Scope.HOST, Direction.TRANSMIT, CHAIN_PREFIX + "HOC", "dst", "src", "ho", "ho")

_HO_GUARD = CHAIN_PREFIX + "HO"
"""Where host transmit begins: packets that merely carry a pod's address leave here, uncounted."""


def build(plan: Plan) -> tuple[Layout, ...]:
    """The layout of each family of the plan, in the plan's order. Equal plans give equal layouts."""
    return tuple(_Family(plan, family).layout() for family in plan.families)


def hash_size(spec: SetSpec) -> int:
    """The `hashsize` with which a hash set never grows: buckets for all elements, a power of two.

    A set resizes when one bucket is full (12 elements, linux/net/netfilter/ipset/ip_set_hash_gen.h). With a bucket for
    each element that happens once in 10^10 buckets.
    """
    return max(_LEAST_HASHSIZE, 1 << max(spec.size - 1, 0).bit_length())


class _Family:
    """Builds one family's layout; holds what all of its parts need."""

    def __init__(self, plan: Plan, family: FamilyPlan) -> None:
        self.plan, self.family = plan, family
        self.legs = (_TX, _RX, _HI, _HO) if family.local else (_HI, _HO)
        self.class_sets, self.steps = classify.class_steps(family)
        self.local_sets, self.local = classify.local_probes(family)
        inside = [ip for ip in family.own if any(ipaddress.ip_address(ip) in net for net in family.local)]
        self.own_inside = classify.own_probes(inside)
        self.pod_range = _bitmap_range(family)

    def layout(self) -> Layout:
        sets = [self._membership(members) for members in (*self.local_sets, *self.class_sets)]
        chains: list[Chain] = []
        for leg in self.legs:
            for traffic in self._classes(leg):
                sets += self._counter_sets(leg, traffic)
                chains.append(self._class_chain(leg, traffic))
            chains += self._decision(leg)
        chains.append(self._host_guard())
        return Layout(self.family.family, tuple(sets), tuple(chains), self._hooks())

    def _classes(self, leg: _Leg) -> tuple[str, ...]:
        return (*self.plan.classes, TUNNEL) if leg.scope is Scope.HOST else self.plan.classes

    def _name(self, suffix: str) -> str:
        return f"{SET_PREFIX}{self.family.family}-{suffix}"

    def _membership(self, members: classify.Members) -> SetSpec:
        name, version, networks = self._name(members.name), self.family.family, members.networks
        if not members.netmask:
            return SetSpec(name, "hash:net", version, networks=networks, size=len(networks))
        return SetSpec(name, "bitmap:ip", version, networks=networks, range=EVERYWHERE, netmask=members.netmask)

    def _counter_sets(self, leg: _Leg, traffic: str) -> list[SetSpec]:
        version = self.family.family
        scope = Scope.REST if leg.scope is Scope.POD else leg.scope
        whole = SetSpec(
            self._name(f"{leg.catch_all}-{traffic}"),
            "bitmap:ip" if version == 4 else "hash:net",
            version,
            CounterKey(version, scope, leg.direction, traffic),
            catch_all=True,
            size=len(HALVES[version]),
            range=EVERYWHERE if version == 4 else None,
            netmask=1 if version == 4 else 0,
        )
        if leg.scope is Scope.HOST:
            return [whole]
        room = self.plan.dynamic_capacity if self.family.dynamic else 0
        key = CounterKey(version, Scope.POD, leg.direction, traffic)
        size = len(self.family.prefilled) + 1 + room
        kind: SetType = "hash:ip" if self.pod_range is None else "bitmap:ip"
        pods = SetSpec(self._name(f"{leg.counters}-{traffic}"), kind, version, key, size=size, range=self.pod_range)
        return [pods, whole]

    def _class_chain(self, leg: _Leg, traffic: str) -> Chain:
        rules = self._mark_rules(traffic)
        if leg.scope is Scope.POD:
            rules += [self._count(leg, traffic), *self._pod_rules(leg, traffic)]
        whole = self._name(f"{leg.catch_all}-{traffic}")
        rules.append(Rule(sets=(SetMatch(whole, leg.owner),)))
        return Chain(leg.class_chain(traffic), tuple(rules))

    def _mark_rules(self, traffic: str) -> list[Rule]:
        marks = self.plan.marks
        value = marks.values.get(traffic) if marks else None
        if marks is None or not value:
            return []
        return [Rule(SetMark(value, marks.mask), unmarked=marks.mask)]

    def _count(self, leg: _Leg, traffic: str) -> Rule:
        """Count at the pod's address, if it has counters."""
        return Rule(Return(), sets=(SetMatch(self._name(f"{leg.counters}-{traffic}"), leg.owner),))

    def _pod_rules(self, leg: _Leg, traffic: str) -> list[Rule]:
        """Where no counter was met: let pass what is the node's own; else make room for a new address.

        The packet for which SET makes an element is in that element's counters already, so the match after it must not
        count; and SET must not have --exist, which would begin a counter anew at every packet.
        """
        name = self._name(f"{leg.counters}-{traffic}")
        rules = [_on(leg.owner, probe, self._name, Return()) for probe in self.own_inside]
        if self.family.dynamic:
            rules.append(Rule(AddToSet(name, leg.owner)))
            rules.append(Rule(Return(), sets=(SetMatch(name, leg.owner, update_counters=False),)))
        return rules

    def _tunnel_rules(self, leg: _Leg) -> list[Rule]:
        if leg.scope is not Scope.HOST:
            return []
        target, tunnel = Jump(leg.class_chain(TUNNEL), goto=True), self.plan.tunnel
        chunks = [tunnel.udp[at : at + MULTIPORT_LIMIT] for at in range(0, len(tunnel.udp), MULTIPORT_LIMIT)]
        return [Rule(target, udp_ports=ports) for ports in chunks] + [
            Rule(target, protocol=number) for number in tunnel.protocols
        ]

    def _decision(self, leg: _Leg) -> list[Chain]:
        """The chain that chooses the class, after those for parts of the address space, each before it is gone to."""
        chains: list[Chain] = []

        def rules(nodes: Iterable[classify.Node]) -> list[Rule]:
            return [one for node in nodes for one in (*self._shortcut(leg, node), rule(node))]

        def rule(node: classify.Node) -> Rule:
            if isinstance(node, classify.Step):
                return _on(leg.peer, node.probe, self._name, Jump(leg.class_chain(node.traffic), goto=True))
            inside = tuple(rules(node.nodes))
            chains.append(Chain(f"{leg.chain}{len(chains) + 1}", inside))
            return _on(leg.peer, classify.Probe(node.network), self._name, Jump(chains[-1].name, goto=True))

        everything = ipaddress.ip_network("0.0.0.0/0" if self.family.family == 4 else "::/0")
        nodes = classify.tree(self.steps, self.plan.default, everything)
        head = Chain(leg.chain, (*self._tunnel_rules(leg), *rules(nodes)))
        return [*chains, head]

    def _shortcut(self, leg: _Leg, node: classify.Node) -> list[Rule]:
        """What the default class's chain begins with, ahead of going there: most packets to the internet end here."""
        if leg.scope is not Scope.POD or node != classify.Step(self.plan.default, classify.ANY):
            return []
        return [*self._mark_rules(self.plan.default), self._count(leg, self.plan.default)]

    def _host_guard(self) -> Chain:
        classes = Jump(_HO.chain, goto=True)
        rules = [_on("src", probe, self._name, classes) for probe in self.own_inside]
        rules += [_on("src", probe, self._name, Return()) for probe in self.local]
        return Chain(_HO_GUARD, (*rules, Rule(classes)))

    def _hooks(self) -> tuple[Chain, ...]:
        sent = [_on("src", probe, self._name, Jump(_TX.chain), not_in="lo") for probe in self.local]
        hooks = [
            Chain("INPUT", (*sent, Rule(Jump(_HI.chain), not_in="lo"))),
            Chain("OUTPUT", (Rule(Jump(_HO_GUARD), not_out="lo"),)),
        ]
        if self.local:
            forwarded = tuple(_on("src", probe, self._name, Jump(_TX.chain)) for probe in self.local)
            received = tuple(_on("dst", probe, self._name, Jump(_RX.chain), not_out="lo") for probe in self.local)
            hooks += [Chain("FORWARD", forwarded), Chain("POSTROUTING", received)]
        return tuple(hooks)


def _on(
    side: Side,
    probe: classify.Probe,
    name: Callable[[str], str],
    target: Target,
    *,
    not_in: str = "",
    not_out: str = "",
) -> Rule:
    """The rule that sends what passes the probe at this end of the packet to the target."""
    return Rule(
        target,
        source=probe.network if side == "src" else None,
        destination=probe.network if side == "dst" else None,
        not_in=not_in,
        not_out=not_out,
        sets=tuple(SetMatch(name(members), side) for members in (probe.blocks, probe.members) if members),
    )


def _bitmap_range(family: FamilyPlan) -> tuple[Address, Address] | None:
    """The range of bitmaps that count the local addresses; None where these need hashes.

    A bitmap's lookup is an index, a hash's 20 ns more. Its range is a CIDR, so that a range which joins rarely asks for
    new sets, and ends one address later, at the sentinel.
    """
    if family.family != 4 or family.dynamic or not family.local:
        return None
    around = classify.common_prefix(family.local)
    first, end = int(around.network_address), int(around.broadcast_address) + 1
    if around.num_addresses > PREFILL_LIMIT or end >= 1 << 32:
        return None
    return first.to_bytes(4, "big"), end.to_bytes(4, "big")
