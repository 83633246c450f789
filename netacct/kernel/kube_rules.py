"""Cluster ranges in kube-proxy's rules, for a node where its configuration is not to be seen.

kube-proxy masquerades what comes from outside of the pods' range (`--cluster-cidr`), by a rule that says `not from`:

    iptables   table nat, chain KUBE-SVC-…: `! -s 10.244.0.0/16 … -j KUBE-MARK-MASQ` (pkg/proxy/iptables/proxier.go)
    nftables   table kube-proxy, chain services: `ip daddr @cluster-ips ip saddr != 10.244.0.0/16 …`; in older releases
               in the chain of each Service (pkg/proxy/nftables/proxier.go)

and its nftables mode drops what has no Service, by a rule that names the Services' ranges: chain cluster-ips-check,
`ip daddr { 10.96.0.0/16 } drop`.

The Service that is looked at is `default/kubernetes`, which every cluster has: the names of its chains are the same
everywhere (the first digits of sha256("default/kubernetes:https" + "tcp") in base32), and so a look costs the same for
one Service and for ten thousand. Only legacy tables can be had no other way than whole. Numbers: linux/netfilter/
nf_tables.h, nfnetlink.h, x_tables.h, linux/netfilter_ipv4/ip_tables.h and their IPv6 twins.
"""

from __future__ import annotations

import errno
import ipaddress
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from netacct.errors import DatapathError
from netacct.kernel import marks_xtables
from netacct.kernel.netlink import Netlink, NetlinkError, attribute, attributes
from netacct.model import Family, Network
from netacct.policy import POD, SERVICE, Prefix

SERVICE_CHAIN = "KUBE-SVC-NPX46M4PTMTKRN6Y"
LEGACY_LIMIT = 4 << 20
"""Bytes of a legacy nat table that are copied to find one rule: some 12,000 rules."""

_POD_CHAINS = (
    ("nat", SERVICE_CHAIN),
    ("kube-proxy", "services"),
    ("kube-proxy", "service-NPX46M4P-default/kubernetes/tcp/https"),
)
_SERVICE_CHAINS = (("kube-proxy", "cluster-ips-check"),)

_NFTABLES = 10 << 8  # NFNL_SUBSYS_NFTABLES
_GET_RULE, _GET_SET_ELEMENTS = _NFTABLES | 7, _NFTABLES | 13
_TABLE, _CHAIN, _EXPRESSIONS = 1, 2, 4
_NAME, _DATA = 1, 2
_ELEMENTS_TABLE, _ELEMENTS_SET, _ELEMENTS = 1, 2, 3
_ELEMENT_KEY, _ELEMENT_FLAGS, _INTERVAL_END = 1, 3, 1
_VALUE = 1  # NFTA_DATA_VALUE
_FAMILIES: Mapping[Family, int] = {4: 2, 6: 10}  # NFPROTO_*
_TOOL: Mapping[Family, str] = {4: "ip", 6: "ip6"}
_NETWORK_HEADER = 1  # NFT_PAYLOAD_NETWORK_HEADER
_EQUAL, _NOT_EQUAL = 0, 1  # NFT_CMP_*
_FIELDS: Mapping[Family, Mapping[int, str]] = {4: {12: "saddr", 16: "daddr"}, 6: {8: "saddr", 24: "daddr"}}
"""Where source and destination begin in the IP header."""

_BYTES: Mapping[Family, int] = {4: 4, 6: 16}
_NOTHING = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)

_ENTRY_SIZE: Mapping[Family, int] = {4: 112, 6: 168}
_INVERSE: Mapping[Family, int] = {4: 83, 6: 132}  # offset of invflags
_INVERSE_SOURCE = 0x08  # IPT_INV_SRCIP, IP6T_INV_SRCIP
_TARGET_HEADER = 32  # struct xt_entry_target; the name of a chain follows in its head
_HEAD = "ERROR"


