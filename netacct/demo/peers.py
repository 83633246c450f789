"""Counters in the peers' own namespaces, for every packet that no socket of the demo counts.

Neighbour discovery, MLD, ICMP and TCP are made by kernels. Each peer, pods included, counts by source and destination
what leaves it and what reaches it; data of the demo's UDP sockets (by port) is left out, because the sockets know it.
The node itself, where the agent counts, holds none of these counters.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator
from typing import NamedTuple

from netacct.demo.netns import Namespace
from netacct.demo.world import SOCKET_PORTS, VXLAN_PORT


class Count(NamedTuple):
    """Layer-3 bytes and packets."""

    bytes: int
    packets: int

    def plus(self, other: Count) -> Count:
        """The sum."""
        return Count(self.bytes + other.bytes, self.packets + other.packets)

    def minus(self, other: Count) -> Count:
        """The difference."""
        return Count(self.bytes - other.bytes, self.packets - other.packets)


NOTHING = Count(0, 0)


class Flight(NamedTuple):
    """Packets of one peer, from one address to another. `leaving` is seen from the peer; `outer`: VXLAN's own."""

    leaving: bool
    outer: bool
    source: str
    destination: str


_SETS = "".join(
    f"""
    set {way}{kind}{family} {{
        type ipv{family}_addr . ipv{family}_addr
        flags dynamic
        size 4096
    }}
"""
    for way in ("in", "out")
    for kind in ("plain", "outer")
    for family in (4, 6)
)


def _count(way: str) -> str:
    low, high = SOCKET_PORTS
    return f"""
        meta {"iif" if way == "in" else "oif"}type loopback return
        udp dport {low}-{high} return
        udp sport {low}-{high} return
        ip frag-off & 0x1fff != 0 return comment "the rest of a datagram that a socket counts"
        exthdr frag exists return
        udp dport {VXLAN_PORT} update @{way}outer4 {{ ip saddr . ip daddr counter }}
        udp dport {VXLAN_PORT} update @{way}outer6 {{ ip6 saddr . ip6 daddr counter }}
        udp dport {VXLAN_PORT} return
        update @{way}plain4 {{ ip saddr . ip daddr counter }}
        update @{way}plain6 {{ ip6 saddr . ip6 daddr counter }}
"""


def ruleset(*, witness: bool) -> str:
    """The peer's table, as input of `nft -f -`.

    Args:
        witness: count multicast that reaches this peer, whether it listens or not. One peer on each link of the node
            does so: more would count the node's packets more than once.
    """
    multicast = "meta pkttype multicast jump arriving" if witness else "meta pkttype multicast return"
    return f"""
table inet demo {{
{_SETS}
    chain arriving {{{_count("in")}    }}
    chain prerouting {{
        type filter hook prerouting priority -350
        {multicast}
    }}
    chain input {{
        type filter hook input priority 350
        meta pkttype != multicast jump arriving
    }}
    chain output {{
        type filter hook output priority 350{_count("out")}    }}
}}
"""


def install(space: Namespace, *, witness: bool) -> None:
    """Put the counters into a peer's namespace."""
    space.run(["nft", "-f", "-"], ruleset(witness=witness))


def read(space: Namespace) -> dict[Flight, Count]:
    """What a peer has counted since its counters were installed."""
    return dict(parse(space.run(["nft", "-j", "list", "sets"])))


def parse(listing: str) -> Iterator[tuple[Flight, Count]]:
    """The counters in the output of `nft -j list sets` (libnftables-json(5))."""
    for item in json.loads(listing)["nftables"]:
        entry = item.get("set", {})
        for element in entry.get("elem", ()):
            source, destination = element["elem"]["val"]["concat"]
            counter = element["elem"]["counter"]
            flight = Flight(
                leaving=entry["name"].startswith("out"),
                outer="outer" in entry["name"],
                source=str(ipaddress.ip_address(source)),
                destination=str(ipaddress.ip_address(destination)),
            )
            yield flight, Count(counter["bytes"], counter["packets"])
