"""How nf_tables finds the class of an address among thousands of CIDRs: a block first, then the lengths in it. Pure.

An interval lookup over thousands of CIDRs costs a packet a microsecond. Here an address is cut to its block (/16,
IPv6 /32) and looked up in one hash map. Where a block holds no CIDR of its own, that is all, and the short prefixes
decide: few by comparison, many by a map for each length. (The kernel keeps a set of keys of two bytes as a bitmap of
16 KiB; where there are thousands of blocks of IPv4, such a set is asked first, and spares most packets the map, which
is in no cache.) Where it does, the map leads to a chain that looks up only the
lengths that occur in blocks like this one, longest first, and ends with the class of what lies around. Prefix lengths
are rounded up to multiples of four, so that few lookups serve all of them and a CIDR becomes eight entries at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from netacct.kernel import classify
from netacct.kernel.plan import FamilyPlan
from netacct.model import Address, Network

FEW = 96
"""So many CIDRs are compared one by one (as a tree); more become maps."""

BLOCKS = "blocks"
_MOST_BLOCKS = 2048
"""So many entries for prefixes that hold 16 blocks or more; what would make more entries is looked at after them."""

_ASKED_FIRST = range(1024, 1 << 15)
"""With so many blocks in the map they are a bitmap, too. Fewer are found in a cache; more hold most addresses."""

_BLOCK = {32: 16, 128: 32}
_STEP = 4
_FINEST_STEP = 64
"""IPv6 prefixes longer than this keep their length: there are few lengths, and many addresses between them."""


class Content(NamedTuple):
    """A set that does not count, or a map; the name ends with a digest of all that is in it.

    keys:   the elements, each `width` bytes.
    chains: where each key leads; empty for a set.
    """

    name: str
    width: int
    keys: tuple[bytes, ...]
    chains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """How a family's addresses find their classes.

    steps:   one after the other; members other than the node's own addresses are a map's name (`Maps.by_members`).
    bits:    of an address.
    block:   the length of a block.
    ends:    block -> class, where a block holds nothing longer.
    around:  block -> (the lengths in it, longest first; the class of what lies around).
    entries: length -> prefix (as a number of so many bits) -> class.
    """

    steps: tuple[classify.Step, ...]
    bits: int
    block: int
    ends: dict[int, str]
    around: dict[int, tuple[tuple[int, ...], str]]
    entries: dict[int, dict[int, str]]


def width_of(length: int, bits: int) -> int:
    """The bytes of a key of so many bits, of an address of `bits` bits."""
    return 4 if bits == 32 or length <= 32 else 8 if length <= 64 else 16


def width_in_set(length: int, bits: int) -> int:
    """The same in a set that is no map. Keys of two bytes make it a bitmap (nft_set_bitmap.c), which no map can be."""
    return 2 if (length, bits) == (16, 32) else width_of(length, bits)


def addresses(name: str, ips: Sequence[Address]) -> Content:
    """A set of whole addresses."""
    return _members(name, len(ips[0]), ips)


def by_length(name: str, networks: Iterable[Network]) -> dict[int, Content]:
    """A set for each prefix length, longest first."""
    grouped: dict[tuple[int, int], list[bytes]] = {}
    for network in networks:
        width = width_in_set(network.prefixlen, network.max_prefixlen)
        cut = network.network_address.packed[:width]
        grouped.setdefault((network.prefixlen, width), []).append(cut)
    return {
        length: _members(f"{name}.{length}", width, grouped[length, width])
        for length, width in sorted(grouped, reverse=True)
    }


def _inside(network: Network, outer: Network) -> bool:
    spare = outer.max_prefixlen - outer.prefixlen
    same = int(network.network_address) >> spare == int(outer.network_address) >> spare
    return same and network.prefixlen >= outer.prefixlen


class Maps(NamedTuple):
    """The maps of one way of counting, and the chains that they lead to besides those of the classes.

    chains:     name, the maps that it looks up with their lengths, and the class of what none of them has.
    by_members: the map, and the length that it is looked up by, for the members of a step.
    """

    contents: list[Content]
    chains: list[tuple[str, list[tuple[str, int]], str]]
    by_members: dict[str, tuple[str, int]]


def decide(family: FamilyPlan, default: str) -> Decision:
    """How to choose the class. The node's own addresses and the loopback range come first."""
    bits = family.loopback.max_prefixlen
    block = _BLOCK[bits]
    own = [classify.Step("node", probe) for probe in classify.own_probes(family.own)]
    layers = [[(group.traffic, network) for group in layer for network in group.networks] for layer in family.layers]
    if sum(map(len, layers)) <= FEW:
        steps = [classify.Step(traffic, classify.Probe(network)) for layer in layers for traffic, network in layer]
        loopback = classify.Step("node", classify.Probe(family.loopback))
        return Decision((loopback, *own, *steps), bits, block, {}, {}, {})
    outside = [[one for one in layer if not _inside(one[1], family.loopback)] for layer in layers]
    long, short = _by_cost([[("node", family.loopback)], *outside], block)
    entries = _entries(long, block, bits)
    ends = entries.pop(block, {})
    around = _around(entries, block, _Fallback(short, ends, block, default))
    steps = [*own, *_behind_covers(BLOCKS, {*ends, *around}, block, family.loopback)]
    if sum(map(len, short)) <= FEW:
        steps += [classify.Step(traffic, classify.Probe(network)) for layer in short for traffic, network in layer]
    else:
        shorter = _entries(short, 0, bits)
        for length in sorted(shorter, reverse=True):
            steps += _behind_covers(f"m{length}", shorter[length], length, family.loopback)
        entries |= shorter
    return Decision(tuple(steps), bits, block, {at: ends[at] for at in ends if at not in around}, around, entries)