class Match(NamedTuple):
    """A comparison of an address in a rule: `saddr` or `daddr`, whether it is `!=`, and with what.

    `name`: of the set, where it is with a set; then there is no network.
    """

    field: str
    inverse: bool
    network: Network | None = None
    name: str = ""


def read() -> list[Prefix]:
    """The ranges of pods and Services in kube-proxy's rules in this network namespace, but for legacy tables.

    Raises:
        DatapathError: rules could not be listed.
    """
    found: list[Prefix] = []
    with Netlink() as link:
        for family in _FAMILIES:
            for table, chain in _POD_CHAINS:
                matches = _matches(link, family, table, chain)
                found += _facts(POD, family, (table, chain), (m.network for m in matches if m.inverse))
            for table, chain in _SERVICE_CHAINS:
                ranges = _ranges(link, family, table, _matches(link, family, table, chain))
                found += _facts(SERVICE, family, (table, chain), ranges)
    return found


def _facts(
    traffic: str, family: Family, place: tuple[str, str], networks: Iterable[Network | None]
) -> Iterator[Prefix]:
    table, chain = place
    for network in networks:
        if network is not None:
            yield Prefix(network, traffic, f"found in kube-proxy's rules (nftables {_TOOL[family]} {table} {chain})")


def _matches(link: Netlink, family: Family, table: str, chain: str) -> list[Match]:
    """What the rules of a chain compare sources and destinations with; nothing where there is no such chain."""
    request = attribute(_TABLE, table.encode() + b"\0") + attribute(_CHAIN, chain.encode() + b"\0")
    found: list[Match] = []
    for message in _dump(link, _GET_RULE, family, request):
        parts = dict(attributes(message))
        # some kernels take no notice of the table or the chain in a request
        if (_text(parts[_TABLE]), _text(parts[_CHAIN])) == (table, chain) and _EXPRESSIONS in parts:
            found += parse_expressions(family, parts[_EXPRESSIONS])
    return found


def _ranges(link: Netlink, family: Family, table: str, matches: Iterable[Match]) -> Iterator[Network]:
    """The networks that destinations are compared with, also those of nameless sets."""
    for match in matches:
        if match.field != "daddr" or match.inverse:
            continue
        if match.network is not None:
            yield match.network
        elif match.name.startswith("__set"):  # a nameless one; cluster-ips has single addresses
            request = attribute(_ELEMENTS_TABLE, table.encode() + b"\0")
            request += attribute(_ELEMENTS_SET, match.name.encode() + b"\0")
            yield from parse_elements(_dump(link, _GET_SET_ELEMENTS, family, request))


def _dump(link: Netlink, kind: int, family: Family, request: bytes) -> list[memoryview]:
    try:
        return link.dump(kind, _FAMILIES[family], request)
    except NetlinkError as error:
        if error.code in _NOTHING:
            return []
        raise


def parse_expressions(family: Family, expressions: memoryview) -> list[Match]:
    """The comparisons of addresses in a rule, from NFTA_RULE_EXPRESSIONS.

    A comparison is a payload expression, perhaps a bitwise one with a mask, then cmp or lookup; of an address whose
    prefix ends at a byte, only so many bytes are loaded.
    """
    found: list[Match] = []
    field, size, mask = "", 0, b""
    for _, value in attributes(expressions):
        parts = dict(attributes(value))
        name = _text(parts[_NAME])
        data = dict(attributes(parts[_DATA])) if _DATA in parts else {}
        if name == "payload" and _number(data.get(2)) == _NETWORK_HEADER:
            field, size, mask = _FIELDS[family].get(_number(data.get(3)), ""), _number(data.get(4)), b""
        elif name == "bitwise" and field:
            mask = _value(data.get(4))
        elif name == "cmp" and field:
            network = _network(_BYTES[family], _value(data.get(3))[:size], mask[:size])
            if network is not None and _number(data.get(2)) in (_EQUAL, _NOT_EQUAL):
                found.append(Match(field, _number(data.get(2)) == _NOT_EQUAL, network))
            field = ""
        elif name == "lookup" and field:
            if size == _BYTES[family]:
                found.append(Match(field, _number(data.get(5)) == 1, name=_text(data[1])))
            field = ""
        else:
            field = ""
    return found


