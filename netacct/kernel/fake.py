"""A datapath without a kernel: keeps the contract of `Datapath` (idempotence, last values, epochs) in memory.

It is no simulator of netfilter: nothing classifies packets here, the user says what was counted where. It ships with
the package, so that whatever is built on a datapath can be tried and tested without root.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from netacct.errors import DatapathError
from netacct.kernel import layout
from netacct.kernel.base import Keep, keep_nothing
from netacct.kernel.plan import Plan, host_pod_keys
from netacct.kernel.position import Position
from netacct.model import (
    WHOLE,
    ZERO,
    Address,
    Count,
    CounterKey,
    Family,
    Reading,
    Scope,
    Snapshot,
    family_of,
    is_cgroup,
)

_EACH = {Scope.POD: Scope.REST, Scope.HOST_POD: Scope.HOST}
"""What has a counter for each address or cgroup, and where the others count."""


@dataclass(slots=True)
class _Set:
    """The counters of one key. `epoch` 0: somebody flushed it."""

    epoch: int
    counts: dict[Address, Count] = field(default_factory=dict)


class FakeKernel:
    """What outlives an agent: give the same one to a second `FakeDatapath`, and the agent was restarted."""

    def __init__(self) -> None:
        self.sets: dict[CounterKey, _Set] = {}
        self._epochs = itertools.count(1)

    def make(self, key: CounterKey) -> _Set:
        """A set with an epoch of its own, at zero."""
        counts = {} if key.scope in _EACH else {WHOLE: ZERO}
        self.sets[key] = _Set(next(self._epochs), counts)
        return self.sets[key]

    def renew(self, key: CounterKey) -> None:
        """Give a flushed set a new epoch; what it counted since stays."""
        self.sets[key].epoch = next(self._epochs)
        if key.scope not in _EACH:
            self.sets[key].counts.setdefault(WHOLE, ZERO)

    def count(self, key: CounterKey, ip: Address, octets: int, packets: int = 1) -> None:
        """Count at an address or cgroup, or at rest or host where it has no counter of its own."""
        if key.scope in _EACH and ip not in self.sets[key].counts:
            key, ip = key._replace(scope=_EACH[key.scope]), WHOLE
        counts = self.sets[key].counts
        if ip in counts:
            counts[ip] = counts[ip].plus(Count(octets, packets))

    def flush(self, key: CounterKey) -> None:
        """What `ipset flush` of somebody else does: elements and epoch are gone."""
        self.sets[key] = _Set(0)


class FakeDatapath:
    """The `Datapath` in memory.

    Args:
        kernel: where the counters live; a new one unless given.
    """

    name = "fake"

    def __init__(self, kernel: FakeKernel | None = None) -> None:
        self.kernel = kernel or FakeKernel()
        self._plan: Plan | None = None
        self._leased: set[Address] = set()
        self.position = Position()

    def install(self, plan: Plan, keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.install`."""
        self._plan = plan
        sets = self.kernel.sets
        wanted = _keys(plan)
        for key in wanted:
            if key not in sets:
                self.kernel.make(key)
            elif not sets[key].epoch:
                self.kernel.renew(key)
        self._fill(plan, self._leased)
        return self._drop([key for key in sets if key not in wanted], keep)

    def adopt(self, plan: Plan) -> None:
        """See `Datapath.adopt`."""
        self._plan = plan

    def verify(self) -> list[str]:
        """See `Datapath.verify`."""
        sets, wanted = self.kernel.sets, _keys(self._installed())
        missing = [f"set {_words(key)} is missing" for key in wanted if key not in sets]
        flushed = [f"set {_words(key)} was flushed" for key in wanted if key in sets and not sets[key].epoch]
        return missing + flushed + [f"set {_words(key)} is left over" for key in sets if key not in wanted]

    def read(self) -> Snapshot:
        """See `Datapath.read`."""
        at = _boottime()
        wanted = _keys(self._installed())
        good = [key for key in wanted if key in self.kernel.sets and self.kernel.sets[key].epoch]
        return Snapshot(at, tuple(map(self._reading, good)), tuple(key for key in wanted if key not in good))

    def add(self, ips: Iterable[Address]) -> None:
        """See `Datapath.add`."""
        new = set(ips)
        self._fill(self._installed(), new)
        self._leased |= new

    def discard(self, ips: Iterable[Address], keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.discard`."""
        at = _boottime()
        prefilled = {ip for family in self._installed().families for ip in family.prefilled}
        gone = set(ips) - prefilled
        readings = []
        for key, one in self.kernel.sets.items():
            counts = {ip: count for ip, count in one.counts.items() if ip in gone}
            if counts and one.epoch:
                readings.append(Reading(key, one.epoch, counts))
        snapshot = Snapshot(at, tuple(readings))
        if readings:
            keep(snapshot)
        for reading in readings:
            for ip in reading.counts:
                del self.kernel.sets[reading.key].counts[ip]
        self._leased -= gone
        return snapshot

    def remove(self, keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.remove`."""
        self._plan = None
        self._leased.clear()
        return self._drop(list(self.kernel.sets), keep)

    def _installed(self) -> Plan:
        if self._plan is None:
            raise DatapathError("nothing is installed yet")
        return self._plan

    def _fill(self, plan: Plan, leased: Iterable[Address]) -> None:
        members: dict[Family, set[Address]] = {family.family: set(family.prefilled) for family in plan.families}
        cgroups = {ip for ip in leased if is_cgroup(ip)}
        for ip in set(leased) - cgroups:
            members.setdefault(family_of(ip), set()).add(ip)
        for key, one in self.kernel.sets.items():
            if key.scope in _EACH:
                for ip in members.get(key.family, ()) if key.scope is Scope.POD else cgroups:
                    one.counts.setdefault(ip, ZERO)

    def _drop(self, keys: list[CounterKey], keep: Keep) -> Snapshot:
        counted = [
            key for key in keys if self.kernel.sets[key].epoch and any(map(any, self.kernel.sets[key].counts.values()))
        ]
        snapshot = Snapshot(_boottime(), tuple(map(self._reading, counted)))
        if snapshot.readings:
            keep(snapshot)
        for key in keys:
            del self.kernel.sets[key]
        return snapshot

    def _reading(self, key: CounterKey) -> Reading:
        return Reading(key, self.kernel.sets[key].epoch, dict(self.kernel.sets[key].counts))


def _keys(plan: Plan) -> list[CounterKey]:
    addresses = [spec.key for one in layout.build(plan) for spec in one.sets if spec.key is not None]
    return addresses + host_pod_keys(plan)


def _words(key: CounterKey) -> str:
    return " ".join(("IPv" + str(key.family), key.scope, key.direction, key.traffic))


def _boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
