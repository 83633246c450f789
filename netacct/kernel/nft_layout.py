"""A plan laid out for nf_tables: which sets, counters, chains and rules, as values. Pure.

What is counted where is the same as in `layout.py`, which has it for xtables; names differ, and what costs a packet
time differs: a comparison of prefixes is cheap here, a lookup in a hash is cheap too, an interval lookup is not. Few
CIDRs become a tree of comparisons (`nft_tree.py`), many become maps that lead on (`nft_many.py`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from netacct.kernel import classify, nft_many, nft_tree
from netacct.kernel.nft_many import Content
from netacct.kernel.nft_messages import Hook
from netacct.kernel.nft_parts import (
    HOOK_NAMES,
    AddTo,
    Chain,
    Choose,
    CountAt,
    Counter,
    CounterSet,
    CountOf,
    Goto,
    Jump,
    Layout,
    Mark,
    Member,
    NotLoopback,
    Prefix,
    Protocol,
    Return,
    Rule,
    Side,
    Tally,
    UdpPort,
)
from netacct.kernel.plan import HOST_POD_LIMIT, FamilyPlan, Plan
from netacct.model import TUNNEL, CounterKey, Direction, Network, Scope

PRIORITY = -151
"""Of our hooks: just before mangle, so after DNAT and before SNAT."""

_HOOKS = {name: number for number, name in HOOK_NAMES.items()}
_UDP = 17
_SLACK = 64
"""Sets have room for some more addresses: one that joins the local ranges shall not cost every counter its epoch."""


@dataclass(frozen=True, slots=True)
class _Leg:
    """One way that a packet can be counted (see `layout.py`)."""

    name: str
    whole: str
    scope: Scope
    direction: Direction
    peer: Side
    owner: Side

    @property
    def host_pods(self) -> str:
        """What the names of sets for hostNetwork pods begin with."""
        return {"hi": "pi", "ho": "po"}[self.name]


_TX = _Leg("tx", "to", Scope.POD, Direction.TRANSMIT, "dst", "src")
_RX = _Leg("rx", "ro", Scope.POD, Direction.RECEIVE, "src", "dst")
_HI = _Leg("hi", "hi", Scope.HOST, Direction.RECEIVE, "src", "dst")
_HO = _Leg("ho", "ho", Scope.HOST, Direction.TRANSMIT, "dst", "src")

_GUARD = "ho.guard"


def build(plan: Plan) -> tuple[Layout, ...]:
    """The layout of each family of the plan, in the plan's order. Equal plans give equal layouts."""
    return tuple(_Family(plan, family).layout() for family in plan.families)


