"""Which bits of a packet's mark a rule of somebody else's may change. Pure.

The structures are those of the kernel's uapi headers, in host byte order: linux/netfilter/xt_mark.h, xt_connmark.h,
xt_TPROXY.h, xt_set.h; nftables expressions are numbered as in linux/netfilter/nf_tables.h.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping
from typing import NamedTuple

ALL_BITS = 0xFFFFFFFF

_LONG_MODE = struct.Struct("@LB")
_PAIR = struct.Struct("=II")
_CONNMARK_0 = struct.Struct("@LLB")
_CONNMARK_1 = struct.Struct("=IIIB")
_CONNMARK_2 = struct.Struct("=IIIBBB")
_SET_3 = struct.Struct("=12xI")

_MARK_AND, _MARK_OR = 1, 2
_CONNMARK_RESTORE = 2
_SHIFT_RIGHT = 1
_MAP_SKBMARK = 1 << 8  # IPSET_FLAG_MAP_SKBMARK

_META_MARK = 3  # NFT_META_MARK
_BITWISE_MASK_XOR = 0  # NFT_BITWISE_MASK_XOR (NFT_BITWISE_BOOL before)
_FIRST_WORD = 8  # NFT_REG32_00; NFT_REG_1 to 4 are names for four words each
_UNTOUCHED = frozenset(("cmp", "counter", "limit", "log", "quota", "last", "range", "connlimit"))


class Writer(NamedTuple):
    """Something that changes marks: where it is, for people, and the bits that it may change."""

    where: str
    bits: int


def target_bits(name: str, revision: int, info: bytes) -> int:
    """The bits that an xtables target may change in the packet's mark; 0 for one that leaves the mark alone.

    Args:
        name: of the target, `MARK`.
        revision: of its parameters.
        info: the parameters as the kernel stores them. A structure of ours that does not fit counts as all bits.
    """
    reader = _READERS.get(name)
    if reader is None:
        return 0
    try:
        return reader(revision, info) & ALL_BITS
    except struct.error:
        return ALL_BITS


def _numbers(layout: struct.Struct, info: bytes) -> tuple[int, ...]:
    return layout.unpack_from(info)


def _mark(revision: int, info: bytes) -> int:
    if revision == 0:
        return ALL_BITS
    if revision == 1:
        operand, mode = _numbers(_LONG_MODE, info)
        return {_MARK_AND: ~operand, _MARK_OR: operand}.get(mode, ALL_BITS)
    value, mask = _numbers(_PAIR, info)  # (mark & ~mask) ^ value
    return mask | value


def _connmark(revision: int, info: bytes) -> int:
    if revision == 0:
        _, mask, mode = _numbers(_CONNMARK_0, info)
        return mask if mode == _CONNMARK_RESTORE else 0
    if revision == 1:
        _, connection, packet, mode = _numbers(_CONNMARK_1, info)
        return packet | connection if mode == _CONNMARK_RESTORE else 0
    _, connection, packet, direction, shift, mode = _numbers(_CONNMARK_2, info)
    shifted = connection >> shift if direction == _SHIFT_RIGHT else connection << shift
    return packet | shifted if mode == _CONNMARK_RESTORE else 0


def _tproxy(_: int, info: bytes) -> int:
    mask, value = _numbers(_PAIR, info)
    return mask | value


def _set(revision: int, info: bytes) -> int:
    """`--map-mark` takes mark and mask from the element that matches: they may be any bits."""
    if revision < 3:
        return 0
    (flags,) = _numbers(_SET_3, info)
    return ALL_BITS if flags & _MAP_SKBMARK else 0


def _all(_: int, __: bytes) -> int:
    return ALL_BITS


_READERS = {"MARK": _mark, "CONNMARK": _connmark, "TPROXY": _tproxy, "SET": _set, "HMARK": _all}


class Expression(NamedTuple):
    """One nftables expression: its name, and its attributes by number."""

    name: str
    attributes: Mapping[int, bytes]


def expression_bits(expressions: Iterable[Expression]) -> int:
    """The bits that one nftables rule may change in the packet's mark.

    Follows `meta mark set meta mark and X or Y` through the registers; whatever else is written to the mark (a
    constant, the connection's mark, a map) replaces all of it.
    """
    changed = 0
    # For each register that holds the packet's mark: the bits of it that were changed on the way.
    held: dict[int, int] = {}
    for name, attributes in expressions:
        if name == "target":
            changed |= target_bits(attributes[1].rstrip(b"\0").decode(), _number(attributes[2]), attributes[3])
        elif name == "meta" and _number(attributes[2]) == _META_MARK:
            if 3 in attributes:
                changed |= held.get(_register(attributes[3]), ALL_BITS)
            else:
                held[_register(attributes[1])] = 0
        elif name == "bitwise":
            _bitwise(attributes, held)
        elif name not in _UNTOUCHED:
            held.clear()
    return changed


def _bitwise(attributes: Mapping[int, bytes], held: dict[int, int]) -> None:
    """Register 2 = (register 1 & mask) ^ xor."""
    before = held.get(_register(attributes[1]))
    held.pop(_register(attributes[2]), None)
    operation = _number(attributes[6]) if 6 in attributes else _BITWISE_MASK_XOR
    if before is None or operation != _BITWISE_MASK_XOR or _number(attributes[3]) != 4:
        return
    mask, xor = (int.from_bytes(attributes[at][4:8], sys.byteorder) for at in (4, 5))
    held[_register(attributes[2])] = before | (~mask & ALL_BITS) | xor


def _number(value: bytes) -> int:
    """Numbers of nftables attributes are in network byte order."""
    return int.from_bytes(value, "big")


def _register(value: bytes) -> int:
    number = _number(value)
    return number if number >= _FIRST_WORD else _FIRST_WORD + 4 * (number - 1)
