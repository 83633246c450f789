"""The messages of nf_tables, encoded: tables, chains, rules, sets, elements, counters. Pure.

Numbers and layouts: linux/netfilter/nf_tables.h. Values are in network byte order, but for the contents of registers,
which are as the packet or the kernel has them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from netacct.kernel.netlink import attribute, attributes, nested
from netacct.model import Family

TABLE = "netacct"
"""The name of our table, one for each address family. Nothing of ours is anywhere else in nftables."""

SUBSYSTEM = 10
"""NFNL_SUBSYS_NFTABLES"""

NEW_TABLE, GET_TABLE, DEL_TABLE, NEW_CHAIN, GET_CHAIN, DEL_CHAIN, NEW_RULE, GET_RULE, DEL_RULE = range(9)
NEW_SET, GET_SET, DEL_SET, NEW_ELEMENTS, GET_ELEMENTS, DEL_ELEMENTS = range(9, 15)
GET_GENERATION, NEW_OBJECT, GET_OBJECT, DEL_OBJECT = 16, 18, 19, 20

DORMANT, OWNER, PERSIST = 1, 2, 4
"""NFT_TABLE_F_*: a table's chains hang nowhere; only the socket that made it may change it; it outlives that socket."""

SET_MAP, SET_EVAL = 8, 32
"""NFT_SET_*: elements have data; packets may add elements."""

TABLE_NAME, TABLE_FLAGS, TABLE_OWNER = 1, 2, 7
CHAIN_TABLE, CHAIN_NAME, CHAIN_HOOK, CHAIN_POLICY, CHAIN_TYPE = 1, 3, 4, 5, 7
HOOK_NUMBER, HOOK_PRIORITY = 1, 2
RULE_TABLE, RULE_CHAIN, RULE_EXPRESSIONS = 1, 2, 4
SET_TABLE, SET_NAME, SET_FLAGS, SET_KEY_TYPE, SET_KEY_LENGTH, SET_DATA_TYPE = range(1, 7)
SET_DATA_LENGTH, SET_DESCRIPTION, SET_ID, SET_EXPRESSION = 7, 9, 10, 17
DESCRIPTION_SIZE = 1
ELEMENTS_TABLE, ELEMENTS_SET, ELEMENTS_LIST = 1, 2, 3
ELEMENT_KEY, ELEMENT_DATA, ELEMENT_EXPRESSION = 1, 2, 7
OBJECT_TABLE, OBJECT_NAME, OBJECT_TYPE, OBJECT_DATA = 1, 2, 3, 4
LIST_ELEMENT = 1
EXPRESSION_NAME, EXPRESSION_DATA = 1, 2
DATA_VALUE, DATA_VERDICT = 1, 2
VERDICT_CODE, VERDICT_CHAIN = 1, 2
COUNTER_BYTES, COUNTER_PACKETS = 1, 2
OBJECT_COUNTER = 1

JUMP, GOTO, RETURN = -3, -4, -5
"""NFT_JUMP, NFT_GOTO, NFT_RETURN"""

_CREATE, _APPEND = 0x400, 0x800  # NLM_F_*
_ACCEPT = 1  # NF_ACCEPT
_VERDICTS = 0xFFFFFF00  # NFT_DATA_VERDICT
_DEFAULT_VERDICT_LENGTH = 16  # sizeof(struct nft_verdict): what nft(8) sends
_ELEMENTS_IN_A_MESSAGE = 500  # an attribute ends at 64 KiB
_KEY_TYPES = {4: 7, 16: 8}  # nft(8)'s own numbers for ipv4_addr and ipv6_addr, for its listings only
_INTEGER = 4

_KEY_AT = 12  # behind three headers of attributes

_U32 = struct.Struct(">I")


class Hook(NamedTuple):
    """Where a base chain hangs. `type` is `filter` or `route`; `number` is NF_INET_*; `policy` NF_ACCEPT or NF_DROP."""

    type: str
    number: int
    priority: int
    policy: int = _ACCEPT


class Message(NamedTuple):
    """One part of a transaction; `what` says in words what it is to do."""

    kind: int
    flags: int
    family: Family
    body: bytes
    what: str


