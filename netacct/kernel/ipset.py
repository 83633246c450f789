"""ipset over netlink: read sets, fill them, make and destroy them.

Numbers and message layouts: linux/netfilter/ipset/ip_set.h. Reads are ours, because a counter set of 4,096 addresses
takes pyroute2 150 ms and this reader 3; so are bulk additions (one message carries 1,000 elements, as `ipset restore`
does it: 4,096 addresses in 12 sets take 0.1 s instead of 7). Sets are made, swapped and destroyed by pyroute2, but for
`bitmap:ip`, whose range it cannot express.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from netacct.errors import DatapathError, MissingFeatureError, NetacctError, PermissionRefusedError
from netacct.kernel.netlink import (
    NLA_F_NET_BYTEORDER,
    NLM_F_EXCL,
    Netlink,
    NetlinkError,
    attribute,
    attributes,
    find_attribute,
    nested,
)
from netacct.lean import bare_package
from netacct.model import Address, Family, family_of

_SUBSYSTEM = 6 << 8  # NFNL_SUBSYS_IPSET
_CREATE, _LIST, _ADD, _DEL = _SUBSYSTEM | 2, _SUBSYSTEM | 7, _SUBSYSTEM | 9, _SUBSYSTEM | 10

# attributes of a message
_PROTOCOL, _SETNAME, _TYPENAME, _REVISION, _FAMILY, _FLAGS, _DATA, _ADT, _LINENO = range(1, 10)
# attributes inside _DATA, for elements and for the set's own properties
_IP, _IP_TO, _CIDR, _CADT_FLAGS = 1, 2, 3, 8
_TIMEOUT, _HASHSIZE, _MAXELEM, _NETMASK, _REFERENCES = 6, 18, 19, 20, 25
_BYTES, _PACKETS = 24, 25

_LIST_SETNAME, _LIST_HEADER = 1 << 1, 1 << 2  # IPSET_FLAG_LIST_*
_WITH_COUNTERS, _WITH_FORCEADD = 1 << 3, 1 << 5  # IPSET_FLAG_WITH_*
_VERSION = attribute(_PROTOCOL, b"\x06")

_ERR_FIND_TYPE, _ERR_MAX_SETS, _ERR_BUSY, _ERR_EXIST, _ERR_HASH_FULL = 4098, 4099, 4100, 4103, 4352

_BATCH = 1000  # elements per message: an attribute ends at 64 KiB, an IPv6 element with a prefix takes 36 bytes

# One element with counters, as the kernel sends it: headers of DATA, IP and IPADDR_*, the address, in hash:net CIDR,
# then headers and values of BYTES and PACKETS. Other lengths (a 64-bit padding attribute) go the slow way.
_ELEMENT = {
    40: struct.Struct(">12x4s4xQ4xQ"),
    48: struct.Struct(">12x4s8x4xQ4xQ"),
    52: struct.Struct(">12x16s4xQ4xQ"),
    60: struct.Struct(">12x16s8x4xQ4xQ"),
}
_LENGTH = struct.Struct("=H")


class SetFullError(DatapathError):
    """A set has no room for another element."""


class Element(NamedTuple):
    """One element: an address, its prefix length (`hash:net`, else None), its counters."""

    ip: Address
    cidr: int | None
    bytes: int
    packets: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a set is. `hashsize` and `maxelem` are 0 for bitmaps, `netmask` is 0 where there is none.

    range: the first and last address of a bitmap; None for other types.
    forgets: elements go by themselves: after a time, or to make room for others.
    """

    type: str
    family: Family
    hashsize: int
    maxelem: int
    netmask: int
    counters: bool
    references: int
    range: tuple[Address, Address] | None = None
    forgets: bool = False


class Counters(NamedTuple):
    """(bytes, packets) of each element, and the last address of the range where the set is a bitmap."""

    counts: dict[Address, tuple[int, int]]
    end: Address | None


