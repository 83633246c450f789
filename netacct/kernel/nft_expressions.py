"""The parts of a rule as nf_tables' expressions, in the forms that the kernel runs fastest. Pure.

A comparison of one, two or four bytes has a fast path in the kernel, three bytes have none, and nft(8) makes three of a
/24. So a prefix that does not end at such a length is four bytes, cut and compared; and an IPv6 prefix is compared in
words of four bytes, the last one first, because it tells most addresses apart. `nft list` shows some of this as
`10.244.1.0/24` and some as `@nh,96,32`; what it shows, given back to it, would be the slow form.

Numbers and layouts: linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from netacct.kernel import nft_parts as parts
from netacct.kernel.netlink import NLA_F_NESTED, NLA_TYPE_MASK, attribute, attributes, nested
from netacct.kernel.nft_many import width_in_set, width_of
from netacct.kernel.nft_messages import GOTO, JUMP, LIST_ELEMENT, RETURN, counter, expression, text, u32, verdict
from netacct.model import Family, Network

_REGISTER = attribute(1, u32(1))  # NFT_REG_1, where its number is the first attribute
_NETWORK_HEADER, _TRANSPORT_HEADER = 1, 2
_EQUAL, _UNEQUAL = 0, 1
_MARK, _IN, _OUT, _PROTOCOL = 3, 4, 5, 16  # NFT_META_*
_LOOPBACK = 1  # the index of lo in every network namespace (LOOPBACK_IFINDEX)
_DESTINATION_PORT = 2
_CGROUP = 3  # NFT_SOCKET_CGROUPV2
_OFFSETS: dict[Family, dict[str, int]] = {4: {"src": 12, "dst": 16}, 6: {"src": 8, "dst": 24}}
_DYNSET_EXPRESSION = 7
_WORD = 32
_WHOLE_WORD = 0xFFFFFFFF
_NO_REGISTER = attribute(1, u32(0))  # NFT_REG_VERDICT

_HOST_U32 = struct.Struct("=I")
_ATTRIBUTE = struct.Struct("=HH")


def encode(rule: parts.Rule, family: Family, names: Mapping[str, str]) -> list[bytes]:
    """The expressions of a rule.

    Args:
        rule: what it is to do.
        family: of the table that it is in.
        names: the kernel's names of counter sets and counters.
    """
    return [one for part in rule for one in _part(part, family, names)]


def _part(part: parts.Part, family: Family, names: Mapping[str, str]) -> list[bytes]:
    match part:
        case parts.Prefix() | parts.Member() | parts.Choose() | parts.CountAt() | parts.CountOf() | parts.AddTo():
            return _address(part, family, names)
        case parts.Jump(chain):
            return [_go(JUMP, chain)]
        case parts.Goto(chain):
            return [_go(GOTO, chain)]
        case parts.Return():
            return [_go(RETURN)]
        case parts.Tally(name):
            return [expression("objref", attribute(1, u32(1)), attribute(2, text(names[name])))]
        case _:
            return _property(part)


def _address(
    part: parts.Prefix | parts.Member | parts.Choose | parts.CountAt | parts.CountOf | parts.AddTo,
    family: Family,
    names: Mapping[str, str],
) -> list[bytes]:
    """Expressions on an end of the packet: its address, or its socket here."""
    whole = 32 if family == 4 else 128
    match part:
        case parts.Prefix(side, network):
            return _prefix(_OFFSETS[family][side], network)
        case parts.Member(side, content, length):
            return [*_cut(family, side, length, width_in_set(length, whole)), _lookup(content)]
        case parts.Choose(side, content, length):
            return [*_cut(family, side, length, width_of(length, whole)), _lookup(content, attribute(3, u32(0)))]
        case parts.CountAt(side, name):
            return [*_cut(family, side, whole, whole // 8), _lookup(names[name])]
        case parts.CountOf(level, name):
            return [_cgroup(level), _lookup(names[name])]
        case parts.AddTo(side, name):
            return [*_cut(family, side, whole, whole // 8), _add(names[name])]


def _property(part: parts.NotLoopback | parts.Protocol | parts.UdpPort | parts.Mark) -> list[bytes]:
    """Expressions on anything else of the packet."""
    match part:
        case parts.NotLoopback(way):
            return [_meta(_IN if way == "iif" else _OUT), _compare(_HOST_U32.pack(_LOOPBACK), _UNEQUAL)]
        case parts.Protocol(number):
            return [_meta(_PROTOCOL), _compare(bytes([number]))]
        case parts.UdpPort(port):
            return [_load(_TRANSPORT_HEADER, _DESTINATION_PORT, 2), _compare(port.to_bytes(2, "big"))]
        case parts.Mark(value, mask):
            return _mark(value, mask)


def _prefix(offset: int, network: Network) -> list[bytes]:
    """Expressions that let pass what has an address at this offset in the prefix; none for a /0."""
    bits, length, value = network.max_prefixlen, network.prefixlen, int(network.network_address)
    found = []
    for at in reversed(range(0, length, _WORD)):
        word = value >> (bits - _WORD - at) & _WHOLE_WORD
        found += _compare_word(offset + at // 8, word, min(length - at, _WORD))
    return found


def _compare_word(offset: int, word: int, length: int) -> list[bytes]:
    """Expressions that compare the first `length` bits of a word."""
    if length in (8, 16, 32):
        size = length // 8
        return [_load(_NETWORK_HEADER, offset, size), _compare((word >> _WORD - length).to_bytes(size, "big"))]
    mask = _WHOLE_WORD << (_WORD - length) & _WHOLE_WORD
    return [_load(_NETWORK_HEADER, offset, 4), _and_xor(u32(mask), u32(0)), _compare(u32(word))]


def _cut(family: Family, side: parts.Side, length: int, width: int) -> list[bytes]:
    """Expressions that load the first `length` bits of an address, as `width` bytes."""
    load = _load(_NETWORK_HEADER, _OFFSETS[family][side], width)
    if length == 8 * width:
        return [load]
    mask = ((1 << length) - 1) << (8 * width - length)
    return [load, _and_xor(mask.to_bytes(width, "big"), bytes(width))]


def _mark(value: int, mask: int) -> list[bytes]:
    """Expressions that stop where a bit of the mask is set, and else set the value; no bit outside is written."""
    host = _HOST_U32.pack
    return [
        _meta(_MARK),
        _and_xor(host(mask), host(0)),
        _compare(host(0)),
        _meta(_MARK),
        _and_xor(host(~mask & _WHOLE_WORD), host(value)),
        expression("meta", attribute(2, u32(_MARK)), attribute(3, u32(1))),
    ]


def _load(base: int, offset: int, size: int) -> bytes:
    return expression("payload", _REGISTER, attribute(2, u32(base)), attribute(3, u32(offset)), attribute(4, u32(size)))


def _meta(key: int) -> bytes:
    return expression("meta", _REGISTER, attribute(2, u32(key)))


def _compare(value: bytes, operator: int = _EQUAL) -> bytes:
    return expression("cmp", _REGISTER, attribute(2, u32(operator)), nested(3, attribute(1, value)))


def _and_xor(mask: bytes, xor: bytes) -> bytes:
    return expression(
        "bitwise",
        _REGISTER,
        attribute(2, u32(1)),
        attribute(3, u32(len(mask))),
        nested(4, attribute(1, mask)),
        nested(5, attribute(1, xor)),
    )


def _lookup(name: str, *verdict_register: bytes) -> bytes:
    return expression("lookup", attribute(1, text(name)), attribute(2, u32(1)), *verdict_register, attribute(5, u32(0)))


def _cgroup(level: int) -> bytes:
    """Load the number of a cgroup: that of the packet's socket, or the one around it which is so deep in the tree."""
    return expression("socket", attribute(1, u32(_CGROUP)), attribute(2, u32(1)), attribute(3, u32(level)))


