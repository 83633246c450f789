"""The sets of all layouts in one network namespace: prepared, read, checked, and dropped after their last reading."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace

from netacct.kernel import ipset
from netacct.kernel.base import Keep
from netacct.kernel.ipset import SetFullError, Sets
from netacct.kernel.layout import SET_PREFIX, Layout, SetSpec
from netacct.kernel.netlink import Netlink
from netacct.kernel.setmaker import (
    EPOCH_LENGTH,
    SPARE,
    Members,
    SetMaker,
    epoch_of,
    intact_catch_all,
    is_ours,
    key_of,
    may_count_pods,
    networks_of,
    pairs,
    put_sentinel,
    sentinel_of,
    suits,
    whole,
)
from netacct.model import WHOLE, Address, CounterKey, Family, Reading, Scope, Snapshot, family_of

_GRACE = 0.02
"""Seconds after a swap in which packets that looked the old set up may still count in it (an RCU grace period)."""


def boottime() -> float:
    """Seconds of CLOCK_BOOTTIME, the clock of all readings."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def set_names() -> list[str]:
    """The names of all sets of ours in this thread's network namespace. Errors: DatapathError."""
    with Netlink() as netlink:
        return CounterSets(netlink).ours()


class CounterSets:
    """The kernel's sets for the installed layouts. For one thread.

    names: the kernel name of each set, by `SetSpec.name`.
    """

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink
        self._specs: tuple[SetSpec, ...] = ()
        self.names: dict[str, str] = {}

    def ours(self) -> list[str]:
        """The names of all sets of ours that the kernel has."""
        return [name for name in ipset.set_names(self._netlink, SET_PREFIX) if is_ours(name)]

    def prepare(self, layouts: Iterable[Layout], members: Mapping[Family, Members]) -> None:
        """Make all sets as the layouts want them, keeping every counter that can be kept.

        Sets that no layout names stay for `leftovers`. Errors: DatapathError.
        """
        self.adopt(layouts)
        with closing(Sets(self._netlink)) as sets:
            maker = SetMaker(self._netlink, sets, self.ours())
            for spec in self._specs:
                self.names[spec.name] = maker.make(spec, members[spec.family])
        if maker.swapped:
            time.sleep(_GRACE)

    def adopt(self, layouts: Iterable[Layout]) -> None:
        """Take the layouts as given, writing nothing: those of their sets that are there can be read and verified."""
        self._specs = tuple(spec for layout in layouts for spec in layout.sets)
        present = self.ours()
        self.names = {spec.name: self._found(spec, present) for spec in self._specs}

    def _found(self, spec: SetSpec, present: list[str]) -> str:
        if not spec.catch_all:
            return spec.name
        return intact_catch_all(self._netlink, spec, present) or f"{spec.name}-{'?' * EPOCH_LENGTH}"

    def present_names(self) -> dict[str, str]:
        """Those of `names` whose set is there."""
        present = set(self.ours())
        return {name: kernel_name for name, kernel_name in self.names.items() if kernel_name in present}

    def spares(self) -> list[str]:
        """Sets that were swapped out, or were to be swapped in when somebody was killed."""
        return [name for name in self.ours() if SPARE in name]

    def leftovers(self) -> list[str]:
        """Sets of ours that the layouts do not name."""
        wanted = set(self.names.values())
        return [name for name in self.ours() if name not in wanted]

    def drop(self, names: Iterable[str], keep: Keep) -> tuple[Snapshot, list[str]]:
        """Read sets that count no more, hand their last values to `keep`, and destroy them.

        Returns the snapshot, without the counters that never counted, and the names of the sets that stay because a
        rule of somebody else refers to them; their values are not in the snapshot.
        """
        at = boottime()
        busy, free = self._by_use(names)
        snapshot = Snapshot(at, tuple(reading for name in free if (reading := self._last(name))))
        if snapshot.readings:
            keep(snapshot)
        if free:
            with closing(Sets(self._netlink)) as sets:
                busy += [name for name in free if not sets.destroy(name)]
        return snapshot, busy

    def _by_use(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        headers = [(name, ipset.read_header(self._netlink, name)) for name in names]
        found = [(name, header) for name, header in headers if header is not None]
        busy = [name for name, header in found if header.references]
        return busy, [name for name, header in found if not header.references]

    def _last(self, name: str) -> Reading | None:
        key = key_of(name)
        if key is None:
            return None
        header = ipset.read_header(self._netlink, name)
        reading = None
        if key.scope is Scope.POD and header and may_count_pods(header):
            end = header.range[1] if header.range else None
            try:
                # if it is gone, all that is here was counted since
                put_sentinel(self._netlink, name, sentinel_of(key.family, end))
            except SetFullError:  # somebody flushed it, and packets have taken the sentinel's place
                reading = self._full(key, name)
        reading = reading or self._reading(key, name)
        return reading if reading and any(any(count) for count in reading.counts.values()) else None

    def _full(self, key: CounterKey, name: str) -> Reading:
        """A set that counts no more, and has no room for a sentinel: what is in it is its epoch, at each reading."""
        counts = ipset.read_counters(self._netlink, name) or {}
        content = repr(sorted(counts.items())).encode()
        return Reading(key, int.from_bytes(hashlib.sha256(content).digest()[:7], "big"), counts)

    def read(self) -> Snapshot:
        """All counters of the layouts. Errors: DatapathError."""
        at = boottime()
        wanted = [(spec.key, self.names[spec.name]) for spec in self._specs if spec.key is not None]
        found = [(key, self._reading(key, name)) for key, name in wanted]
        return Snapshot(
            at,
            tuple(reading for _, reading in found if reading is not None),
            tuple(key for key, reading in found if reading is None),
        )

    def _reading(self, key: CounterKey, name: str) -> Reading | None:
        if key.scope is not Scope.POD:
            total = whole(self._netlink, name, key.family)
            return None if total is None else Reading(key, epoch_of(name), {WHOLE: total})
        found = ipset.read_set(self._netlink, name)
        if found is None:
            return None
        sentinel = found.counts.pop(sentinel_of(key.family, found.end), None)
        return None if sentinel is None else Reading(key, sentinel[0], found.counts)

    def add(self, ips: Iterable[Address]) -> None:
        """Give addresses their counters; where a set is full they stay without, and count as rest."""
        for family, some in _by_family(ips):
            for spec, _ in self._pod_sets(family):
                if spec.range is not None:  # all that it counts is there from the start
                    continue
                try:
                    ipset.add_fresh(self._netlink, spec.name, some)
                except SetFullError:
                    continue

    def discard(self, ips: Iterable[Address], keep: Keep) -> Snapshot:
        """Take the counters of addresses away, after handing their last values to `keep`.

        A packet between reading and deleting would be lost: call this for addresses that are silent.
        """
        at = boottime()
        doomed: dict[str, Reading] = {}
        unreadable = []
        for family, some in _by_family(ips):
            for spec, key in self._pod_sets(family):
                reading = self._reading(key, spec.name)
                if reading is None:
                    unreadable.append(key)
                elif counts := {ip: reading.counts[ip] for ip in some if ip in reading.counts}:
                    doomed[spec.name] = replace(reading, counts=counts)
        snapshot = Snapshot(at, tuple(doomed.values()), tuple(unreadable))
        if doomed:
            keep(snapshot)
        for name, reading in doomed.items():
            ipset.discard(self._netlink, name, reading.counts)
        return snapshot

    def _pod_sets(self, family: Family) -> Iterator[tuple[SetSpec, CounterKey]]:
        for spec in self._specs:
            if spec.key is not None and spec.key.scope is Scope.POD and spec.family == family:
                yield spec, spec.key

    def differences(self, members: Mapping[Family, Members]) -> list[str]:
        """What is wrong with the sets, in words. Writes nothing."""
        found = [f"set {name} is left over" for name in self.leftovers()]
        for spec in self._specs:
            found += self._set_differences(spec, members[spec.family])
        return found

    def _set_differences(self, spec: SetSpec, members: Members) -> list[str]:
        name = self.names[spec.name]
        header = ipset.read_header(self._netlink, name)
        if header is None:
            return [f"set {name} is missing"]
        if not suits(header, spec):
            return [f"set {name} is of another kind or size than ours"]
        if spec.catch_all:
            intact = whole(self._netlink, name, spec.family) is not None
            return [] if intact else [f"set {name} has lost elements (was it flushed?)"]
        if spec.key is None:
            same = networks_of(self._netlink, name) == set(pairs(spec))
            return [] if same else [f"set {name} holds other prefixes than ours"]
        counts = ipset.read_counters(self._netlink, name) or {}
        found = [] if spec.sentinel in counts else [f"set {name} has lost its sentinel (was it flushed?)"]
        leased = members.leased if len(counts) < header.maxelem else ()  # for which there may be no room
        missing = sum(ip not in counts for ip in (*members.prefilled, *leased))
        if missing:
            found.append(f"set {name} lacks {missing} addresses")
        return found


def _by_family(ips: Iterable[Address]) -> list[tuple[Family, list[Address]]]:
    grouped: dict[Family, list[Address]] = {4: [], 6: []}
    for ip in ips:
        grouped[family_of(ip)].append(ip)
    return [(family, some) for family, some in grouped.items() if some]