def set_names(netlink: Netlink, prefix: str) -> list[str]:
    """The names of all sets that start with `prefix`."""
    with _explained("list sets"):
        messages = netlink.dump(_LIST, 0, _VERSION + attribute(_FLAGS, _LIST_SETNAME.to_bytes(4, "big")))
    names = [_text(value) for data in messages for kind, value in attributes(data) if kind == _SETNAME]
    return sorted(name for name in names if name.startswith(prefix))


def read_header(netlink: Netlink, name: str) -> Header | None:
    """What the set is; None where there is no such set."""
    flags = attribute(_FLAGS, _LIST_HEADER.to_bytes(4, "big"))
    messages = _list(netlink, name, flags)
    return _header(messages[0]) if messages else None


def read_elements(netlink: Netlink, name: str) -> list[Element]:
    """All elements of any kind of set; empty where there is no such set."""
    return [element for adt in _adt(_list(netlink, name)) for element in _slow(adt)]


def read_counters(netlink: Netlink, name: str) -> dict[Address, tuple[int, int]] | None:
    """(bytes, packets) of each address (of each prefix's, in `hash:net`); None where there is no such set."""
    messages = _list(netlink, name)
    return _counts(messages) if messages else None


def read_set(netlink: Netlink, name: str) -> Counters | None:
    """What `read_counters` gives, and the end of a bitmap; None where there is no such set."""
    messages = _list(netlink, name)
    if not messages:
        return None
    properties = find_attribute(messages[0], _DATA)
    end = None if properties is None else find_attribute(properties, _IP_TO)
    return Counters(_counts(messages), None if end is None else _packed(end))


def _counts(messages: Iterable[memoryview]) -> dict[Address, tuple[int, int]]:
    counts: dict[Address, tuple[int, int]] = {}
    for adt in _adt(messages):
        layout = _ELEMENT.get(_LENGTH.unpack_from(adt)[0])
        if layout is None or len(adt) % layout.size:
            counts.update((element.ip, (element.bytes, element.packets)) for element in _slow(adt))
            continue
        # a quarter of a microsecond each: most of a large reading
        counts.update({ip: (octets, packets) for ip, octets, packets in layout.iter_unpack(adt)})
    return counts


def add(netlink: Netlink, name: str, elements: Iterable[tuple[Address, int | None]]) -> None:
    """Add (address, prefix length or None) elements; those that are there keep their counters, new ones start at 0.

    Errors: SetFullError (elements before the one that found no room are in); DatapathError.
    """
    _change(netlink, _ADD, name, elements)


def add_fresh(netlink: Netlink, name: str, ips: Iterable[Address]) -> None:
    """Add addresses to a set with counters; those that are there keep theirs, new ones start at 0.

    `add` would not do for a set from which somebody deleted: unless it is told values, the kernel leaves a new element
    with what an old one counted in its place (ip_set_init_counter in linux/netfilter/ipset/ip_set.h). Told values, it
    would give them also to an element that is there, but for NLM_F_EXCL, which ends a batch at such an element.

    Errors: as `add`.
    """
    rest = iter(ips)
    head = _VERSION + _name(name) + attribute(_LINENO, (1).to_bytes(4, "big"))
    with _explained(f"add to set {name}"):
        while batch := list(islice(rest, _BATCH)):
            body = nested(_ADT, *(nested(_DATA, _address(_IP, ip), _counters(0, 0)) for ip in batch))
            try:
                netlink.request(_ADD, NLM_F_EXCL, _nfproto(family_of(batch[0])), head + body)
            except NetlinkError as error:
                if error.code != _ERR_EXIST:
                    raise
                for ip in batch:
                    add_counted(netlink, name, ip, 0, 0)


def discard(netlink: Netlink, name: str, ips: Iterable[Address]) -> None:
    """Take addresses out of a set, whether they are in it or not."""
    _change(netlink, _DEL, name, ((ip, None) for ip in ips))


