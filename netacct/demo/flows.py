"""Every conversation of the demo: one for each way that a packet can take through the node. Plain data.

Each has its own numbers of packets and its own sizes, so that no two mistakes can cancel out.
"""

from __future__ import annotations

from typing import NamedTuple

from netacct.demo.world import FAMILIES, HEIRS, HOST_PORTS, NODE_PORTS, NODE_PORTS_REMOTE, Family, backend_of

BIG = 3000
"""A payload that needs three packets on the wire, which the node's conntrack puts together again."""


class Burst(NamedTuple):
    """So many datagrams of so many bytes."""

    number: int
    size: int


class Datagrams(NamedTuple):
    """A UDP exchange, counted at the sockets of both ends.

    client: the place that asks; its address is the real source.
    to:     the place that it addresses.
    server: the place that gets it; differs from `to` where the node rewrites the destination.
    """

    client: str
    to: str
    server: str
    port: int
    requests: Burst
    replies: Burst


class Stream(NamedTuple):
    """A TCP connection over which the client sends so many bytes; counted by nft at the peers."""

    client: str
    to: str
    server: str
    port: int
    size: int


class Echo(NamedTuple):
    """ICMP echo requests; the answers come from the kernel of the other end. Counted by nft at the peers."""

    client: str
    to: str
    requests: Burst


class Refused(NamedTuple):
    """Datagrams to a port where nobody listens: the kernel there answers with ICMP errors. Counted by nft."""

    client: str
    to: str
    port: int
    requests: Burst


_DATAGRAMS = (
    # client, to                             the row of the table
    ("train-0", "train-1"),  # pod to pod on the node, of one namespace
    ("train-1", "train-0"),
    ("train-0", "eval-0"),  # … of two namespaces
    ("train-0", "remote"),  # pod to a pod of another node, routed
    ("remote", "eval-0"),
    ("train-0", "remote-overlay"),  # … through VXLAN
    ("remote-overlay", "train-1"),
    ("train-0", "node"),  # pod to the node itself
    ("eval-0", "node-bridge"),
    ("node-bridge", "train-0"),  # node to pod
    ("node", "web-0"),
    ("train-0", "other"),  # another node
    ("other", "train-0"),
    ("eval-0", "private"),  # private hosts, of which some are a class of their own
    ("private", "eval-0"),
    ("train-1", "storage"),
    ("storage", "web-0"),
    ("train-0", "exit"),  # internet, masqueraded
    ("eval-0", "exit"),
    ("train-0", "service-web"),  # ClusterIP to a pod of the node
    ("web-0", "service-web"),  # … to the asking pod itself
    ("node", "service-web"),  # … asked by the node
    ("train-1", "service-remote"),  # ClusterIP to a pod elsewhere
    ("node", "service-remote"),
    ("node", "internet"),  # the node's own business
    ("internet", "node"),
    ("node", "other"),
    ("other", "node"),
    ("node", "private"),
    ("storage", "node"),
    ("node", "remote"),
    ("remote", "node"),
)
_BIG = (
    ("train-0", "train-1"),
    ("train-1", "exit"),
    ("train-0", "node"),
    ("node", "web-0"),
    ("private", "eval-0"),
    ("node", "other"),
    ("internet", "node"),
)


_HEIR_TALKS = (("{}", "train-0"), ("private", "{}"), ("{}", "exit"), ("{}", "node"), ("{}", "service-web"))
_STREAMS = (
    ("train-0", "eval-0", 310_000),
    ("train-1", "exit", 210_000),
    ("eval-0", "service-web", 150_000),
    ("node", "web-0", 110_000),
    ("train-1", "node", 90_000),
    ("internet", "node", 120_000),
    ("remote", "train-0", 70_000),
)
_ECHOES = (
    ("train-0", "web-0"),
    ("train-1", "exit"),
    ("eval-0", "node"),
    ("node", "train-0"),
    ("private", "train-1"),
    ("node", "other"),
    ("internet", "node"),
    ("web-0", "remote"),
)
_REFUSALS = (("train-0", "train-1"), ("eval-0", "node"), ("web-0", "exit"), ("node", "eval-0"), ("node", "internet"))

