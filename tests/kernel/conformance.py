"""A real datapath on the node of `lab.py`, and what it counted, for tests that hold for every datapath alike."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from flows import HEADERS, OWN, POLICY, REPLY, REQUEST, REQUESTS, VXLAN, Flow
from lab import ADDRESSES, PODS, Lab, inside

from netacct.kernel.base import Datapath
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.nftables import NftablesDatapath
from netacct.kernel.plan import Plan, build
from netacct.model import WHOLE, Address, CounterKey, Direction, Family, Scope, Snapshot, pack
from netacct.policy import MarkTable

Counted = dict[tuple[CounterKey, Address], tuple[int, int]]
"""(bytes, packets) of each counter that is not zero."""

KINDS = {
    "tx": (Scope.POD, Direction.TRANSMIT),
    "rx": (Scope.POD, Direction.RECEIVE),
    "to": (Scope.REST, Direction.TRANSMIT),
    "ro": (Scope.REST, Direction.RECEIVE),
    "hi": (Scope.HOST, Direction.RECEIVE),
    "ho": (Scope.HOST, Direction.TRANSMIT),
}

DATAPATHS: dict[str, Callable[[], IptablesDatapath | NftablesDatapath]] = {
    "iptables": IptablesDatapath,
    "nftables": NftablesDatapath,
}

BACKENDS = {"iptables": "legacy", "nftables": "nft"}
"""Which iptables the node's own NAT is written with, beside each datapath: what runs on such a node."""


DYNAMIC = ("10.244.0.0/19", "fd00:10:244:1::/64")
"""Local ranges that are too large to have their counters from the start."""


def plan(*local: str, marks: MarkTable | None = None, capacity: int = 64) -> Plan:
    """The plan of the lab's node, for other local ranges than its own where given."""
    ranges = [ipaddress.ip_network(cidr) for cidr in local or PODS.values()]
    return build(POLICY, ranges, OWN, marks, dynamic_capacity=capacity)


@dataclass
class Subject:
    """One datapath on one topology; `dropped` is what it handed over."""

    name: str
    lab: Lab
    dropped: list[Snapshot] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the agent."""
        with inside(self.lab.name("node")):
            self.datapath = DATAPATHS[self.name]()

    @contextlib.contextmanager
    def on_node(self) -> Iterator[Datapath]:
        """Be on the node, where the datapath works."""
        with inside(self.lab.name("node")):
            yield self.datapath

    def install(self, wanted: Plan) -> None:
        """Install a plan; what is dropped is kept for `total`."""
        with self.on_node() as datapath:
            datapath.install(wanted, self.dropped.append)

    def read(self) -> Counted:
        """What is counted now. Every set must be readable."""
        with self.on_node() as datapath:
            snapshot = datapath.read()
        assert snapshot.unreadable == ()
        return counted([snapshot])

    def total(self) -> Counted:
        """What is counted now and what was dropped on the way."""
        with self.on_node() as datapath:
            return counted([*self.dropped, datapath.read()])

    def verify(self) -> list[str]:
        """How the kernel differs from the plan."""
        with self.on_node() as datapath:
            return datapath.verify()

    def clean(self) -> None:
        """Take away everything that is ours, NAT and connections."""
        with self.on_node() as datapath:
            datapath.remove()
        self.dropped.clear()
        for family in ("iptables", "ip6tables"):
            for table in ("nat", "mangle", "filter"):
                tool = f"{family}-{BACKENDS[self.name]}"
                self.lab.run("node", "sh", "-c", f"{tool} -t {table} -F; {tool} -t {table} -X")


def counted(snapshots: Iterable[Snapshot]) -> Counted:
    """The sum of several snapshots' counters."""
    octets: Counter[tuple[CounterKey, Address]] = Counter()
    packets: Counter[tuple[CounterKey, Address]] = Counter()
    for snapshot in snapshots:
        for reading in snapshot.readings:
            for ip, count in reading.counts.items():
                octets[reading.key, ip] += count[0]
                packets[reading.key, ip] += count[1]
    return {place: (octets[place], packets[place]) for place in packets if packets[place]}


def since(before: Counted, after: Counted) -> Counted:
    """What was counted in between."""
    moved = {
        place: (count[0] - before.get(place, (0, 0))[0], count[1] - before.get(place, (0, 0))[1])
        for place, count in after.items()
    }
    assert before.keys() <= after.keys()
    return {place: count for place, count in moved.items() if any(count)}


def place(family: Family, words: str) -> tuple[CounterKey, Address]:
    """A counter by its words: `tx-pod poda`, or `hi-internet` for one that is of no address."""
    kind, _, end = words.partition(" ")
    leg, _, traffic = kind.partition("-")
    scope, direction = KINDS[leg]
    return CounterKey(family, scope, direction, traffic), pack(ADDRESSES[family][end]) if end else WHOLE


def at(family: Family, places: dict[str, tuple[int, int]]) -> Counted:
    """Counters by their words."""
    return {place(family, words): count for words, count in places.items()}


def expected(family: Family, flow: Flow) -> Counted:
    """What a conversation adds."""
    octets: Counter[tuple[CounterKey, Address]] = Counter()
    packets: Counter[tuple[CounterKey, Address]] = Counter()
    for places, size in ((flow.request, REQUEST), (flow.reply, REPLY)):
        for words in places:
            octets[place(family, words)] += REQUESTS * (size + HEADERS[family])
            packets[place(family, words)] += REQUESTS
    if flow.tunnelled:
        for words, size in (("ho-tunnel", REQUEST), ("hi-tunnel", REPLY)):
            octets[place(4, words)] += REQUESTS * (size + HEADERS[family] + VXLAN)
            packets[place(4, words)] += REQUESTS
    return {key: (octets[key], packets[key]) for key in packets}


def deliver(
    client: socket.socket, server: socket.socket, target: tuple[str, int], sizes: Iterable[int]
) -> list[tuple[str, int]]:
    """Send datagrams of these payloads, each once the one before it arrived; where the server saw them come from."""
    seen = []
    for size in sizes:
        client.sendto(b"d" * size, target)
        data, sender = server.recvfrom(65536)
        assert len(data) == size
        seen.append((sender[0], sender[1]))
    return seen
