"""Cluster ranges in the kernel's routing, by rtnetlink(7).

Two things are certain there:

- the networks that the interface to the rest of the world is in (other nodes are there; whether pods are, too, decides
  `policy_found.py`);
- what is routed into an interface that a CNI plugin made for nothing but pods of other nodes (`PLUGINS`). A route
  through an ordinary interface may lead anywhere, whoever made it: flannel's host-gw and kindnet's have no protocol of
  their own, and bird (protocol 12) also serves those who run it for their data centre. Such a route says nothing here.

Nothing is subscribed to: with most plugins each pod's start changes a route, and what is looked for changes with a node
at most. The kernel gives only the routes of these interfaces (NETLINK_GET_STRICT_CHK), which matters where it has a
full table of the internet.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

from netacct import rtnetlink
from netacct.identity.cluster import Reading, fault
from netacct.model import Network
from netacct.policy import NODE, POD, Prefix
from netacct.rtnetlink import Message

LIMIT = 256
"""So many networks are taken from routes, neighbours joined; the rest is left out, and said to be. A cluster that has
more says its range in another place."""

PLUGINS: Mapping[str, str] = {
    r"flannel(-v6)?\.\d+|flannel-wg(-v6)?|flannel\.ipip": "flannel",  # its backends vxlan, wireguard and ipip
    r"cilium_(host|vxlan|geneve)": "Cilium",  # pkg/defaults/node.go
    r"vxlan(-v6)?\.calico|wireguard\.cali|wg-v6\.cali": "Calico",  # felix/config/config_params.go
}
"""By what they call the interface that leads to other nodes' pods (a regular expression for the whole name). Antrea and
OVN-Kubernetes are not here: they also route Services into theirs."""

_TUNL0 = "tunl0"
_BIRD, _FELIX = 12, 80
"""Who routes pods into tunl0, which every kernel with ipip has: Calico's bird (RTPROT_BIRD, linux/rtnetlink.h) and
Felix (DeviceRouteProtocol)."""

_ELSEWHERE: Mapping[int, str] = {socket.AF_INET: "192.88.99.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that nobody has (RFC 7526, RFC 3849): the way to them is the default route. No packet is sent."""

# linux/rtnetlink.h, linux/if_link.h, linux/if_arp.h, linux/netlink.h
_RTM_GETLINK = 18
_RTM_NEWADDR, _RTM_GETADDR = 20, 22
_RTM_NEWROUTE, _RTM_GETROUTE = 24, 26
_IFINFOMSG = struct.Struct("=BxHiII")  # family, type, index, flags, change
_IFADDRMSG = struct.Struct("=BBBBI")  # family, prefixlen, flags, scope, index
_RTMSG = struct.Struct("=BBBBBBBBI")  # family, dst_len, src_len, tos, table, protocol, scope, type, flags
_ATTRIBUTE = struct.Struct("=HH")
_IFLA_IFNAME, _IFA_ADDRESS, _IFA_LOCAL, _RTA_DST, _RTA_OIF = 3, 1, 2, 1, 4
_ARPHRD_ETHER, _ARPHRD_INFINIBAND = 1, 32
_RT_TABLE_MAIN, _RTN_UNICAST = 254, 1
_SOL_NETLINK, _NETLINK_GET_STRICT_CHK = 270, 12
_SIZES: Mapping[int, int] = {socket.AF_INET: 32, socket.AF_INET6: 128}

Interface: TypeAlias = ipaddress.IPv4Interface | ipaddress.IPv6Interface


class Link(NamedTuple):
    """An interface; `shared`: it is one on which several hosts can be, such as Ethernet."""

    number: int
    name: str
    shared: bool


class Routes:
    """What routing says; what it said once it does not take back, because nodes come and go. For one thread.

    `ways_out` are the addresses, with their networks, by which the node reached others at the last look.
    """

    def __init__(self) -> None:
        self.ways_out: tuple[Interface, ...] = ()
        self._seen: dict[str, frozenset[Network]] = {}

    def look(self) -> list[Reading]:
        """The networks of the node's way out, and the pods' networks behind plugins' interfaces. Raises OSError."""
        with rtnetlink.connect() as channel:
            with contextlib.suppress(OSError):  # before Linux 4.20 the kernel sends all, and the parsers choose
                channel.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
            named = list(_ways_out(channel))
            self.ways_out = tuple(address for address, _ in named)
            subnets = [
                Prefix(address.network, NODE, f"connected subnet of {name}, which has the default route")
                for address, name in named
                if address.network.num_addresses > 1
            ]
            return [Reading("subnets", *_checked(subnets)), self._behind(channel)]

    def _behind(self, channel: socket.socket) -> Reading:
        facts: list[Prefix] = []
        faults: list[str] = []
        for index, name in socket.if_nameindex():
            plugin = plugin_of(name)
            if not plugin:
                continue
            networks = frozenset(_routed(channel, index, name)) | self._seen.get(name, frozenset())
            joined = joined_up(networks)
            if len(joined) > LIMIT:
                faults.append(f"more than {LIMIT} networks are routed into {name}, which are left out")
                continue
            self._seen[name] = networks
            facts += [Prefix(network, POD, f"routed into {name}, which is {plugin}'s") for network in joined]
        good, bad = _checked(facts)
        return Reading("routes", good, (*bad, *faults))