_MURMURS = (
    ("train-0", "exit"),
    ("train-0", "eval-1"),
    ("private", "web-0"),
    ("train-2", "service-web"),
    ("train-0", "remote-overlay"),
    ("node", "internet"),
)


def datagrams(family: Family) -> tuple[Datagrams, ...]:
    """All UDP exchanges between those who are there when the family's turn comes."""
    pairs = [(_present(client, family), _present(to, family)) for client, to in _DATAGRAMS]
    found = [_exchange(index, family, client, to, 20000 + index) for index, (client, to) in enumerate(pairs)]
    for client, to in ((_present(client, family), _present(to, family)) for client, to in _BIG):
        number = len(found)
        found.append(Datagrams(client, to, to, 20000 + number, Burst(2, BIG + number), Burst(1, BIG + 100 + number)))
    number = len(found)
    found.append(_exchange(number, family, "internet", "node", NODE_PORTS[0], server="web-0"))
    # forwarded for somebody else: neither a pod of this node nor the node itself, so booked to nobody
    found.append(_exchange(number + 1, family, "internet", "node", NODE_PORTS_REMOTE[0], server="remote"))
    if family == 4:  # IPv6 has no route_localnet
        found.append(_exchange(number + 2, 4, "node-loopback", "node-loopback", HOST_PORTS[0], server="web-0"))
    return tuple(found)


def heir_datagrams(family: Family) -> tuple[Datagrams, ...]:
    """The UDP exchanges of the pod that got the address of a dead one."""
    _, heir = HEIRS[family]
    pairs = [(client.format(heir), to.format(heir)) for client, to in _HEIR_TALKS]
    return tuple(_exchange(45 + i, family, client, to, 24000 + i) for i, (client, to) in enumerate(pairs))


def streams(family: Family) -> tuple[Stream, ...]:
    """All TCP connections."""
    found = []
    for index, (client, to, size) in enumerate(_STREAMS):
        server = _present(backend_of(to), family)
        found.append(
            Stream(_present(client, family), _present(to, family), server, 31100 + index, size + 1000 * family)
        )
    return tuple(found)


def echoes(family: Family) -> tuple[Echo, ...]:
    """All pings."""
    return tuple(
        Echo(_present(client, family), _present(to, family), _burst(index, family, 3))
        for index, (client, to) in enumerate(_ECHOES)
    )


def refusals(family: Family) -> tuple[Refused, ...]:
    """All knocks on closed ports."""
    return tuple(
        Refused(_present(client, family), _present(to, family), 31000 + index, Burst(2, 90 + 30 * index + family))
        for index, (client, to) in enumerate(_REFUSALS)
    )


def murmurs(family: Family) -> tuple[Datagrams, ...]:
    """A little of everything, between those who are left in the end."""
    return tuple(_exchange(i, family, client, to, 23000 + i) for i, (client, to) in enumerate(_MURMURS))


def _present(place: str, family: Family) -> str:
    """Who sits at this place when the family's turn comes: the heirs of earlier turns have moved in."""
    for earlier in FAMILIES[: FAMILIES.index(family)]:
        dead, heir = HEIRS[earlier]
        place = heir if place == dead else place
    return place


def _burst(index: int, family: Family, step: int) -> Burst:
    """Numbers that differ for each conversation, family and way."""
    return Burst(3 + (index * 5 + step) % 11, 40 + index * 19 + step * 7 + family)


def _exchange(index: int, family: Family, client: str, to: str, port: int, server: str = "") -> Datagrams:
    return Datagrams(client, to, server or backend_of(to), port, _burst(index, family, 1), _burst(index, family, 2))