def u32(value: int) -> bytes:
    """A number as the kernel wants it in attributes."""
    return _U32.pack(value & 0xFFFFFFFF)


def u64(value: int) -> bytes:
    """A counter's value."""
    return value.to_bytes(8, "big")


def text(value: str) -> bytes:
    """A name."""
    return value.encode("ascii") + b"\0"


def new_table(family: Family, flags: int) -> Message:
    """Make the table, take on one that is nobody's (OWNER | PERSIST over PERSIST), or wake one (without DORMANT)."""
    body = attribute(TABLE_NAME, text(TABLE)) + attribute(TABLE_FLAGS, u32(flags))
    return Message(NEW_TABLE, _CREATE, family, body, f"make table {TABLE}")


def delete_table(family: Family) -> Message:
    """Delete the table with all that is in it."""
    return Message(DEL_TABLE, 0, family, attribute(TABLE_NAME, text(TABLE)), f"delete table {TABLE}")


def new_chain(family: Family, name: str, hook: Hook | None) -> Message:
    """Make a chain; a base chain lets pass what its rules do not decide."""
    body = attribute(CHAIN_TABLE, text(TABLE)) + attribute(CHAIN_NAME, text(name))
    what = f"make chain {name}"
    if hook is not None:
        where = attribute(HOOK_NUMBER, u32(hook.number)) + attribute(HOOK_PRIORITY, u32(hook.priority))
        body += nested(CHAIN_HOOK, where) + attribute(CHAIN_POLICY, u32(hook.policy))
        body += attribute(CHAIN_TYPE, text(hook.type))
        what += f" of type {hook.type}"
    return Message(NEW_CHAIN, _CREATE, family, body, what)


def delete_chain(family: Family, name: str) -> Message:
    """Delete a chain that has no rules and to which nothing leads."""
    body = attribute(CHAIN_TABLE, text(TABLE)) + attribute(CHAIN_NAME, text(name))
    return Message(DEL_CHAIN, 0, family, body, f"delete chain {name}")


def new_rule(family: Family, chain: str, expressions: Iterable[bytes]) -> Message:
    """Append a rule; each expression is encoded by `expression`."""
    body = attribute(RULE_TABLE, text(TABLE)) + attribute(RULE_CHAIN, text(chain))
    body += nested(RULE_EXPRESSIONS, *(nested(LIST_ELEMENT, one) for one in expressions))
    return Message(NEW_RULE, _CREATE | _APPEND, family, body, f"add a rule to chain {chain}")


def flush_chain(family: Family, chain: str) -> Message:
    """Delete all rules of a chain."""
    body = attribute(RULE_TABLE, text(TABLE)) + attribute(RULE_CHAIN, text(chain))
    return Message(DEL_RULE, 0, family, body, f"empty chain {chain}")


def expression(name: str, *data: bytes) -> bytes:
    """One expression, or the template of one in a set."""
    return attribute(EXPRESSION_NAME, text(name)) + nested(EXPRESSION_DATA, *data)


def counter(octets: int = 0, packets: int = 0) -> bytes:
    """The expression that counts, beginning at these values."""
    return expression("counter", attribute(COUNTER_BYTES, u64(octets)), attribute(COUNTER_PACKETS, u64(packets)))


def verdict(code: int, chain: str = "") -> bytes:
    """A verdict as data of an expression or a map's element."""
    where = attribute(VERDICT_CHAIN, text(chain)) if chain else b""
    return nested(DATA_VERDICT, attribute(VERDICT_CODE, u32(code)), where)


def new_set(family: Family, name: str, width: int, size: int, flags: int, *, counts: bool) -> Message:
    """Make a set of keys of `width` bytes that never has more than `size`; a map (`SET_MAP`) has verdicts.

    Where it `counts`, each element counts the packets that look it up.
    """
    body = attribute(SET_TABLE, text(TABLE)) + attribute(SET_NAME, text(name)) + attribute(SET_FLAGS, u32(flags))
    body += attribute(SET_KEY_TYPE, u32(_KEY_TYPES.get(width, _INTEGER))) + attribute(SET_KEY_LENGTH, u32(width))
    if flags & SET_MAP:
        body += attribute(SET_DATA_TYPE, u32(_VERDICTS)) + attribute(SET_DATA_LENGTH, u32(_DEFAULT_VERDICT_LENGTH))
    body += nested(SET_DESCRIPTION, attribute(DESCRIPTION_SIZE, u32(size))) + attribute(SET_ID, u32(1))
    if counts:
        body += nested(SET_EXPRESSION, counter())
    return Message(NEW_SET, _CREATE, family, body, f"make set {name}")