class _Family:
    """Builds one family's layout; holds what all of its parts need."""

    def __init__(self, plan: Plan, family: FamilyPlan) -> None:
        self.plan, self.family = plan, family
        self.legs = (_TX, _RX, _HI, _HO) if family.local else (_HI, _HO)
        self.decision = nft_many.decide(family, plan.default)
        inside = [ip for ip in family.own if any(ipaddress.ip_address(ip) in net for net in family.local)]
        self.own_inside = classify.own_probes(inside)
        self.own = nft_many.addresses("own", family.own) if len(family.own) > classify.MAX_OWN_RULES else None
        self.local = nft_many.by_length("local", family.local)
        self.blocks = nft_many.asked_first(self.decision)
        self.contents: list[Content] = [one for one in (self.own, self.blocks) if one]
        if len(family.local) > classify.MAX_LOCAL_RULES:
            self.contents += self.local.values()

    def layout(self) -> Layout:
        sets: list[CounterSet] = []
        counters: list[Counter] = []
        chains: list[Chain] = []
        for leg in self.legs:
            for traffic in self._classes(leg):
                sets += self._counter_set(leg, traffic)
                counters.append(self._counter(leg, traffic))
                chains.append(self._class_chain(leg, traffic))
            chains += self._decide(leg)
        chains.append(Chain(_GUARD, tuple(self._guard())))
        chains += self._base_chains()
        return Layout(self.family.family, tuple(sets), tuple(counters), tuple(self.contents), tuple(chains))

    def _classes(self, leg: _Leg) -> tuple[str, ...]:
        return (*self.plan.classes, TUNNEL) if leg.scope is Scope.HOST else self.plan.classes

    def _counter_set(self, leg: _Leg, traffic: str) -> list[CounterSet]:
        if leg.scope is Scope.HOST:
            return self._host_pod_set(leg, traffic)
        dynamic = bool(self.family.dynamic)
        needed = len(self.family.prefilled) + 1  # the sentinel
        size = needed + self.plan.dynamic_capacity if dynamic else -(-(needed + needed // 8) // _SLACK) * _SLACK
        key = CounterKey(self.family.family, Scope.POD, leg.direction, traffic)
        return [CounterSet(f"{leg.name}-{traffic}", key, size, dynamic)]

    def _host_pod_set(self, leg: _Leg, traffic: str) -> list[CounterSet]:
        """Encapsulation stays with the host: whoever made the tunnel did not send what is in it."""
        if not self.plan.host_pods or traffic == TUNNEL:
            return []
        key = CounterKey(self.family.family, Scope.HOST_POD, leg.direction, traffic)
        return [CounterSet(f"{leg.host_pods}-{traffic}", key, HOST_POD_LIMIT + 1, dynamic=False)]

    def _counter(self, leg: _Leg, traffic: str) -> Counter:
        scope = Scope.REST if leg.scope is Scope.POD else Scope.HOST
        return Counter(f"{leg.whole}-{traffic}", CounterKey(self.family.family, scope, leg.direction, traffic))

    def _class_chain(self, leg: _Leg, traffic: str) -> Chain:
        name = f"{leg.name}-{traffic}"
        rules = self._marks(traffic)
        if leg.scope is Scope.POD:
            rules.append((CountAt(leg.owner, name), Return()))
            rules += [(*self._own(leg.owner, probe), Return()) for probe in self.own_inside]
            if self.family.dynamic:
                rules.append((AddTo(leg.owner, name), Return()))
        elif traffic != TUNNEL:
            rules += [(CountOf(level, f"{leg.host_pods}-{traffic}"), Return()) for level in self.plan.host_pods]
        rules.append((Tally(f"{leg.whole}-{traffic}"),))
        return Chain(name, tuple(rules))

    def _marks(self, traffic: str) -> list[Rule]:
        marks = self.plan.marks
        return [(Mark(marks.values[traffic], marks.mask),)] if marks and marks.values.get(traffic) else []

    def _end(self, leg: _Leg, traffic: str) -> list[Rule]:
        """How a chain ends, with its class: a pod's packet is counted here, because going to another chain costs it."""
        name = f"{leg.name}-{traffic}"
        counted = [*self._marks(traffic), (CountAt(leg.owner, name), Return())] if leg.scope is Scope.POD else []
        return [*counted, (Goto(name),)]

    def _decide(self, leg: _Leg) -> list[Chain]:
        """The chains that choose the class, each before those that go to it."""
        maps = nft_many.lay_out(self.decision, leg.name)
        self.contents += maps.contents
        made = [
            Chain(name, (*((Choose(leg.peer, *lookup),) for lookup in lookups), *self._end(leg, traffic)))
            for name, lookups, traffic in maps.chains
        ]

        def step(node: classify.Step) -> Rule:
            match = _within(leg.peer, node.probe.network)
            if node.probe.members in maps.by_members:
                blocks = self.blocks if node.probe.members == nft_many.BLOCKS else None
                asked = (Member(leg.peer, blocks.name, self.decision.block),) if blocks else ()
                return (*match, *asked, Choose(leg.peer, *maps.by_members[node.probe.members]))
            return (*match, *self._own_member(leg.peer, node.probe), Goto(f"{leg.name}-{node.traffic}"))

        def rules(nodes: Iterable[classify.Node]) -> list[Rule]:
            found: list[Rule] = []
            for node in nodes:
                if isinstance(node, classify.Branch):
                    inside = tuple(rules(node.nodes))
                    made.append(Chain(f"{leg.name}.{len(made) + 1}", inside))
                    found.append((Prefix(leg.peer, node.network), Goto(made[-1].name)))
                else:
                    found += self._end(leg, node.traffic) if node.probe == classify.ANY else [step(node)]
            return found

        everything = ipaddress.ip_network("0.0.0.0/0" if self.family.family == 4 else "::/0")
        head = tuple(rules(nft_tree.tree(self.decision.steps, self.plan.default, everything)))
        if leg.scope is not Scope.HOST:
            return [*made, Chain(leg.name, head)]
        return [*made, *self._tunnel(leg, head)]

    def _tunnel(self, leg: _Leg, head: tuple[Rule, ...]) -> list[Chain]:
        """What comes before the class of the host's own packets: whether they are encapsulation."""
        tunnel, target = self.plan.tunnel, Goto(f"{leg.name}-{TUNNEL}")
        classes = Chain(f"{leg.name}.class", head)
        rules: list[Rule] = [(Protocol(number), target) for number in tunnel.protocols]
        if not tunnel.udp:
            return [classes, Chain(leg.name, (*rules, (Goto(classes.name),)))]
        ports = [(UdpPort(port), target) for port in tunnel.udp]
        # goes on from there, and does not come back: a class chain that was gone to would come back with it
        udp = Chain(f"{leg.name}.udp", (*ports, (Goto(classes.name),)))
        return [classes, udp, Chain(leg.name, ((Protocol(_UDP), Goto(udp.name)), *rules, (Goto(classes.name),)))]

    def _guard(self) -> list[Rule]:
        """Where host transmit begins: packets that merely carry a pod's address leave here, uncounted."""
        classes = Goto(_HO.name)
        rules: list[Rule] = [(*self._own("src", probe), classes) for probe in self.own_inside]
        rules += [(*parts, Return()) for parts in self._locals("src")]
        return [*rules, (classes,)]

    def _base_chains(self) -> list[Chain]:
        came, leaves = NotLoopback("iif"), NotLoopback("oif")
        sent = [(*parts, came, Jump(_TX.name)) for parts in self._locals("src")]
        # a mark that a packet of the host gets shall make the kernel look its route up again, as mangle OUTPUT does
        out = ("route", "output.route") if self.plan.marks else ("filter", "output")
        chains = [
            Chain("input", (*sent, (came, Goto(_HI.name))), self._hook("filter", "input")),
            Chain(out[1], ((leaves, Goto(_GUARD)),), self._hook(out[0], "output")),
        ]
        if self.family.local:
            forwarded = tuple((*parts, Goto(_TX.name)) for parts in self._locals("src"))
            received = tuple((*parts, leaves, Goto(_RX.name)) for parts in self._locals("dst"))
            chains.append(Chain("forward", forwarded, self._hook("filter", "forward")))
            chains.append(Chain("postrouting", received, self._hook("filter", "postrouting")))
        return chains

    @staticmethod
    def _hook(kind: str, name: str) -> Hook:
        return Hook(kind, _HOOKS[name], PRIORITY)

    def _locals(self, side: Side) -> list[Rule]:
        """The ways in which an end of a packet can be in the local ranges."""
        networks = self.family.local
        if len(networks) <= classify.MAX_LOCAL_RULES:
            return [(Prefix(side, network),) for network in networks]
        return [
            (*_within(side, cover), Member(side, content.name, length))
            for cover in classify.covers(networks)
            for length, content in self.local.items()
        ]

    def _own(self, side: Side, probe: classify.Probe) -> Rule:
        return (*_within(side, probe.network), *self._own_member(side, probe))

    def _own_member(self, side: Side, probe: classify.Probe) -> Rule:
        if not probe.members or self.own is None:
            return ()
        return (Member(side, self.own.name, self.family.loopback.max_prefixlen),)


def _within(side: Side, network: Network | None) -> tuple[Prefix, ...]:
    return () if network is None else (Prefix(side, network),)
