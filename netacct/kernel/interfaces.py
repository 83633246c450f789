"""The node's ends of the pods' interfaces, and what they counted, by rtnetlink(7).

Whose interface a veth is, the pod's own network namespace says: the kernel tells of each veth in which namespace its
peer is (IFLA_LINK_NETNSID) and what it is called there (IFLA_LINK), and lists that namespace's addresses to whoever
names it (IFA_TARGET_NETNSID, linux 4.20). So it hangs on no route, neighbour or bridge table, each of which another CNI
does without. The counters of all interfaces are one dump (RTM_GETSTATS, linux 4.7; linux/if_link.h).

Interfaces of other kinds (macvlan, ipvlan, SR-IOV) have no end on the node and are not found.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from netacct import rtnetlink
from netacct.model import Address, Count, Direction, family_of

# linux/netlink.h, linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h
_SOL_NETLINK, _NETLINK_GET_STRICT_CHK = 270, 12
_RTM_GETLINK, _RTM_GETADDR, _RTM_GETSTATS = 18, 22, 94
_IFINFOMSG = struct.Struct("=BxHiII")  # family, type, index, flags, change
_IFADDRMSG = struct.Struct("=BBBBI")  # family, prefixlen, flags, scope, index
_IF_STATS_MSG = struct.Struct("=BxxxII")  # family, index, filter_mask
_ATTRIBUTE = struct.Struct("=HHi")  # nlattr: length, type; a number
_IFLA_IFNAME, _IFLA_LINK, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_LINK_NETNSID = 3, 5, 10, 18, 37
_IFLA_INFO_KIND, _IFLA_INFO_DATA = 1, 2
_IFLA_BR_NF_CALL = {4: 36, 6: 37}  # IFLA_BR_NF_CALL_IPTABLES, _IP6TABLES
_IFA_ADDRESS, _IFA_LOCAL, _IFA_TARGET_NETNSID = 1, 2, 10
_IFLA_STATS_LINK_64 = 1
_STATS = struct.Struct("=4Q")  # the begin of rtnl_link_stats64: packets received, sent, bytes received, sent

_HEADER = 14
"""Bytes of the Ethernet header, which interfaces count and netfilter does not."""

_NO_NAMESPACE = (errno.EINVAL, errno.EACCES)
"""The kernel's answers about a namespace that is gone, or in which somebody else is root."""

_CALLS = {4: "iptables", 6: "ip6tables"}
_SYSCTLS = "/proc/sys/net/bridge/bridge-nf-call-"


class PodLink(NamedTuple):
    """The node's end of a veth.

    Args:
        number: its number on the node.
        addresses: of its other end.
        unfiltered: it is a port of a bridge that does not show netfilter all families of these addresses.
    """

    number: int
    addresses: frozenset[Address]
    unfiltered: bool


class Traffic(NamedTuple):
    """What an interface counted, seen from the pod; bytes without link headers (layer 3)."""

    receive: Count
    transmit: Count

    def of(self, direction: Direction) -> Count:
        """One of the two."""
        return self.receive if direction is Direction.RECEIVE else self.transmit


class _Veth(NamedTuple):
    """What tells one veth from a later one: each of the numbers may be given again, and some CNIs' names are fixed."""

    number: int
    name: bytes
    peer: int
    namespace: int