def add_counted(netlink: Netlink, name: str, ip: Address, octets: int, packets: int) -> bool:
    """Add one new element whose counters start at the given values; False where it is there already."""
    data = nested(_DATA, _address(_IP, ip), _counters(octets, packets))
    try:
        netlink.request(_ADD, NLM_F_EXCL, _nfproto(family_of(ip)), _VERSION + _name(name) + data)
    except NetlinkError as error:
        if error.code == _ERR_EXIST:
            return False
        raise _explain(error, f"add to set {name}") from error
    return True


class Sets:
    """Makes, swaps and destroys sets, through pyroute2. For one thread; close it after use."""

    def __init__(self, netlink: Netlink) -> None:
        # 1.2 MB instead of 9, which commands that touch no kernel shall not pay at all
        with bare_package("pyroute2"):
            from pyroute2.ipset import IPSet  # noqa: PLC0415

        self._netlink = netlink
        with _explained("open a netlink socket for ipset"):
            self._ipset: Any = IPSet()

    def close(self) -> None:
        """Close the socket."""
        self._ipset.close()

    def create_hash(self, name: str, kind: str, family: Family, size: int, buckets: int, *, counters: bool) -> None:
        """Make a hash set for at most `size` elements. Errors: DatapathError, also where it exists."""
        with _explained(f"create set {name} of type {kind}"):
            self._ipset.create(
                name,
                stype=kind,
                family=_nfproto(family),
                counters=counters,
                maxelem=size,
                hashsize=buckets,
            )

    def create_bitmap(self, name: str, ends: tuple[Address, Address], netmask: int, *, counters: bool) -> None:
        """Make a `bitmap:ip` set, whose lookup is the cheapest there is, of at most 65,536 elements.

        Args:
            name: how it is called.
            ends: its first and last IPv4 address.
            netmask: the prefix length of what one element stands for; 0 for an address each.
            counters: whether its elements count.

        Errors: DatapathError, also where it exists.
        """
        data = nested(
            _DATA,
            *(_address(kind, ip) for kind, ip in zip((_IP, _IP_TO), ends, strict=True)),
            attribute(_NETMASK, bytes([netmask])) if netmask else b"",
            attribute(_CADT_FLAGS | NLA_F_NET_BYTEORDER, _WITH_COUNTERS.to_bytes(4, "big")) if counters else b"",
        )
        kind = "bitmap:ip"
        with _explained(f"create set {name} of type {kind}"):
            revision = self._ipset.get_supported_revisions(kind)[1]
            head = attribute(_TYPENAME, kind.encode() + b"\0") + attribute(_REVISION, bytes([revision]))
            body = _VERSION + _name(name) + head + attribute(_FAMILY, bytes([_nfproto(4)])) + data
            self._netlink.request(_CREATE, NLM_F_EXCL, _nfproto(4), body)

    def swap(self, one: str, other: str) -> None:
        """Exchange the contents of two sets; rules follow the name."""
        with _explained(f"swap sets {one} and {other}"):
            self._ipset.swap(one, other)

    def destroy(self, name: str) -> bool:
        """Destroy a set, if it is there; False where a rule still refers to it."""
        try:
            self._ipset.destroy(name)
        except Exception as error:
            code = getattr(error, "code", None)
            if code == errno.ENOENT:
                return True
            if code == _ERR_BUSY:
                return False
            raise _explain(error, f"destroy set {name}") from error
        return True


def _list(netlink: Netlink, name: str, flags: bytes = b"") -> list[memoryview]:
    """The messages that describe one set, none where it does not exist."""
    try:
        return netlink.dump(_LIST, 0, _VERSION + _name(name) + flags)
    except NetlinkError as error:
        if error.code == errno.ENOENT:
            return []
        raise _explain(error, f"read set {name}") from error


def _adt(messages: Iterable[memoryview]) -> Iterator[memoryview]:
    return (value for data in messages if (value := find_attribute(data, _ADT)))


