"""What nf_tables has of ours, read by raw netlink: the table, its chains and rules, sets, elements and counters.

A set of 4,096 addresses takes 3 ms to read here, ten times as long with libnftables. Numbers and layouts:
linux/netfilter/nf_tables.h. Nothing here writes.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from netacct.errors import MissingFeatureError, PermissionRefusedError
from netacct.kernel import nft_messages as nft
from netacct.kernel.netlink import Netlink, NetlinkError, attribute, attributes
from netacct.kernel.nft_messages import SUBSYSTEM, TABLE, Hook, text, u32
from netacct.kernel.nft_writer import NFPROTO
from netacct.model import Address, Count, Family

_OF_TABLE = attribute(1, text(TABLE))  # in every message the table is the first attribute
_NO_NFTABLES = (errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT)
_LENGTH = struct.Struct("=H")


class Table(NamedTuple):
    """Flags of the table, and the netlink port of its owner (0: nobody's)."""

    flags: int
    owner: int


@dataclass(frozen=True, slots=True)
class SetInfo:
    """What a set is. `size` 0: it may grow."""

    name: str
    flags: int
    width: int
    size: int
    counts: bool


class NftReader:
    """Reads in the network namespace of the thread that makes it. For one thread.

    Errors: MissingFeatureError without nf_tables; PermissionRefusedError; DatapathError.
    """

    def __init__(self) -> None:
        self._netlink = Netlink()
        try:
            self.generation()
        except NetlinkError as error:
            self.close()
            if error.code in _NO_NFTABLES:
                raise MissingFeatureError("this kernel has no nf_tables (CONFIG_NF_TABLES)") from error
            if error.code == errno.EPERM:
                raise PermissionRefusedError("the nftables datapath needs CAP_NET_ADMIN") from error
            raise

    def close(self) -> None:
        """Close the socket."""
        self._netlink.close()

    def generation(self) -> int:
        """A number that every transaction in this namespace changes."""
        (answer,) = self._netlink.request(SUBSYSTEM << 8 | nft.GET_GENERATION, 0, 0, b"")
        return _number(dict(attributes(answer))[1])

    def table(self, family: Family) -> Table | None:
        """Our table; None where there is none."""
        answer = self._get(nft.GET_TABLE, family, _OF_TABLE)
        if answer is None:
            return None
        found = dict(attributes(answer))
        owner = found.get(nft.TABLE_OWNER)
        return Table(_number(found[nft.TABLE_FLAGS]), _number(owner) if owner else 0)

    def hook(self, family: Family, chain: str) -> Hook | str:
        """Where a chain of ours hangs; "" where it hangs nowhere, "missing" where there is none."""
        # one by one: other tables may have thousands of chains, and a dump of chains has no filter
        answer = self._get(nft.GET_CHAIN, family, _OF_TABLE + attribute(nft.CHAIN_NAME, text(chain)))
        if answer is None:
            return "missing"
        found = dict(attributes(answer))
        if nft.CHAIN_HOOK not in found:
            return ""
        hook = dict(attributes(found[nft.CHAIN_HOOK]))
        priority = int.from_bytes(hook[nft.HOOK_PRIORITY], "big", signed=True)
        policy = _number(found[nft.CHAIN_POLICY])
        return Hook(_name(found[nft.CHAIN_TYPE]), _number(hook[nft.HOOK_NUMBER]), priority, policy)

    def rules(self, family: Family) -> dict[str, list[memoryview]]:
        """The expressions of every rule of ours, by chain, in order."""
        found: dict[str, list[memoryview]] = {}
        for message in self._dump(nft.GET_RULE, family, _OF_TABLE):
            rule = dict(attributes(message))
            if _name(rule[nft.RULE_TABLE]) == TABLE:
                expressions = rule.get(nft.RULE_EXPRESSIONS, memoryview(b""))
                found.setdefault(_name(rule[nft.RULE_CHAIN]), []).append(expressions)
        return found

    def sets(self, family: Family) -> dict[str, SetInfo]:
        """All sets and maps of ours."""
        found = {}
        for message in self._dump(nft.GET_SET, family, _OF_TABLE):
            parts = dict(attributes(message))
            description = dict(attributes(parts.get(nft.SET_DESCRIPTION, memoryview(b""))))
            size = description.get(nft.DESCRIPTION_SIZE)
            info = SetInfo(
                _name(parts[nft.SET_NAME]),
                _number(parts[nft.SET_FLAGS]) if nft.SET_FLAGS in parts else 0,
                _number(parts[nft.SET_KEY_LENGTH]),
                _number(size) if size else 0,
                nft.SET_EXPRESSION in parts,
            )
            found[info.name] = info
        return found

    def elements(self, family: Family, name: str) -> dict[bytes, bytes] | None:
        """The elements of a set that does not count, each with its data as encoded; None where there is no set."""
        messages = self._dump_set(family, name)
        if messages is None:
            return None
        found = {}
        for element in _elements(messages):
            parts = dict(attributes(element))
            found[_key(parts[nft.ELEMENT_KEY])] = bytes(parts.get(nft.ELEMENT_DATA, b""))
        return found

    def counts(self, family: Family, name: str) -> dict[Address, tuple[int, int]] | None:
        """(bytes, packets) of each address in a counter set; None where there is no such set."""
        messages = self._dump_set(family, name)
        if messages is None:
            return None
        found: dict[Address, tuple[int, int]] = {}
        for part in _lists(messages):
            layout = _ELEMENTS.get(_LENGTH.unpack_from(part)[0]) if len(part) else None
            if layout is None or len(part) % layout.size:
                found.update(_slow(part))
                continue
            for key, octets, packets in layout.iter_unpack(part):
                found[key] = (octets, packets)
        return found

    def counters(self, family: Family) -> dict[str, Count]:
        """The values of all named counters of ours."""
        found = {}
        wanted = _OF_TABLE + attribute(nft.OBJECT_TYPE, u32(nft.OBJECT_COUNTER))
        for message in self._dump(nft.GET_OBJECT, family, wanted):
            parts = dict(attributes(message))
            if _name(parts[nft.OBJECT_TABLE]) == TABLE and _number(parts[nft.OBJECT_TYPE]) == nft.OBJECT_COUNTER:
                found[_name(parts[nft.OBJECT_NAME])] = _count(parts[nft.OBJECT_DATA])
        return found

    def _get(self, kind: int, family: Family, body: bytes) -> memoryview | None:
        try:
            answers = self._netlink.request(SUBSYSTEM << 8 | kind, 0, NFPROTO[family], body)
        except NetlinkError as error:
            if error.code == errno.ENOENT:
                return None
            raise
        return answers[0]

    def _dump(self, kind: int, family: Family, body: bytes) -> list[memoryview]:
        """What a dump finds; nothing where there is no table."""
        return self._found(kind, family, body) or []

    def _dump_set(self, family: Family, name: str) -> list[memoryview] | None:
        return self._found(nft.GET_ELEMENTS, family, _OF_TABLE + attribute(nft.ELEMENTS_SET, text(name)))

    def _found(self, kind: int, family: Family, body: bytes) -> list[memoryview] | None:
        try:
            return self._netlink.dump(SUBSYSTEM << 8 | kind, NFPROTO[family], body)
        except NetlinkError as error:
            if error.code == errno.ENOENT:
                return None
            raise


# One element of a counter set as the kernel sends it: headers of the element, KEY and VALUE, the key; headers of
# EXPRESSION and NAME, "counter" and its zero, headers of DATA and BYTES, the bytes, header of PACKETS, the packets.
# Anything else (a 64-bit padding attribute, other attributes behind) has another length and goes the slow way.
_ELEMENTS = {layout.size: layout for layout in (struct.Struct(f">12x{width}s4x12x4x4xQ4xQ") for width in (4, 8, 16))}


def _lists(messages: Iterable[memoryview]) -> Iterator[memoryview]:
    for message in messages:
        yield from (value for kind, value in attributes(message) if kind == nft.ELEMENTS_LIST)


def _elements(messages: Iterable[memoryview]) -> Iterator[memoryview]:
    for part in _lists(messages):
        yield from (value for kind, value in attributes(part) if kind == nft.LIST_ELEMENT)


def _slow(part: memoryview) -> Iterator[tuple[Address, tuple[int, int]]]:
    for kind, element in attributes(part):
        parts = dict(attributes(element)) if kind == nft.LIST_ELEMENT else {}
        if nft.ELEMENT_KEY in parts and nft.ELEMENT_EXPRESSION in parts:
            expression = dict(attributes(parts[nft.ELEMENT_EXPRESSION]))
            count = _count(expression[nft.EXPRESSION_DATA])
            yield _key(parts[nft.ELEMENT_KEY]), (count.bytes, count.packets)


def _key(value: memoryview) -> bytes:
    return bytes(dict(attributes(value))[nft.DATA_VALUE])


def _count(value: memoryview) -> Count:
    parts = dict(attributes(value))
    return Count(_number(parts[nft.COUNTER_BYTES]), _number(parts[nft.COUNTER_PACKETS]))


def _number(value: memoryview) -> int:
    return int.from_bytes(value, "big")


def _name(value: memoryview) -> str:
    return bytes(value).rstrip(b"\0").decode("ascii", "replace")