def _add(name: str) -> bytes:
    operation, key = attribute(3, u32(0)), attribute(4, u32(1))  # NFT_DYNSET_OP_ADD
    return expression("dynset", attribute(1, text(name)), operation, key, nested(_DYNSET_EXPRESSION, counter()))


def _go(code: int, chain: str = "") -> bytes:
    return expression("immediate", _NO_REGISTER, nested(2, verdict(code, chain)))


def same(wanted: list[bytes], found: memoryview) -> bool:
    """Whether a rule that the kernel has does what is wanted, whatever attributes a newer kernel may add.

    Args:
        wanted: as `encode` gives it.
        found: the kernel's RULE_EXPRESSIONS.
    """
    present = [value for kind, value in attributes(found) if kind == LIST_ELEMENT]
    return len(present) == len(wanted) and all(
        _contained(memoryview(one), other) for one, other in zip(wanted, present, strict=True)
    )


def _contained(wanted: memoryview, found: memoryview) -> bool:
    present = dict(attributes(found))
    offset = 0
    while offset < len(wanted):
        length, kind = _ATTRIBUTE.unpack_from(wanted, offset)
        value = wanted[offset + _ATTRIBUTE.size : offset + length]
        other = present.get(kind & NLA_TYPE_MASK)
        if other is None and kind == _DYNSET_EXPRESSION | NLA_F_NESTED:
            other = value  # not shown where the set itself says that its elements count
        if other is None or not (_contained(value, other) if kind & NLA_F_NESTED else value == other):
            return False
        offset += (length + 3) & ~3
    return True
