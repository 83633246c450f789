"""What a node's own sockets sent and received, by peer: nftables counters in its network namespace.

A node is never quiet: its kubelet and its pods' probes go on. So a reading holds for the moment only, and what an agent
counted meanwhile lies between a reading before and a reading after (`Bounds`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from clusterlab.classes import class_of
from clusterlab.node import Node

HostTotals = dict[tuple[str, str], int]
"""Bytes by direction and class. (An agent shows no packets of the host.)"""

_RULES = """\
table inet host-truth {
  set in4 { type ipv4_addr; size 65535; flags dynamic; }
  set in6 { type ipv6_addr; size 65535; flags dynamic; }
  set out4 { type ipv4_addr; size 65535; flags dynamic; }
  set out6 { type ipv6_addr; size 65535; flags dynamic; }
  chain in {
    type filter hook input priority -149
    iifname lo return
    add @in4 { ip saddr counter } return
    add @in6 { ip6 saddr counter }
  }
  chain out {
    type filter hook output priority -149
    oifname lo return
    add @out4 { ip daddr counter } return
    add @out6 { ip6 daddr counter }
  }
}
"""


class Bounds(NamedTuple):
    """Between these a total lay at some moment."""

    low: HostTotals
    high: HostTotals


@contextlib.contextmanager
def metered(node: Node) -> Iterator[None]:
    """For the length of the block what the node itself sends and receives is counted."""
    node.run(["nft", "-f", "-"], _RULES)
    try:
        yield
    finally:
        node.run(["nft", "delete", "table", "inet", "host-truth"])


def read(node: Node) -> HostTotals:
    """The counters of now."""
    found: HostTotals = {}
    for item in json.loads(node.run(["nft", "-nj", "list", "table", "inet", "host-truth"]).stdout)["nftables"]:
        several = item.get("set", {})
        direction = "receive" if several.get("name", "").startswith("in") else "transmit"
        for each in several.get("elem", []):
            element = each["elem"]
            key = direction, class_of(element["val"], node.own_addresses())
            found[key] = found.get(key, 0) + element["counter"]["bytes"]
    return found


def added(now: HostTotals, before: HostTotals) -> HostTotals:
    """What was added."""
    return {key: count - before.get(key, 0) for key, count in now.items()}


def since(now: Bounds, before: Bounds) -> Bounds:
    """Between these lies what was added from one moment to another."""
    return Bounds(added(now.low, before.high), added(now.high, before.low))


def outside(counted: Mapping[tuple[str, str], int], bounds: Bounds) -> dict[tuple[str, str], tuple[int, ...]]:
    """What is not within bounds: low, counted, high."""
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for key in {*counted, *bounds.low, *bounds.high}:
        low, value, high = (totals.get(key, 0) for totals in (bounds.low, counted, bounds.high))
        if not low <= value <= high:
            found[key] = low, value, high
    return found