def parse_elements(messages: Iterable[memoryview]) -> Iterator[Network]:
    """The networks of a set of intervals, from NFTA_SET_ELEM_LIST_ELEMENTS: each begin, and the first address after."""
    begins: list[bytes] = []
    ends: list[bytes] = []
    for message in messages:
        for _, value in attributes(dict(attributes(message)).get(_ELEMENTS, memoryview(b""))):
            parts = dict(attributes(value))
            is_end = _ELEMENT_FLAGS in parts and _number(parts[_ELEMENT_FLAGS]) & _INTERVAL_END
            (ends if is_end else begins).append(_value(parts.get(_ELEMENT_KEY)))
    for begin in sorted(begins):
        after = min((end for end in ends if end > begin), default=None)
        first = ipaddress.ip_address(begin)
        if after is not None:
            yield from ipaddress.summarize_address_range(first, ipaddress.ip_address(after) - 1)


def _network(size: int, value: bytes, mask: bytes) -> Network | None:
    """The network of a compared value; None where the mask is none of a network."""
    length = len(value) * 8
    if mask:
        bits = int.from_bytes(mask, "big")
        length = bits.bit_count()
        if bits != ((1 << length) - 1) << (len(mask) * 8 - length):
            return None
    if not value:
        return None
    return ipaddress.ip_network((value.ljust(size, b"\0"), length), strict=False)


def read_legacy() -> list[Prefix]:
    """As `read`, of legacy tables, where there are any: each nat table is copied whole, if it is not too large.

    Raises:
        DatapathError: a table could not be read.
    """
    found: list[Prefix] = []
    families: tuple[Family, Family] = (4, 6)  # in the order of marks_xtables.KINDS
    for family, kind in zip(families, marks_xtables.KINDS, strict=True):
        if "nat" not in marks_xtables.tables(kind):
            continue
        try:
            _, blob = marks_xtables.entries(kind, "nat", LEGACY_LIMIT)
        except OSError as error:
            if error.errno == errno.EFBIG:
                continue
            raise DatapathError(f"reading the {kind.tool} table nat: {error.strerror}") from error
        words = f"found in kube-proxy's rules ({kind.tool} nat {SERVICE_CHAIN})"
        found += [Prefix(network, POD, words) for network in parse_legacy(family, kind.offsets, blob)]
    return found


def parse_legacy(family: Family, offsets: int, blob: bytes) -> Iterator[Network]:
    """What sources must not be in, in the rules of the chain of `default/kubernetes`.

    Args:
        family: which of the two structures it is.
        offsets: where target_offset and next_offset are in an entry.
        blob: the entries of the table nat.
    """
    name = blob.find(SERVICE_CHAIN.encode() + b"\0")  # nowhere but in the chain's head: jumps are offsets
    at = name - _TARGET_HEADER - _ENTRY_SIZE[family]
    if name < 0 or at < 0:
        return
    at += struct.unpack_from("=2xH", blob, at + offsets)[0]
    while at < len(blob):
        target, length = struct.unpack_from("=HH", blob, at + offsets)
        if blob[at + target + 2 : at + target + 2 + len(_HEAD) + 1] == _HEAD.encode() + b"\0" or not length:
            return
        if blob[at + _INVERSE[family]] & _INVERSE_SOURCE:
            size = _BYTES[family]
            network = _network(size, blob[at : at + size], blob[at + 2 * size : at + 3 * size])
            if network is not None:
                yield network
        at += length


def _value(data: memoryview | None) -> bytes:
    return bytes(dict(attributes(data)).get(_VALUE, b"")) if data is not None else b""


def _number(value: memoryview | None) -> int:
    return int.from_bytes(value, "big") if value is not None else -1


def _text(value: memoryview) -> str:
    return bytes(value).rstrip(b"\0").decode("utf-8", "replace")
