"""Counter sets and named counters of one family's table: found, made, completed, read, and dropped after that.

A counter set's kernel name is its layout name, with a number behind it where it replaced one that was too small: a set
of nf_tables has its size for life. A named counter's kernel name ends with its epoch, because it has no room for a
sentinel. Sets are never renamed and never refilled: rules move from one to the other in one transaction.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, count, islice
from typing import NamedTuple, TypeAlias

from netacct.kernel import nft_messages as nft
from netacct.kernel.netlink import attribute
from netacct.kernel.nft_messages import SET_EVAL, Message, element, text
from netacct.kernel.nft_parts import CounterSet, Layout
from netacct.kernel.nft_reader import NftReader, SetInfo
from netacct.kernel.plan import LEGS
from netacct.model import WHOLE, Address, Count, CounterKey, Family, Reading, Scope, key_width

EPOCH_LENGTH = 6

Counts: TypeAlias = dict[Address, tuple[int, int]]

_EPOCH_ALPHABET = string.digits + string.ascii_lowercase
_EPOCH_BITS = 62  # as in the ipsets: readers in other languages have signed counters
_STEADY_TRIES = 5
_CLASS = r"[a-z][a-z0-9-]*"
_SET = re.compile(rf"(tx|rx|pi|po)-({_CLASS})(?:\.(\d+))?")
_COUNTER = re.compile(rf"(to|ro|hi|ho)-({_CLASS})\.([0-9a-z]{{{EPOCH_LENGTH}}})")


class Members(NamedTuple):
    """The addresses that have counters. `prefilled` must fit; `leased` ones fill what room there is beyond.

    cgroups: what has counters in the sets for hostNetwork pods; these, too, fill what room there is.
    """

    prefilled: Collection[Address] = ()
    leased: Collection[Address] = ()
    cgroups: Collection[Address] = ()

    def of(self, spec: CounterSet) -> Members:
        """Those of one set."""
        return Members(leased=self.cgroups) if spec.key.scope is Scope.HOST_POD else self


class Present(NamedTuple):
    """What a family's table has.

    sets, counters: by kernel name, those of ours that count.
    others: the names of all other sets and maps.
    rules:  the expressions of all rules, by chain.
    """

    sets: dict[str, SetInfo]
    counters: dict[str, Count]
    others: list[str]
    rules: dict[str, list[memoryview]]

    def counting(self) -> set[str]:
        """The names of all sets and counters of ours that count."""
        return {*self.sets, *self.counters}

    def referred(self) -> set[str]:
        """Those of the sets and counters that a rule counts in."""
        everything = b"".join(bytes(rule) for rules in self.rules.values() for rule in rules)
        # NFTA_LOOKUP_SET and NFTA_OBJREF_IMM_NAME; a chain of the same name is in a VERDICT_CHAIN without its number
        return {name for name in self.sets if attribute(1, text(name)) in everything} | {
            name for name in self.counters if attribute(2, text(name)) in everything
        }


def look(reader: NftReader, family: Family) -> Present:
    """Read what there is; all empty where there is no table."""
    sets = reader.sets(family)
    ours = {name: info for name, info in sets.items() if key_of(family, name)}
    counters = {name: value for name, value in reader.counters(family).items() if key_of(family, name)}
    return Present(ours, counters, [name for name in sets if name not in ours], reader.rules(family))


def key_of(family: Family, name: str) -> CounterKey | None:
    """What a set or counter of this kernel name counts; None where it is not one of ours."""
    match = _SET.fullmatch(name) or _COUNTER.fullmatch(name)
    if match is None:
        return None
    scope, direction = LEGS[match[1]]
    return CounterKey(family, scope, direction, match[2])


def choose(layout: Layout, present: Present) -> dict[str, str]:
    """The kernel names of those sets and counters of a layout that are there, by layout name.

    Of several that would do, the one that rules count in.
    """
    referred = present.referred()
    found: dict[str, tuple[bool, int, str]] = {}
    for spec in layout.sets:
        for name, info in present.sets.items():
            if key_of(layout.family, name) == spec.key and suits(info, spec):
                rank = (name in referred, _number(name), name)
                found[spec.name] = max(found.get(spec.name, rank), rank)
    for counter in layout.counters:
        for name in present.counters:
            if key_of(layout.family, name) == counter.key:
                rank = (name in referred, 0, name)
                found[counter.name] = max(found.get(counter.name, rank), rank)
    return {name: rank[2] for name, rank in found.items()}


def suits(info: SetInfo, spec: CounterSet) -> bool:
    """Whether a set found in the kernel is of the kind that the spec describes. A larger one than needed will do."""
    kind = (info.width, bool(info.flags & SET_EVAL), info.counts)
    return kind == (spec.width, spec.dynamic, True) and info.size >= spec.size


class NftSets:
    """The counters of one family, by the names that a layout has for them. For one thread.

    names: the kernel name of each set and counter, by layout name; what is missing in the kernel is missing here.
    known: the addresses last seen in each set that packets add to, by kernel name.
    """

    def __init__(
        self, reader: NftReader, layout: Layout, names: dict[str, str], known: dict[str, set[Address]]
    ) -> None:
        self._reader, self._layout = reader, layout
        self.names, self.known = names, known

    def prepare(self, present: Present, members: Members) -> Iterator[Message]:
        """What makes all sets and counters complete, keeping every counter that can be kept; updates `names`."""
        for spec in self._layout.sets:
            name = self.names.get(spec.name)
            counts = self._reader.counts(self._layout.family, name) if name else None
            if name is None or counts is None or not _room(present.sets[name], counts, members.of(spec)):
                self.names[spec.name] = _unused(spec.name, present.sets)
                yield from self._make(spec, members.of(spec))
            else:
                yield from self._complete(present.sets[name], counts, members.of(spec))
        for counter in self._layout.counters:
            if counter.name not in self.names:
                epoch = "".join(secrets.choice(_EPOCH_ALPHABET) for _ in range(EPOCH_LENGTH))
                self.names[counter.name] = f"{counter.name}.{epoch}"
                yield nft.new_counter(self._layout.family, self.names[counter.name])

    def _make(self, spec: CounterSet, members: Members) -> Iterator[Message]:
        family, name = self._layout.family, self.names[spec.name]
        flags = SET_EVAL if spec.dynamic else 0
        yield nft.new_set(family, name, spec.width, spec.size, flags, counts=True)
        filling = islice(chain(members.prefilled, members.leased), spec.size - 1)
        yield from nft.new_elements(family, name, chain([_sentinel(spec.width)], map(element, filling)))

    def _complete(self, info: SetInfo, counts: Counts, members: Members) -> Iterator[Message]:
        family, mark = self._layout.family, _mark(info.width)
        if mark in counts and not _is_epoch(counts[mark]):  # `nft reset` has been at it
            yield from nft.delete_elements(family, info.name, [element(mark)])
        missing = [ip for ip in members.prefilled if ip not in counts]
        leased = [ip for ip in members.leased if ip not in counts]
        room = info.size - len(counts.keys() | {mark}) - len(missing)
        added = [element(ip) for ip in chain(missing, leased[: max(room, 0)])]
        if mark not in counts or not _is_epoch(counts[mark]):
            added.append(_sentinel(info.width))
        yield from nft.new_elements(family, info.name, added)

    def read(self) -> tuple[list[Reading], list[CounterKey]]:
        """All counters; and the keys of those that cannot be read, or have lost their epoch."""
        values = self._reader.counters(self._layout.family)
        found = [(spec.key, self._counts(spec)) for spec in self._layout.sets]
        found += [(one.key, _tally(one.key, self.names.get(one.name, ""), values)) for one in self._layout.counters]
        return [one for _, one in found if one is not None], [key for key, one in found if one is None]

    def _counts(self, spec: CounterSet) -> Reading | None:
        name = self.names.get(spec.name)
        if name is None:
            return None
        counts = self._steady(name) if spec.dynamic else self._reader.counts(self._layout.family, name)
        sentinel = counts.pop(spec.sentinel, None) if counts else None
        if counts is None or sentinel is None or not _is_epoch(sentinel):
            return None
        return Reading(spec.key, sentinel[0], counts)

    def _steady(self, name: str) -> Counts | None:
        """The counters of a set that packets add to.

        A reading while its hash table grows can miss elements that are there; an element that is missing once and then
        back would be taken for a new one. So what was there before, or at a first look, is looked for again.
        """
        counts = self._reader.counts(self._layout.family, name)
        known = self.known.get(name, {b""})
        for _ in range(_STEADY_TRIES):
            if counts is None or known <= counts.keys():
                break
            known = (known - {b""}) | counts.keys()
            counts |= self._reader.counts(self._layout.family, name) or {}
        self.known[name] = set(counts or ())
        return counts

    def holding(self, width: int) -> list[str]:
        """The kernel names of the counter sets that are there and have keys of so many bytes."""
        return [self.names[spec.name] for spec in self._layout.sets if spec.name in self.names and spec.width == width]

    def doomed(self, ips: Collection[Address]) -> tuple[list[tuple[str, Reading]], list[CounterKey]]:
        """The counters of some addresses, by set; and the keys of sets that cannot be read."""
        found, unreadable = [], []
        for spec in self._layout.sets:
            reading = self._counts(spec)
            if reading is None:
                unreadable.append(spec.key)
            elif counts := {ip: reading.counts[ip] for ip in ips if ip in reading.counts}:
                found.append((self.names[spec.name], Reading(spec.key, reading.epoch, counts)))
        return found, unreadable

    def forget(self, ips: Collection[Address]) -> None:
        """Addresses are gone because we took them away."""
        for known in self.known.values():
            known.difference_update(ips)

    def differences(self, present: Present, members: Members) -> list[str]:
        """What is wrong with the counters, in words."""
        used = set(self.names.values())
        found = [f"set {name} is left over" for name in present.sets if name not in used]
        found += [f"counter {name} is left over" for name in present.counters if name not in used]
        for spec in self._layout.sets:
            found += self._set_differences(spec, present.sets.get(self.names.get(spec.name, "")), members.of(spec))
        missing = [one for one in self._layout.counters if self.names.get(one.name, "") not in present.counters]
        return found + [f"counter {one.name} is missing" for one in missing]

    def _set_differences(self, spec: CounterSet, info: SetInfo | None, members: Members) -> list[str]:
        if info is None:
            return [f"set {spec.name} is missing"]
        if not suits(info, spec):
            return [f"set {info.name} is of another kind or size than ours"]
        counts = self._reader.counts(self._layout.family, info.name) or {}
        sentinel = counts.get(spec.sentinel)
        found = []
        if sentinel is None or not _is_epoch(sentinel):
            found.append(f"set {info.name} has lost its sentinel (was it flushed or reset?)")
        missing = sum(ip not in counts for ip in chain(members.prefilled, members.leased))
        if missing and len(counts) < info.size:
            found.append(f"set {info.name} lacks {missing} addresses")
        return found


def last(reader: NftReader, family: Family, names: Iterable[str], values: Mapping[str, Count]) -> list[Reading]:
    """The last values of sets and counters, without those that never counted."""
    readings = []
    for name in names:
        key = key_of(family, name)
        if key is None:
            continue
        if name in values:
            reading = _tally(key, name, values)
        else:
            counts = reader.counts(family, name) or {}
            sentinel = counts.pop(_mark(key_width(key)), (0, 0))
            # without a sentinel all that is here was counted since it went
            reading = Reading(key, sentinel[0] if _is_epoch(sentinel) else _number_of_epoch(), counts)
        if reading is not None and any(any(count) for count in reading.counts.values()):
            readings.append(reading)
    return readings


def _tally(key: CounterKey, name: str, values: Mapping[str, Count]) -> Reading | None:
    value = values.get(name)
    return None if value is None else Reading(key, int(name[-EPOCH_LENGTH:], 36), {WHOLE: value})


def _room(info: SetInfo, counts: Counts, members: Members) -> bool:
    missing = sum(ip not in counts for ip in members.prefilled)
    return len(counts.keys() | {_mark(info.width)}) + missing <= info.size


def _is_epoch(sentinel: tuple[int, int]) -> bool:
    return sentinel[1] == 1 and sentinel[0] > 0


def _number_of_epoch() -> int:
    return 1 + secrets.randbits(_EPOCH_BITS)


def _mark(width: int) -> bytes:
    """The key of the sentinel (`CounterSet.sentinel`) in a set of keys so wide."""
    return b"\xff" * width


def _sentinel(width: int) -> bytes:
    return element(_mark(width), nft.counted_from(_number_of_epoch(), 1))


def _number(name: str) -> int:
    match = _SET.fullmatch(name)
    return int(match[3] or 0) if match else 0


def _unused(name: str, taken: Collection[str]) -> str:
    return next(one for one in (name if number == 0 else f"{name}.{number}" for number in count()) if one not in taken)