def delete_set(family: Family, name: str) -> Message:
    """Delete a set that no rule looks up, with its elements."""
    body = attribute(SET_TABLE, text(TABLE)) + attribute(SET_NAME, text(name))
    return Message(DEL_SET, 0, family, body, f"delete set {name}")


def element(key: bytes, *more: bytes) -> bytes:
    """One element: its key, then its data or expression."""
    before, after = _around_key(len(key), more)
    return before + key + after


@functools.lru_cache(maxsize=1024)
def _around_key(width: int, more: tuple[bytes, ...]) -> tuple[bytes, bytes]:
    """An element without its key, which is so wide: a large policy has a hundred thousand elements of a few kinds."""
    whole = nested(LIST_ELEMENT, nested(ELEMENT_KEY, attribute(DATA_VALUE, bytes(width))), *more)
    return whole[:_KEY_AT], whole[_KEY_AT + width :]


def leads_to(chain: str) -> bytes:
    """The data of a map's element: go to a chain."""
    return nested(ELEMENT_DATA, verdict(GOTO, chain))


def counted_from(octets: int, packets: int) -> bytes:
    """The expression of an element whose counters begin at these values."""
    return nested(ELEMENT_EXPRESSION, counter(octets, packets))


def new_elements(family: Family, name: str, elements: Iterable[bytes]) -> Iterator[Message]:
    """Add elements; those that are there stay as they are."""
    return _elements(NEW_ELEMENTS, _CREATE, family, name, elements)


def delete_elements(family: Family, name: str, elements: Iterable[bytes]) -> Iterator[Message]:
    """Delete elements, which must be there."""
    return _elements(DEL_ELEMENTS, 0, family, name, elements)


def _elements(kind: int, flags: int, family: Family, name: str, elements: Iterable[bytes]) -> Iterator[Message]:
    head = attribute(ELEMENTS_TABLE, text(TABLE)) + attribute(ELEMENTS_SET, text(name))
    what = f"{'add elements to' if kind == NEW_ELEMENTS else 'delete elements of'} set {name}"
    left = iter(elements)
    while some := list(islice(left, _ELEMENTS_IN_A_MESSAGE)):
        yield Message(kind, flags, family, head + nested(ELEMENTS_LIST, *some), what)


def new_counter(family: Family, name: str) -> Message:
    """Make a named counter, at 0."""
    values = attribute(COUNTER_BYTES, u64(0)) + attribute(COUNTER_PACKETS, u64(0))
    body = attribute(OBJECT_TABLE, text(TABLE)) + attribute(OBJECT_NAME, text(name))
    body += attribute(OBJECT_TYPE, u32(OBJECT_COUNTER)) + nested(OBJECT_DATA, values)
    return Message(NEW_OBJECT, _CREATE, family, body, f"make counter {name}")


def delete_counter(family: Family, name: str) -> Message:
    """Delete a named counter that no rule refers to."""
    body = attribute(OBJECT_TABLE, text(TABLE)) + attribute(OBJECT_NAME, text(name))
    body += attribute(OBJECT_TYPE, u32(OBJECT_COUNTER))
    return Message(DEL_OBJECT, 0, family, body, f"delete counter {name}")


def flush_table(family: Family) -> Message:
    """Delete all rules of the table."""
    return Message(DEL_RULE, 0, family, attribute(RULE_TABLE, text(TABLE)), f"empty table {TABLE}")


def goes_to(data: bytes) -> str:
    """The chain to which the data of a map's element leads; "" for a set's element, which has no data."""
    if not data:
        return ""
    found = dict(attributes(dict(attributes(memoryview(data)))[DATA_VERDICT]))
    return bytes(found.get(VERDICT_CHAIN, b"")).rstrip(b"\0").decode("ascii", "replace")