class Interfaces:
    """Those of the network namespace of the thread that first asks; for that thread only. All methods raise OSError."""

    def __init__(self) -> None:
        self._channel: socket.socket | None = None
        self._addresses: dict[_Veth, frozenset[Address]] = {}

    def close(self) -> None:
        """Close the socket; the next question opens another."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def find(self, wanted: Collection[Address]) -> tuple[PodLink, ...]:
        """The links to these addresses. A namespace is asked for its addresses until it has one of these."""
        veths, blind = self._links()
        wanted = frozenset(wanted)
        known = {veth: self._addresses.get(veth, frozenset()) for veth in veths}
        asked: dict[int, Mapping[int, frozenset[Address]]] = {}
        for veth in veths:
            if known[veth].isdisjoint(wanted):
                if veth.namespace not in asked:
                    asked[veth.namespace] = self._addresses_in(veth.namespace)
                known[veth] = asked[veth.namespace].get(veth.peer, frozenset())
        self._addresses = known
        found = []
        for veth, master in veths.items():
            held = known[veth] & wanted
            if held:
                unfiltered = any(family_of(ip) in blind.get(master, ()) for ip in held)
                found.append(PodLink(veth.number, held, unfiltered))
        return tuple(found)

    def read(self) -> dict[int, Traffic]:
        """What each interface counted, by its number."""
        found = {}
        for body in self._dump(_RTM_GETSTATS, _IF_STATS_MSG.pack(socket.AF_UNSPEC, 0, 1 << (_IFLA_STATS_LINK_64 - 1))):
            _family, index, _mask = _IF_STATS_MSG.unpack_from(body)
            values = rtnetlink.attributes(body, _IF_STATS_MSG.size).get(_IFLA_STATS_LINK_64)
            if values is not None:
                # What the node's end received, the pod sent.
                sent, received, sent_bytes, received_bytes = _STATS.unpack_from(values)
                found[index] = Traffic(_layer3(received_bytes, received), _layer3(sent_bytes, sent))
        return found

    def _links(self) -> tuple[dict[_Veth, int], dict[int, frozenset[int]]]:
        """The veths with their other end elsewhere, and whose ports they are (0: nobody's).

        And each bridge, with the families that netfilter does not see there.
        """
        unseen = frozenset(family for family in _CALLS if not _sysctl(family))
        veths, blind = {}, {}
        for body in self._dump(_RTM_GETLINK, _IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)):
            index = _IFINFOMSG.unpack_from(body)[2]
            found = rtnetlink.attributes(body, _IFINFOMSG.size)
            info = rtnetlink.attributes(found.get(_IFLA_LINKINFO, b""), 0)
            kind = info.get(_IFLA_INFO_KIND, b"").rstrip(b"\0")
            if kind == b"veth" and _IFLA_LINK_NETNSID in found:
                peer, namespace = (_number(found.get(key)) for key in (_IFLA_LINK, _IFLA_LINK_NETNSID))
                veth = _Veth(index, found.get(_IFLA_IFNAME, b""), peer, namespace)
                veths[veth] = _number(found.get(_IFLA_MASTER))
            elif kind == b"bridge":
                own = rtnetlink.attributes(info.get(_IFLA_INFO_DATA, b""), 0)
                blind[index] = frozenset(family for family in unseen if not any(own.get(_IFLA_BR_NF_CALL[family], b"")))
        return veths, blind

    def _addresses_in(self, namespace: int) -> Mapping[int, frozenset[Address]]:
        """The addresses of each interface of another namespace, by its number there; nothing of one that is gone."""
        question = _IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        question += _ATTRIBUTE.pack(_ATTRIBUTE.size, _IFA_TARGET_NETNSID, namespace)
        found: dict[int, set[Address]] = {}
        try:
            bodies = self._dump(_RTM_GETADDR, question)
        except OSError as error:
            if error.errno in _NO_NAMESPACE:
                return {}
            raise
        for body in bodies:
            values = rtnetlink.attributes(body, _IFADDRMSG.size)
            ip = values.get(_IFA_LOCAL) or values.get(_IFA_ADDRESS)  # of a point-to-point address, ADDRESS is the peer
            if ip is not None:
                found.setdefault(_IFADDRMSG.unpack_from(body)[4], set()).add(ip)
        return {index: frozenset(ips) for index, ips in found.items()}

    def _dump(self, kind: int, body: bytes) -> Iterator[bytes]:
        """The bodies of everything of one kind."""
        channel = self._open()
        try:
            return (message.body for message in rtnetlink.dump_whole(channel, kind, body))
        except TimeoutError:
            self.close()
            raise

    def _open(self) -> socket.socket:
        if self._channel is None:
            self._channel = rtnetlink.connect()
            # Only then does the kernel look at IFA_TARGET_NETNSID in a request for a dump.
            self._channel.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
        return self._channel


def _layer3(count: int, packets: int) -> Count:
    return Count(max(count - _HEADER * packets, 0), packets)


def _number(value: bytes | None) -> int:
    return int.from_bytes(value or b"\0", sys.byteorder, signed=True)


def _sysctl(family: int) -> bool:
    """Whether bridges show frames of a family to netfilter; without br_netfilter there is no such switch."""
    try:
        return Path(_SYSCTLS + _CALLS[family]).read_bytes().strip() != b"0"
    except FileNotFoundError:
        return False
