"""Network interfaces and their addresses, by raw rtnetlink dumps; the port of WireGuard by generic netlink.

Numbers: linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h, linux/genetlink.h, linux/wireguard.h.
"""

from __future__ import annotations

import ipaddress
import struct
import sys
from collections.abc import Iterable, Mapping

from netacct.doctor.facts import InterfaceNetwork, Link
from netacct.kernel.marks_route import dump
from netacct.kernel.netlink import attribute, attributes

_GET_LINK, _GET_ADDRESS = 18, 22
_IFINFO = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_IFADDR = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefixlen, flags, scope, index
_UP = 0x1
_NAME, _MASTER, _LINKINFO = 3, 10, 18
_KIND, _DATA = 1, 2
_PORTS = {"vxlan": 15, "geneve": 5}  # IFLA_VXLAN_PORT, IFLA_GENEVE_PORT, in network byte order
_CALL_IPTABLES, _CALL_IP6TABLES = 36, 37  # IFLA_BR_NF_CALL_*
_ADDRESS = 1

_GENERIC = 16  # NETLINK_GENERIC
_GENERIC_HEADER = struct.Struct("=BBxx")  # genlmsghdr: command, version
_CONTROL, _GET_FAMILY, _FAMILY_ID, _FAMILY_NAME = 16, 3, 1, 2  # GENL_ID_CTRL, CTRL_*
_GET_DEVICE, _DEVICE_NAME, _DEVICE_PORT = 0, 2, 6  # WG_CMD_GET_DEVICE, WGDEVICE_A_*
_SHORT = struct.Struct("=H")


def links() -> tuple[Link, ...]:
    """Every interface of this network namespace."""
    found = tuple(parse_link(message) for message in dump(_GET_LINK, bytes(_IFINFO.size)))
    return tuple(link._replace(port=_listen_port(link.name)) if link.kind == "wireguard" else link for link in found)


def parse_link(message: bytes) -> Link:
    """One RTM_NEWLINK message, without its header."""
    _, _, number, flags, _ = _IFINFO.unpack_from(message)
    parts = dict(attributes(memoryview(message)[_IFINFO.size :]))
    info = dict(attributes(parts[_LINKINFO])) if _LINKINFO in parts else {}
    kind = _text(info[_KIND]) if _KIND in info else ""
    data = dict(attributes(info[_DATA])) if _DATA in info else {}
    port = data.get(_PORTS.get(kind, 0), b"")
    calls = (bool(any(data.get(_CALL_IPTABLES, b""))), bool(any(data.get(_CALL_IP6TABLES, b""))))
    return Link(
        number,
        _text(parts[_NAME]),
        kind,
        bool(flags & _UP),
        int.from_bytes(parts.get(_MASTER, b""), sys.byteorder),
        int.from_bytes(port, "big"),
        calls if kind == "bridge" else (False, False),
    )


def networks() -> tuple[InterfaceNetwork, ...]:
    """The network of every address of every interface."""
    return tuple(parse_address(message) for message in dump(_GET_ADDRESS, bytes(_IFADDR.size)))


def parse_address(message: bytes) -> InterfaceNetwork:
    """One RTM_NEWADDR message, without its header."""
    _, length, _, _, number = _IFADDR.unpack_from(message)
    raw = bytes(dict(attributes(memoryview(message)[_IFADDR.size :]))[_ADDRESS])
    return InterfaceNetwork(number, ipaddress.ip_network((raw, length), strict=False))


def _listen_port(name: str) -> int:
    """The UDP port of a WireGuard interface; 0 where it has none."""
    families = family_ids(dump(_CONTROL, _GENERIC_HEADER.pack(_GET_FAMILY, 1), _GENERIC))
    if "wireguard" not in families:
        return 0
    request = _GENERIC_HEADER.pack(_GET_DEVICE, 1) + attribute(_DEVICE_NAME, name.encode() + b"\0")
    return parse_port(dump(families["wireguard"], request, _GENERIC))


def family_ids(messages: Iterable[bytes]) -> Mapping[str, int]:
    """The number of each family of generic netlink, by its name."""
    parsed = [dict(attributes(memoryview(message)[_GENERIC_HEADER.size :])) for message in messages]
    return {_text(parts[_FAMILY_NAME]): _SHORT.unpack(parts[_FAMILY_ID])[0] for parts in parsed}


def parse_port(messages: Iterable[bytes]) -> int:
    """The listen port in the answer about one WireGuard interface; only its first message has it."""
    for message in messages:
        parts = dict(attributes(memoryview(message)[_GENERIC_HEADER.size :]))
        if _DEVICE_PORT in parts:
            return int(_SHORT.unpack(parts[_DEVICE_PORT])[0])
    return 0


def _text(value: memoryview) -> str:
    return bytes(value).rstrip(b"\0").decode("utf-8", "replace")
