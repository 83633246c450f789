"""What the agent must count, from what the peers counted: the rules of "what is counted where", written once more.

Pure, and on purpose without any code of the agent: its own longest prefix, its own view of which hook sees what.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from netacct.demo.flows import Datagrams
from netacct.demo.peers import NOTHING, Count, Flight
from netacct.demo.traffic import Tally
from netacct.demo.world import ACTORS, ADDRESSES, BACKENDS, CLASSES, LOCAL_RANGES, NEIGHBOURS, PODS, Family, actor_of

RECEIVE, TRANSMIT = "receive", "transmit"

_PRIVATE = (
    "10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 169.254.0.0/16 224.0.0.0/4 255.255.255.255/32 "
    "fe80::/10 fc00::/7 ff00::/8"
)
_PREFIXES = [(ipaddress.ip_network(cidr), name) for name, cidrs in CLASSES.items() for cidr in cidrs]
_PREFIXES += [(ipaddress.ip_network(cidr), "private") for cidr in _PRIVATE.split()]
_LOCAL = [ipaddress.ip_network(cidr) for cidr in LOCAL_RANGES.values()]
_NODE_PLACES = ("node", *(place for place, actor in ACTORS.items() if actor == "node"))
_NODE = {ipaddress.ip_address(ADDRESSES[family][place]) for family in ADDRESSES for place in _NODE_PLACES}
_REWRITTEN = {
    ipaddress.ip_address(at[service]): ipaddress.ip_address(at[backend])
    for at in ADDRESSES.values()
    for service, backend in BACKENDS.items()
}
_EXITS = {ipaddress.ip_address(at["exit"]) for at in ADDRESSES.values()}
_ALL_NODES, _ALL_ROUTERS = ipaddress.IPv6Address("ff02::1"), ipaddress.IPv6Address("ff02::2")
_SOLICITED = int(ipaddress.IPv6Address("ff02::1:ff00:0"))

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Series(NamedTuple):
    """One exported total. `name`: the pod, or KIND/WORKLOAD, or nothing."""

    level: str
    namespace: str
    name: str
    direction: str
    traffic: str


Totals = dict[Series, Count]


def class_of(address: _Address) -> str:
    """The traffic class of an address: the node's own first, then the longest prefix, else internet."""
    if address in _NODE or address.is_loopback:
        return "node"
    found = [(net.prefixlen, name) for net, name in _PREFIXES if net.version == address.version and address in net]
    return max(found)[1] if found else "internet"


def expected_of_datagrams(flow: Datagrams, family: Family, tally: Tally) -> Iterator[tuple[Series, Count]]:
    """What one UDP exchange adds: each end that is a pod or the node gets what its own socket counted."""
    at = {place: ipaddress.ip_address(text) for place, text in ADDRESSES[family].items()}
    client, server = at[flow.client], at[flow.server]
    yield from _leaves(flow.client, flow.server, at[flow.to], server, tally.client_sent)
    yield from _arrives(flow.server, client, tally.server_received)
    yield from _leaves(flow.server, flow.client, client, client, tally.server_sent)
    yield from _arrives(flow.client, server, tally.client_received)


def _leaves(place: str, peer: str, addressed: _Address, real: _Address, count: Count) -> Iterator[tuple[Series, Count]]:
    """A pod sends (booked by where it really goes), or the node sends (booked by whom it addresses)."""
    if place in PODS:
        yield pod_series(place, TRANSMIT, "node" if actor_of(peer) == "node" else class_of(real)), count
    elif actor_of(place) == "node" and not addressed.is_loopback:  # to 127.0.0.1:hostPort by lo, which is not counted
        yield host_series(TRANSMIT, class_of(addressed)), count


def _arrives(place: str, source: _Address, count: Count) -> Iterator[tuple[Series, Count]]:
    """A pod or the node gets something: booked by who really sent it."""
    if place in PODS:
        yield pod_series(place, RECEIVE, class_of(source)), count
    elif actor_of(place) == "node":
        yield host_series(RECEIVE, class_of(source)), count


def expected_of_flight(
    actor: str, flight: Flight, count: Count, node_addresses: frozenset[str]
) -> Iterator[tuple[Series, Count]]:
    """What the packets add that nft counted at one peer.

    Args:
        actor: the peer that counted.
        flight: which packets.
        count: how many.
        node_addresses: all addresses that the node has had, link-local ones included.
    """
    source, destination = ipaddress.ip_address(flight.source), ipaddress.ip_address(flight.destination)
    source, destination = _REWRITTEN.get(source, source), _REWRITTEN.get(destination, destination)
    if flight.leaving:
        to_node = _reaches_node(actor, destination, node_addresses)
        if actor in PODS and _is_local(source) and (to_node or not destination.is_multicast):
            own = to_node and not is_group_or_link_local(destination)
            yield pod_series(actor, TRANSMIT, "node" if own else class_of(destination)), count
        if to_node and source not in _EXITS:
            yield host_series(RECEIVE, "tunnel" if flight.outer else class_of(source)), count
    else:
        if actor in PODS and _is_local(destination):
            yield pod_series(actor, RECEIVE, class_of(source)), count
        if str(source) in node_addresses and destination not in _EXITS:
            yield host_series(TRANSMIT, "tunnel" if flight.outer else class_of(destination)), count


def is_group_or_link_local(address: _Address) -> bool:
    """An address that the node answers to without its being class `node`: a group, or an IPv6 link-local address."""
    return address.is_multicast or (address.version == 6 and address.is_link_local)


def _is_local(address: _Address) -> bool:
    return any(net.version == address.version and address in net for net in _LOCAL)


def _reaches_node(actor: str, destination: _Address, node_addresses: frozenset[str]) -> bool:
    """Whether the node takes it in: one of its addresses, or a group that a router joins by itself (RFC 4291, 2.8)."""
    if not destination.is_multicast:
        return str(destination) in node_addresses
    if actor not in PODS and actor not in NEIGHBOURS:
        return False
    solicited = {
        ipaddress.IPv6Address(_SOLICITED | (int(ipaddress.IPv6Address(text)) & 0xFFFFFF))
        for text in node_addresses
        if ":" in text
    }
    return destination in solicited or destination in (_ALL_NODES, _ALL_ROUTERS)


def pod_series(name: str, direction: str, traffic: str) -> Series:
    """The series of a pod, called like its actor."""
    return Series("pod", PODS[name].namespace, name, direction, traffic)


def host_series(direction: str, traffic: str) -> Series:
    """The series of the node itself."""
    return Series("host", "", "", direction, traffic)


def total(parts: Iterable[tuple[Series, Count]]) -> Totals:
    """Sum up, and add the levels above the pod. A series without packets does not exist."""
    totals: Totals = {}
    for series, count in parts:
        for level in _levels(series):
            totals[level] = totals.get(level, NOTHING).plus(count)
    return {series: count for series, count in totals.items() if count != NOTHING}


def _levels(series: Series) -> Iterator[Series]:
    yield series
    if series.level == "pod":
        pod = PODS[series.name]
        yield Series("namespace", pod.namespace, "", series.direction, series.traffic)
        workload = f"{pod.kind}/{pod.workload}"
        yield Series("workload", pod.namespace, workload, series.direction, series.traffic)


def grown(before: Mapping[Series, Count], after: Mapping[Series, Count]) -> Totals:
    """What was added between two readings; a series that stood still is left out."""
    growth = {series: after.get(series, NOTHING).minus(before.get(series, NOTHING)) for series in {*before, *after}}
    return {series: count for series, count in growth.items() if count != NOTHING}