def plugin_of(name: str) -> str:
    """Who made an interface for other nodes' pods; "" where it is none."""
    if name == _TUNL0:
        return "Calico"
    return next((plugin for pattern, plugin in PLUGINS.items() if re.fullmatch(pattern, name)), "")


def joined_up(networks: Iterable[Network]) -> tuple[Network, ...]:
    """The same addresses in as few networks as can be, sorted."""
    fours = [network for network in networks if isinstance(network, ipaddress.IPv4Network)]
    sixes = [network for network in networks if isinstance(network, ipaddress.IPv6Network)]
    return (*ipaddress.collapse_addresses(fours), *ipaddress.collapse_addresses(sixes))


def _checked(facts: Iterable[Prefix]) -> tuple[tuple[Prefix, ...], tuple[str, ...]]:
    good: list[Prefix] = []
    bad: list[str] = []
    for fact in facts:
        why = fault(fact.network)
        if not why:
            good.append(fact)
        elif not fact.network.is_link_local:  # which every interface has
            bad.append(f"{why} ({fact.origin})")
    return tuple(dict.fromkeys(good)), tuple(bad)


def _ways_out(channel: socket.socket) -> Iterator[tuple[Interface, str]]:
    """The addresses of the interfaces by which the node reaches others, and the interfaces' names."""
    for family in _ELSEWHERE:
        link = _way_out(channel, family)
        if link is None or not link.shared:
            continue
        for message in rtnetlink.dump_whole(channel, _RTM_GETADDR, _IFADDRMSG.pack(family, 0, 0, 0, link.number)):
            address = parse_address(message, link.number)
            if address is not None:
                yield address, link.name


def parse_address(message: Message, index: int) -> Interface | None:
    """An interface's address with its prefix length, from RTM_NEWADDR; None for another interface's."""
    if message.kind != _RTM_NEWADDR:
        return None
    _family, length, _flags, _scope, where = _IFADDRMSG.unpack_from(message.body)
    parts = rtnetlink.attributes(message.body, _IFADDRMSG.size)
    # IFA_ADDRESS is the peer's on point-to-point links, and there the prefix is the peer's, too
    address = parts.get(_IFA_ADDRESS, parts.get(_IFA_LOCAL))
    return None if where != index or address is None else ipaddress.ip_interface((address, length))


def _way_out(channel: socket.socket, family: int) -> Link | None:
    address = socket.inet_pton(family, _ELSEWHERE[family])
    body = _RTMSG.pack(family, _SIZES[family], 0, 0, 0, 0, 0, 0, 0) + _attribute(_RTA_DST, address)
    try:
        (route,) = rtnetlink.ask(channel, _RTM_GETROUTE, body)
        index = int.from_bytes(rtnetlink.attributes(route.body, _RTMSG.size).get(_RTA_OIF, b""), sys.byteorder)
        if _RTMSG.unpack_from(route.body)[7] != _RTN_UNICAST or not index:
            return None
        (link,) = rtnetlink.ask(channel, _RTM_GETLINK, _IFINFOMSG.pack(socket.AF_UNSPEC, 0, index, 0, 0))
    except (OSError, ValueError):  # no such route, or the interface went meanwhile
        return None
    kind = _IFINFOMSG.unpack_from(link.body)[1]
    name = rtnetlink.attributes(link.body, _IFINFOMSG.size)[_IFLA_IFNAME].rstrip(b"\0").decode()
    return Link(index, name, kind in (_ARPHRD_ETHER, _ARPHRD_INFINIBAND))


def _routed(channel: socket.socket, index: int, name: str) -> Iterator[Network]:
    """What the main table routes into an interface. Raises OSError."""
    for family in _ELSEWHERE:
        body = _RTMSG.pack(family, 0, 0, 0, _RT_TABLE_MAIN, 0, 0, _RTN_UNICAST, 0)
        body += _attribute(_RTA_OIF, index.to_bytes(4, sys.byteorder))
        try:
            messages = rtnetlink.dump_whole(channel, _RTM_GETROUTE, body)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP):  # no such table: no IPv6
                continue
            raise
        for message in messages:
            network = parse_route(message, index, name)
            if network is not None:
                yield network


def parse_route(message: Message, index: int, name: str) -> Network | None:
    """Where a route of RTM_NEWROUTE leads, if into that interface, and to pods; None for any other."""
    if message.kind != _RTM_NEWROUTE:
        return None
    family, length, _source, _tos, table, protocol, _scope, kind, _flags = _RTMSG.unpack_from(message.body)
    parts = rtnetlink.attributes(message.body, _RTMSG.size)
    if _RTA_DST not in parts or table != _RT_TABLE_MAIN or kind != _RTN_UNICAST or family not in _SIZES:
        return None
    if int.from_bytes(parts.get(_RTA_OIF, b""), sys.byteorder) != index:
        return None
    if name == _TUNL0 and protocol not in (_BIRD, _FELIX):
        return None
    return ipaddress.ip_network((parts[_RTA_DST], length), strict=False)


def _attribute(kind: int, value: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(value), kind) + value