_Layers: TypeAlias = list[list[tuple[str, Network]]]
"""Classes and networks, deepest first: what lies inside of something else stands in an earlier list."""


def _by_cost(layers: _Layers, block: int) -> tuple[_Layers, _Layers]:
    """Those that become blocks or lie in one, and the others: the shortest, where blocks would be too many."""
    left, shortest = _MOST_BLOCKS, block - _STEP + 1
    shorter = [network.prefixlen for layer in layers for _, network in layer if network.prefixlen < shortest]
    for length in sorted(shorter, reverse=True):
        left -= 1 << block - length
        if left < 0:
            break
        shortest = length
    long = [[one for one in layer if one[1].prefixlen >= shortest] for layer in layers]
    return long, [[one for one in layer if one[1].prefixlen < shortest] for layer in layers]


def _behind_covers(members: str, numbers: Collection[int], length: int, like: Network) -> list[classify.Step]:
    """Steps that look a map up where prefixes of this length are; none where there are no prefixes."""
    bits, kind = like.max_prefixlen, type(like)
    networks = [kind((number << bits - length, length)) for number in numbers]
    covers = classify.covers(networks) if networks else ()
    return [classify.Step("", classify.Probe(cover, members)) for cover in covers]


def lay_out(decision: Decision, leg: str) -> Maps:
    """The maps of one way of counting."""
    if not decision.ends and not decision.around and not decision.entries:
        return Maps([], [], {})
    bits = decision.bits
    maps = {
        length: _leading(f"{leg}.m{length}", length, bits, {at: f"{leg}-{traffic}" for at, traffic in some.items()})
        for length, some in decision.entries.items()
    }
    kinds = sorted(set(decision.around.values()))
    names = {kind: f"{leg}.b{index}" for index, kind in enumerate(kinds)}
    chains = [(names[kind], [(maps[length].name, length) for length in kind[0]], kind[1]) for kind in kinds]
    leads = {at: names[kind] for at, kind in decision.around.items()}
    leads |= {at: f"{leg}-{traffic}" for at, traffic in decision.ends.items()}
    by_members = {f"m{length}": (content.name, length) for length, content in maps.items()}
    if not leads:
        return Maps([*maps.values()], chains, by_members)
    blocks = _leading(f"{leg}.{BLOCKS}", decision.block, bits, leads)
    return Maps([blocks, *maps.values()], chains, by_members | {BLOCKS: (blocks.name, decision.block)})


def asked_first(decision: Decision) -> Content | None:
    """The set of those blocks that the map of blocks leads on from, where looking into that first saves time."""
    blocks = [*decision.ends, *decision.around]
    width = width_in_set(decision.block, decision.bits)
    if width != 2 or len(blocks) not in _ASKED_FIRST:
        return None
    return _members(BLOCKS, width, (block.to_bytes(width, "big") for block in blocks))


class _Fallback:
    """The class of a whole block, as far as longer prefixes do not decide."""

    def __init__(self, short: _Layers, ends: dict[int, str], block: int, default: str) -> None:
        self._ends, self._block, self._default = ends, block, default
        self._by_length: dict[int, dict[int, str]] = {}
        for layer in short:
            for traffic, network in layer:
                number = int(network.network_address) >> network.max_prefixlen - network.prefixlen
                self._by_length.setdefault(network.prefixlen, {})[number] = traffic
        self._lengths = sorted(self._by_length, reverse=True)

    def of(self, block: int) -> str:
        if block in self._ends:
            return self._ends[block]
        for length in self._lengths:
            found = self._by_length[length].get(block >> self._block - length)
            if found is not None:
                return found
        return self._default


def _entries(layers: _Layers, block: int, bits: int) -> dict[int, dict[int, str]]:
    """All prefixes with their lengths rounded up; of two that become one, the longer's class stays."""
    entries: dict[int, dict[int, str]] = {}
    for layer in reversed(layers):  # from the outside in: a deeper layer lies inside, and overwrites
        for traffic, network in layer:
            length = _rounded(network.prefixlen, block)
            first = int(network.network_address) >> bits - length
            some = entries.setdefault(length, {})
            for number in range(first, first + (1 << length - network.prefixlen)):
                some[number] = traffic
    return entries


def _around(
    entries: dict[int, dict[int, str]], block: int, fallback: _Fallback
) -> dict[int, tuple[tuple[int, ...], str]]:
    lengths: dict[int, set[int]] = {}
    for length, some in entries.items():
        for at in {number >> length - block for number in some}:
            lengths.setdefault(at, set()).add(length)
    return {at: (tuple(sorted(found, reverse=True)), fallback.of(at)) for at, found in lengths.items()}


def _rounded(length: int, block: int) -> int:
    if length <= block:
        return block
    return length if length > _FINEST_STEP else -(-length // _STEP) * _STEP


def _leading(name: str, length: int, bits: int, chains: dict[int, str]) -> Content:
    """A map from prefixes of this length, as numbers, to chains."""
    width = width_of(length, bits)
    ordered = sorted(chains)
    keys = tuple((number << 8 * width - length).to_bytes(width, "big") for number in ordered)
    return _named(name, width, keys, tuple(map(chains.__getitem__, ordered)))


def _members(name: str, width: int, keys: Iterable[bytes]) -> Content:
    return _named(name, width, tuple(sorted(keys)), ())


def _named(name: str, width: int, keys: tuple[bytes, ...], chains: tuple[str, ...]) -> Content:
    digest = hashlib.blake2b(b"".join(keys) + "\0".join(chains).encode(), digest_size=4).hexdigest()
    return Content(f"{name}.{digest}", width, keys, chains)
