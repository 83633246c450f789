"""The play: drives every conversation of a family, and puts what was sent beside what was counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from netacct.demo import expect, flows, peers
from netacct.demo.expect import Series, Totals
from netacct.demo.meter import Meter
from netacct.demo.netns import DemoError
from netacct.demo.peers import NOTHING, Count, Flight
from netacct.demo.topology import Topology
from netacct.demo.traffic import Driver
from netacct.demo.world import FAMILIES, FIRST_PODS, HEIRS, Family

_SHARED_READING = 1.1  # seconds after which a scrape gets a reading of its own: one under a second old is shared
_PATIENCE = 15  # readings until all is quiet

Seen = dict[tuple[str, Flight], Count]
"""What nft has counted at each actor."""


class Row(NamedTuple):
    """One series in one phase. The phase drives one family; metrics carry none."""

    family: Family
    series: Series
    sent: Count
    counted: Count

    @property
    def exact(self) -> bool:
        """Whether bytes agree, and packets where the metrics have them."""
        return self.sent.bytes == self.counted.bytes and (not self.has_packets or self.sent == self.counted)

    @property
    def has_packets(self) -> bool:
        """Whether packets are exported for this level: they are for everything that has a namespace."""
        return self.series.level not in ("host", "unattributed")


class _Moment(NamedTuple):
    """Both sides at one moment at which nothing moved."""

    seen: Seen
    counted: Totals


class Stage:
    """A topology, a meter in its node, and the pods that live at the moment."""

    def __init__(self, topology: Topology, meter: Meter) -> None:
        self._topology = topology
        self._meter = meter
        self._pods = list(FIRST_PODS)
        self._gone: Seen = {}
        self._node_addresses: frozenset[str] = frozenset()

    @property
    def pods(self) -> tuple[str, ...]:
        """Who lives right now."""
        return tuple(self._pods)

    def play(self, say: Callable[[str], None]) -> list[Row]:
        """Drive IPv4, then IPv6, and compare after each. `say` gets a line of progress."""
        rows: list[Row] = []
        before = self._quiet_moment()
        self._node_addresses = self._topology.node_addresses()  # links of pods that die take theirs with them
        for family in FAMILIES:
            say(f"driving IPv{family} through every path")
            parts = list(self._drive(family))
            after = self._quiet_moment()
            parts += self._by_kernels(before.seen, after.seen)
            rows += _compare(family, expect.total(parts), expect.grown(before.counted, after.counted))
            before = after
        return rows

    def murmur(self) -> None:
        """A little traffic in both families, for watching."""
        for family in FAMILIES:
            driver = Driver(self._topology.spaces, family)
            for flow in flows.murmurs(family):
                driver.exchange(flow)

    def _drive(self, family: Family) -> Iterator[tuple[Series, Count]]:
        """Everything of one family, with a pod that dies in between; yields what the sockets counted."""
        driver = Driver(self._topology.spaces, family)
        for flow in flows.datagrams(family):
            yield from expect.expected_of_datagrams(flow, family, driver.exchange(flow))
        for stream in flows.streams(family):
            driver.stream(stream)
        for echo in flows.echoes(family):
            driver.echo(echo)
        for refusal in flows.refusals(family):
            driver.knock(refusal)
        self._hand_over(*HEIRS[family])
        for flow in flows.heir_datagrams(family):
            yield from expect.expected_of_datagrams(flow, family, driver.exchange(flow))

    def _hand_over(self, dead: str, heir: str) -> None:
        """One pod dies, another gets its addresses, and the meter is told, in the order of a real node."""
        self._topology.unplug(dead)
        self._gone |= self._read_peer(dead)
        self._topology.bury(dead)
        self._pods[self._pods.index(dead)] = heir
        self._topology.give_addresses(heir)
        self._node_addresses |= self._topology.node_addresses()
        self._meter.follow(self._pods)

    def _quiet_moment(self) -> _Moment:
        """What both sides say while nothing moves: the peers agree before and after the meter is read."""
        seen = self._read_peers()
        for _ in range(_PATIENCE):
            time.sleep(_SHARED_READING)
            counted = self._meter.read()
            again = self._read_peers()
            if again == seen:
                return _Moment(seen, counted)
            seen = again
        raise DemoError("the namespaces do not come to rest: their kernels keep sending packets")

    def _read_peers(self) -> Seen:
        seen = dict(self._gone)
        for actor in self._topology.spaces:
            if actor not in ("node", "wire"):
                seen |= self._read_peer(actor)
        return seen

    def _read_peer(self, actor: str) -> Seen:
        return {(actor, flight): count for flight, count in peers.read(self._topology.spaces[actor]).items()}

    def _by_kernels(self, before: Seen, after: Seen) -> Iterator[tuple[Series, Count]]:
        """What the packets add that no socket counted."""
        for (actor, flight), count in after.items():
            fresh = count.minus(before.get((actor, flight), NOTHING))
            if fresh != NOTHING:
                yield from expect.expected_of_flight(actor, flight, fresh, self._node_addresses)


def _compare(family: Family, sent: Mapping[Series, Count], counted: Mapping[Series, Count]) -> list[Row]:
    """One row per series that either side knows, in the order of its name."""
    return [
        Row(family, series, sent.get(series, NOTHING), counted.get(series, NOTHING))
        for series in sorted({*sent, *counted})
    ]