def _header(message: memoryview) -> Header:
    top = dict(attributes(message))
    own = dict(attributes(top[_DATA]))
    number = {kind: int.from_bytes(own.get(kind, b""), "big") for kind in (_HASHSIZE, _MAXELEM, _NETMASK, _CADT_FLAGS)}
    return Header(
        type=_text(top[_TYPENAME]),
        family=4 if top[_FAMILY][0] == socket.AF_INET else 6,
        hashsize=number[_HASHSIZE],
        maxelem=number[_MAXELEM],
        netmask=number[_NETMASK],
        counters=bool(number[_CADT_FLAGS] & _WITH_COUNTERS),
        references=int.from_bytes(own.get(_REFERENCES, b""), "big"),
        range=(_packed(own[_IP]), _packed(own[_IP_TO])) if _IP_TO in own else None,
        forgets=_TIMEOUT in own or bool(number[_CADT_FLAGS] & _WITH_FORCEADD),
    )


def _packed(value: memoryview) -> Address:
    """The address in a nested attribute: one of type IPADDR_IPV4 or IPADDR_IPV6, after its header."""
    return bytes(value[4:])


def _slow(adt: memoryview) -> Iterator[Element]:
    for _, data in attributes(adt):
        own = dict(attributes(data))
        octets, packets = (int.from_bytes(own.get(kind, b""), "big") for kind in (_BYTES, _PACKETS))
        yield Element(_packed(own[_IP]), own[_CIDR][0] if _CIDR in own else None, octets, packets)


def _change(netlink: Netlink, command: int, name: str, elements: Iterable[tuple[Address, int | None]]) -> None:
    rest = iter(elements)
    # The kernel insists on a line number with several elements; it reports it back on errors, which nobody here reads.
    head = _VERSION + _name(name) + attribute(_LINENO, (1).to_bytes(4, "big"))
    with _explained(f"{'add to' if command == _ADD else 'delete from'} set {name}"):
        while batch := list(islice(rest, _BATCH)):
            body = nested(_ADT, *(_element(ip, cidr) for ip, cidr in batch))
            netlink.request(command, 0, _nfproto(family_of(batch[0][0])), head + body)


def _element(ip: Address, cidr: int | None) -> bytes:
    return nested(_DATA, _address(_IP, ip), b"" if cidr is None else attribute(_CIDR, bytes([cidr])))


def _counters(octets: int, packets: int) -> bytes:
    values = ((_BYTES, octets), (_PACKETS, packets))
    return b"".join(attribute(kind | NLA_F_NET_BYTEORDER, value.to_bytes(8, "big")) for kind, value in values)


def _address(kind: int, ip: Address) -> bytes:
    return nested(kind, attribute((1 if len(ip) == 4 else 2) | NLA_F_NET_BYTEORDER, ip))


def _name(name: str) -> bytes:
    return attribute(_SETNAME, name.encode() + b"\0")


def _text(value: memoryview) -> str:
    return bytes(value).rstrip(b"\0").decode("ascii", "replace")


def _nfproto(family: Family) -> int:
    return int(socket.AF_INET if family == 4 else socket.AF_INET6)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except NetlinkError as error:
        raise _explain(error, what) from error
    except NetacctError:
        raise
    except Exception as error:  # pyroute2 has no common base class for what it raises
        raise _explain(error, what) from error


def _explain(error: Exception, what: str) -> DatapathError | PermissionRefusedError:
    """The error to raise for what the kernel or pyroute2 answered."""
    code = getattr(error, "code", None) or getattr(error, "errno", None)
    if code in (errno.EPERM, errno.EACCES):
        return PermissionRefusedError(f"cannot {what}: CAP_NET_ADMIN is missing")
    if code == _ERR_FIND_TYPE:
        return MissingFeatureError(f"cannot {what}: this kernel lacks the set type (module ip_set_*)")
    if code == errno.EINVAL and what.startswith(("list", "open")):  # nfnetlink has no subsystem 6
        return MissingFeatureError(f"cannot {what}: this kernel lacks ip_set")
    if code == _ERR_HASH_FULL:
        return SetFullError(f"cannot {what}: it is full")
    if code == _ERR_MAX_SETS:
        return DatapathError(f"cannot {what}: the kernel's number of sets is exhausted (ip_set max_sets)")
    return DatapathError(f"cannot {what}: {error}")
