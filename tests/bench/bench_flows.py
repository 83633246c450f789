"""The ways packets take through a lane, and what netacct must have booked once they have taken them."""

from __future__ import annotations

import ipaddress
import random
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from bench_lane import INTERNET, NODE, POD, Flow, write_routes
from bench_product import Booked

from netacct.model import Direction, Scope

ROTATION = 2048
LOCAL_20 = [str(address) for address in ipaddress.IPv4Network("10.244.0.0/20")]


def random_cidrs(dice: random.Random, count: int) -> list[ipaddress.IPv4Network]:
    """So many different public IPv4 CIDRs of /14 to /32, each length as likely as any other."""
    found: set[ipaddress.IPv4Network] = set()
    while len(found) < count:
        cidr = ipaddress.IPv4Network((dice.getrandbits(32), dice.randint(14, 32)), strict=False)
        if cidr.is_global and not cidr.is_multicast and not cidr.is_reserved:
            found.add(cidr)
    return sorted(found)


def random_addresses(dice: random.Random) -> Iterator[ipaddress.IPv4Address]:
    """Public IPv4 addresses, without end."""
    while True:
        address = ipaddress.IPv4Address(dice.getrandbits(32))
        if address.is_global and not address.is_multicast and not address.is_reserved:
            yield address


def pod_transmit(traffic: str, packets: int = 1) -> Counter[Booked]:
    """A pod sent so many packets to a class."""
    return Counter({(Scope.POD, Direction.TRANSMIT, traffic): packets})


def make_flows(
    folder: Path, lists: Mapping[str, Sequence[ipaddress.IPv4Network]], dice: random.Random
) -> dict[str, Flow]:
    """All flows by name; their route files go to `folder`.

    `lists` are the CIDRs of class `cloud`, by what the names of the flows for them end with.
    """

    def flow(name: str, sender: str, routes: Sequence[tuple[str, str]], books: Counter[Booked]) -> Flow:
        path = write_routes(folder / name.replace(" ", "-"), routes)
        return Flow(name, sender, path, len(routes), books)

    flows = [
        flow("pod to internet", "pod", [("-", INTERNET)], pod_transmit("internet")),
        flow("internet to pod", "inet", [(INTERNET, POD)], _receive("internet")),
        flow("pod to node", "pod", [("-", NODE)], pod_transmit("node") + _host(Direction.RECEIVE, "pod")),
        flow("node to internet", "node", [("-", INTERNET)], _host(Direction.TRANSMIT, "internet")),
        flow("4,096 pods to internet", "pod", [(a, INTERNET) for a in LOCAL_20], pod_transmit("internet", 4096)),
        flow("internet to 4,096 pods", "inet", [(INTERNET, a) for a in LOCAL_20], _receive("internet", 4096)),
    ]
    for end, cidrs in lists.items():
        known = frozenset(cidrs)
        anywhere = list(islice(random_addresses(dice), ROTATION))
        listed = [cidr[dice.randrange(cidr.num_addresses)] for cidr in dice.sample(cidrs, ROTATION)]
        for name, addresses in (("addresses anywhere", anywhere), ("listed addresses", listed)):
            routes = [("-", str(address)) for address in addresses]
            inside = sum(_listed(address, known) for address in addresses)
            books = pod_transmit("cloud", inside) + pod_transmit("internet", ROTATION - inside)
            flows.append(flow(f"pod to {ROTATION:,} {name}{end}", "pod", routes, books))
    return {flow.name: flow for flow in flows}


def _listed(address: ipaddress.IPv4Address, cidrs: Collection[ipaddress.IPv4Network]) -> bool:
    return any(ipaddress.IPv4Network((address, length), strict=False) in cidrs for length in range(14, 33))


def _receive(traffic: str, packets: int = 1) -> Counter[Booked]:
    return Counter({(Scope.POD, Direction.RECEIVE, traffic): packets})


def _host(direction: Direction, traffic: str) -> Counter[Booked]:
    return Counter({(Scope.HOST, direction, traffic): 1})
