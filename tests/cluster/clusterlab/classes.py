"""Which series a pod's flow belongs to: the table of docs/how-it-counts.md, written a second time, for this cluster."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from clusterlab import plan
from clusterlab.truth import Count, Flow, Flows, PodId


class Series(NamedTuple):
    """One series of bytes and packets of a pod."""

    namespace: str
    pod: str
    direction: str
    traffic: str


Totals = dict[Series, Count]

_NETWORKS = sorted(
    ((ipaddress.ip_network(cidr), each.name) for each in plan.CLASSES for cidr in each.cidrs),
    key=lambda pair: -pair[0].prefixlen,
)
_SERVICES = tuple(ipaddress.ip_network(cidr) for cidr in plan.SERVICES.values())


@dataclass
class Translations:
    """What a node translates, and so sees otherwise than the pod.

    Attributes:
        services: the class of what is behind a ClusterIP.
        host_ports: container ports by hostPort, of pods on this node.
        own: the node's own addresses.
    """

    own: frozenset[str]
    services: dict[str, str] = field(default_factory=dict)
    host_ports: dict[int, int] = field(default_factory=dict)

    def traffic(self, flow: Flow) -> str:
        """The class that the node sees: of the real destination after DNAT, of the real source before SNAT."""
        address = ipaddress.ip_address(flow.peer)
        if any(address in network for network in _SERVICES):
            return self.services.get(flow.peer, "service")
        if flow.peer in self.own:
            # portmap masquerades what a pod of this node sends to a hostPort of this node: the server sees the node
            ports = self.host_ports
            return "pod" if flow.peer_port in ports or flow.own_port in ports.values() else "node"
        return class_of(flow.peer)


def class_of(address: str, own: frozenset[str] = frozenset()) -> str:
    """The class of a peer's address that is not translated, on a node with these own addresses."""
    peer = ipaddress.ip_address(address)
    if address in own:
        return "node"
    return next((name for network, name in _NETWORKS if peer in network), "internet")


def expected(pods: Mapping[PodId, Flows], translations: Translations) -> Totals:
    """What an agent of the node must show of these pods. Pods of one name are one series."""
    sums: Totals = {}
    for pod, flows in pods.items():
        for flow, count in flows.items():
            series = Series(pod.namespace, pod.name, flow.direction, translations.traffic(flow))
            sums[series] = sums.get(series, Count(0, 0)).plus(count)
    return sums


class Difference(NamedTuple):
    """A series that is not as it should be."""

    node: str
    series: Series
    sent: Count
    counted: Count


def since(now: Totals, before: Totals) -> Totals:
    """What was added to totals; a series that shrank is as it is now."""
    nothing = Count(0, 0)
    added = {}
    for series, count in now.items():
        old = before.get(series, nothing)
        grown = count.bytes >= old.bytes and count.packets >= old.packets
        added[series] = Count(count.bytes - old.bytes, count.packets - old.packets) if grown else count
    return {series: count for series, count in added.items() if count != nothing}


def differences(node: str, sent: Totals, counted: Totals) -> list[Difference]:
    """Every series on either side that differs from the other; what is booked to nobody among them."""
    nothing = Count(0, 0)
    pairs = ((series, sent.get(series, nothing), counted.get(series, nothing)) for series in sorted({*sent, *counted}))
    return [Difference(node, series, one, other) for series, one, other in pairs if one != other]


def table(rows: Iterable[Difference]) -> str:
    """Text of differences."""
    return "\n".join(
        f"{row.node} {row.series.namespace}/{row.series.pod} {row.series.direction} {row.series.traffic}: "
        f"sent {row.sent.bytes:,} bytes in {row.sent.packets:,} packets, "
        f"counted {row.counted.bytes:,} in {row.counted.packets:,}"
        for row in rows
    )
