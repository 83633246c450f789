"""Links and routes as values, from the messages of rtnetlink(7)."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import NamedTuple

from netacct import rtnetlink
from netacct.model import Network
from netacct.rtnetlink import Message

# linux/rtnetlink.h, linux/if_link.h, linux/if.h
RTM_NEWLINK, RTM_DELLINK, _RTM_GETLINK = 16, 17, 18
RTM_NEWROUTE, RTM_DELROUTE, _RTM_GETROUTE = 24, 25, 26
RTN_UNICAST, RTN_LOCAL = 1, 2
_RTMGRP_LINK, _RTMGRP_IPV4_ROUTE, _RTMGRP_IPV6_ROUTE = 0x1, 0x40, 0x400
_IFINFOMSG = struct.Struct("=BxHiII")  # family, type, index, flags, change
_RTMSG = struct.Struct("=BBBBBBBBI")  # family, dst_len, src_len, tos, table, protocol, scope, type, flags
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1
_IFF_UP = 0x1
_RTA_DST, _RTA_OIF = 1, 4
_RTM_F_CLONED = 0x200

GROUPS = _RTMGRP_LINK | _RTMGRP_IPV4_ROUTE | _RTMGRP_IPV6_ROUTE
"""What to subscribe to for both kinds of messages."""


class Link(NamedTuple):
    """A network interface: its number (ifindex), name and kind ("" for one of hardware)."""

    number: int
    name: str
    kind: str
    up: bool


class Route(NamedTuple):
    """A route to a network; `kind` is RTN_UNICAST, RTN_LOCAL …, `link` the number of its interface (0: none)."""

    network: Network
    kind: int
    protocol: int
    link: int


def link(message: Message) -> Link | None:
    """What RTM_NEWLINK or RTM_DELLINK is about; None for a bridge's word about its port (AF_BRIDGE)."""
    family, _type, index, flags, _change = _IFINFOMSG.unpack_from(message.body)
    if family != socket.AF_UNSPEC:
        return None
    found = rtnetlink.attributes(message.body, _IFINFOMSG.size)
    kind = rtnetlink.attributes(found.get(_IFLA_LINKINFO, b""), 0).get(_IFLA_INFO_KIND, b"")
    return Link(index, _text(found.get(_IFLA_IFNAME, b"")), _text(kind), bool(flags & _IFF_UP))


def route(message: Message) -> Route | None:
    """What RTM_NEWROUTE or RTM_DELROUTE is about; None for default routes, caches, and other families than IP."""
    family, length, _source, _tos, _table, protocol, _scope, kind, flags = _RTMSG.unpack_from(message.body)
    size = {socket.AF_INET: 4, socket.AF_INET6: 16}.get(family, 0)
    if not size or not length or flags & _RTM_F_CLONED:
        return None
    found = rtnetlink.attributes(message.body, _RTMSG.size)
    ip, index = found.get(_RTA_DST, b""), found.get(_RTA_OIF, b"")
    if len(ip) != size:
        return None
    return Route(
        ipaddress.ip_network((ip, length)), kind, protocol, struct.unpack("=i", index)[0] if len(index) == 4 else 0
    )


def dump(requests: socket.socket) -> Iterator[Message]:
    """All links, then all routes of both families. Raises OSError."""
    questions = (
        (_RTM_GETLINK, _IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)),
        (_RTM_GETROUTE, _RTMSG.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)),
        (_RTM_GETROUTE, _RTMSG.pack(socket.AF_INET6, 0, 0, 0, 0, 0, 0, 0, 0)),
    )
    for kind, body in questions:
        yield from rtnetlink.dump_whole(requests, kind, body)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
