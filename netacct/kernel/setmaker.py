"""One counter set: its names, what it must be like, and how it is made, adopted or made anew.

A set is made in an order that a kill at any point leaves recognisable: create it, put the sentinel in (its epoch), fill
it, and only then let rules refer to it. A set that must be made anew while rules use it is built beside it under a
spare name and swapped in; what is under the spare name afterwards is a leftover to be read and destroyed.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import string
from collections.abc import Collection, Iterable
from itertools import chain, islice
from typing import NamedTuple

from netacct.errors import DatapathError
from netacct.kernel import ipset
from netacct.kernel.ipset import Header, SetFullError, Sets
from netacct.kernel.layout import HALVES, SENTINEL, SET_PREFIX, SetSpec, hash_size
from netacct.kernel.netlink import Netlink
from netacct.kernel.plan import LEGS
from netacct.model import Address, Count, CounterKey, Family, Scope

EPOCH_LENGTH = 6
SPARE = "+"
"""Stands in place of the first dash in the spare name of a set."""

_EPOCH_ALPHABET = string.digits + string.ascii_lowercase
_EPOCH_BITS = 62  # a sentinel's bytes are a 64-bit counter, and readers in other languages have signed ones

_OURS = re.compile(rf"{SET_PREFIX}([46])([-+])(tx|rx|to|ro|hi|ho|own|local|[bc]\d+)(?:-(.+))?")
_EPOCH = re.compile(f"[{_EPOCH_ALPHABET}]{{{EPOCH_LENGTH}}}")


_POD_TYPES = {"hash:ip", "bitmap:ip"}

_HALVES: dict[Family, set[Address]] = {
    family: {ipaddress.ip_network(half).network_address.packed for half in halves} for family, halves in HALVES.items()
}


class Members(NamedTuple):
    """The addresses that have counters. `prefilled` must fit; `leased` ones fill what room there is beyond."""

    prefilled: Collection[Address] = ()
    leased: Collection[Address] = ()


def is_ours(name: str) -> bool:
    """Whether a kernel set is one of ours, by its name."""
    return _OURS.fullmatch(name) is not None


def key_of(name: str) -> CounterKey | None:
    """The counters that a set of ours holds, by its kernel name (a spare one too).

    None where it only classifies, and for a catch-all without an epoch, which no agent made.
    """
    match = _OURS.fullmatch(name)
    if match is None or match[3] not in LEGS or not match[4]:
        return None
    scope, direction = LEGS[match[3]]
    traffic = match[4]
    if scope is not Scope.POD:
        traffic, _, epoch = match[4].rpartition("-")
        if not traffic or not _EPOCH.fullmatch(epoch):
            return None
    return CounterKey(4 if match[1] == "4" else 6, scope, direction, traffic)


def epoch_of(name: str) -> int:
    """The epoch in the name of a catch-all set; only for a name that has a key (`key_of`)."""
    return int(name[-EPOCH_LENGTH:], 36)


class SetMaker:
    """Brings one set after the other to what its spec says.

    swapped: whether a set had to be made anew, so that its spare name now holds what it counted before.
    """

    def __init__(self, netlink: Netlink, sets: Sets, present: Collection[str]) -> None:
        self._netlink, self._sets, self._present = netlink, sets, present
        self.swapped = False

    def make(self, spec: SetSpec, members: Members) -> str:
        """Make, complete or replace one set, keeping its counters where it is of the right kind; returns its name."""
        if spec.catch_all:
            return intact_catch_all(self._netlink, spec, self._present) or self._create_catch_all(spec)
        header = ipset.read_header(self._netlink, spec.name) if spec.name in self._present else None
        if header is not None and not _can_be_swapped(header, spec):
            # not of our making, so nothing of ours is in it
            if not self._sets.destroy(spec.name):
                raise DatapathError(f"set {spec.name} is a {header.type} that somebody's rules refer to")
            header = None
        if header is None:
            self._create(spec, spec.name, members)
        elif not suits(header, spec) or not self._complete(spec, header, members):
            spare = spec.name.replace("-", SPARE, 1)
            if spare in self._present:  # else it would have been destroyed before
                raise DatapathError(f"set {spare} is in the way: somebody's rules refer to it")
            self._create(spec, spare, members)
            self._sets.swap(spare, spec.name)
            self.swapped = True
        return spec.name

    def _complete(self, spec: SetSpec, header: Header, members: Members) -> bool:
        """Complete a set of the right kind in place; False where only a new one will do."""
        if spec.key is None:
            return networks_of(self._netlink, spec.name) == set(pairs(spec))
        counts = ipset.read_counters(self._netlink, spec.name) or {}
        missing = [ip for ip in members.prefilled if ip not in counts]
        room = header.maxelem - len(counts.keys() | {spec.sentinel}) - len(missing)
        if spec.range is None and room < 0:
            return False
        put_sentinel(self._netlink, spec.name, spec.sentinel)
        leased = [ip for ip in members.leased if ip not in counts]
        self._fill(spec.name, chain(missing, leased[: max(room, 0)]))  # a bitmap is for prefilled ones only
        return True

    def _create(self, spec: SetSpec, name: str, members: Members) -> None:
        self._create_empty(spec, name)
        if spec.key is None:
            ipset.add(self._netlink, name, pairs(spec))
            return
        put_sentinel(self._netlink, name, spec.sentinel)
        self._fill(name, islice(chain(members.prefilled, members.leased), spec.size - 1))

    def _create_empty(self, spec: SetSpec, name: str) -> None:
        counted = spec.key is not None
        if spec.range is not None:
            self._sets.create_bitmap(name, spec.range, spec.netmask, counters=counted)
        else:
            size = max(spec.size, 1)
            self._sets.create_hash(name, spec.type, spec.family, size, hash_size(spec), counters=counted)

    def _fill(self, name: str, ips: Iterable[Address]) -> None:
        try:
            ipset.add_fresh(self._netlink, name, ips)
        except SetFullError:  # packets took the room of leases meanwhile; what has none counts as rest
            return

    def _create_catch_all(self, spec: SetSpec) -> str:
        epoch = "".join(secrets.choice(_EPOCH_ALPHABET) for _ in range(EPOCH_LENGTH))
        name = f"{spec.name}-{epoch}"
        self._create_empty(spec, name)
        prefix = None if spec.type == "bitmap:ip" else 1
        ipset.add(self._netlink, name, ((ip, prefix) for ip in _HALVES[spec.family]))
        return name


def intact_catch_all(netlink: Netlink, spec: SetSpec, present: Collection[str]) -> str | None:
    """The set that carries a catch-all counter on: a complete one, and rather one that rules refer to."""
    intact = []
    for name in present:
        if name[: -EPOCH_LENGTH - 1] == spec.name and key_of(name) == spec.key:
            header = ipset.read_header(netlink, name)
            if header and suits(header, spec) and whole(netlink, name, spec.family) is not None:
                intact.append((header.references, name))
    return max(intact)[1] if intact else None


def suits(header: Header, spec: SetSpec) -> bool:
    """Whether a set found in the kernel is of the kind that the spec describes. A larger one than needed will do."""
    if (header.type, header.family, header.counters) != (spec.type, spec.family, spec.key is not None):
        return False
    if header.forgets:
        return False
    if spec.range is not None:
        return (header.range, header.netmask) == (spec.range, spec.netmask)
    return header.maxelem >= spec.size and header.hashsize >= hash_size(spec)


def _can_be_swapped(header: Header, spec: SetSpec) -> bool:
    """Whether the kernel exchanges such a set with the one wanted: sets of one family that look the same things up."""
    return header.family == spec.family and (header.type == spec.type or {header.type, spec.type} == _POD_TYPES)


def put_sentinel(netlink: Netlink, name: str, sentinel: Address) -> None:
    """Give a pod counter set an epoch, unless it has one."""
    ipset.add_counted(netlink, name, sentinel, octets=1 + secrets.randbits(_EPOCH_BITS), packets=1)


def sentinel_of(family: Family, end: Address | None) -> Address:
    """The sentinel of a pod counter set as it is in the kernel; `end` is that of a bitmap's range, None for a hash."""
    return SENTINEL[family] if end is None else end


def may_count_pods(header: Header) -> bool:
    """Whether a set with the name of a pod counter set can be one."""
    return header.type in _POD_TYPES and header.counters


def whole(netlink: Netlink, name: str, family: Family) -> Count | None:
    """The sum of the halves of a catch-all set; None where one is missing."""
    counts = ipset.read_counters(netlink, name)
    if counts is None or counts.keys() != _HALVES[family]:
        return None
    return Count(sum(octets for octets, _ in counts.values()), sum(packets for _, packets in counts.values()))


def networks_of(netlink: Netlink, name: str) -> set[tuple[Address, int | None]]:
    """The content of a classifying set, as `pairs` has it."""
    return {(element.ip, element.cidr) for element in ipset.read_elements(netlink, name)}


def pairs(spec: SetSpec) -> list[tuple[Address, int | None]]:
    """The content of a classifying set as (address, prefix length); in a bitmap each element has the same, None."""
    return [(network.network_address.packed, None if spec.netmask else network.prefixlen) for network in spec.networks]
