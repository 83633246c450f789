"""The bookkeeper: readings of the kernel's counters, times leases, make totals that only grow.

Goal
    Every byte that the kernel counted is booked exactly once: to the pod that held the address, to the host, or to
    `unattributed`. The ledger is a value with methods. It does no I/O, knows no clock (times are CLOCK_BOOTTIME, handed
    in), and may be called from the agent's worker thread only.

Tensions
    *A counter says how much, not whose.* It belongs to an address, and addresses change hands. So the ledger books
    differences, each over the interval between two readings, to the lease of that interval. Where two leases meet in
    one, it gives all to the one that had most of it, and says so (`ambiguous_bytes`): a stated guess, never a silent
    one. (Not to the newer: after an agent was down for an hour, an heir of a second would be billed for that hour.)

    *Bytes come before names.* A pod sends its first packet before any source speaks of it. What nobody holds waits
    (`pending`) for `late_binding` seconds, for a sandbox that can have sent it: made before the end of the interval in
    which the bytes were counted, and after the address was last released. Then it is `unattributed`.

    *Counters die, totals must not.* A set says by its epoch that it began at zero; an element that vanished begins at
    zero when it returns. Only where a counter went backwards without either (somebody reset it behind our back) is
    there no telling; it is taken to have begun at zero, and counted in `resets`.

Decisions
    - Each set has an interval of its own, from its last full reading to this one: a set that could not be read for
      a while is settled over all of that time, and keeps its last values until then.
    - A lease meets an interval when it began (its sandbox was made, or it was opened where nobody knows) before the
      interval's end, and closed after its begin. Alone, it gets the whole. A pod that left before the interval, or was
      made after it, has no part in it, whenever that became known.
    - A snapshot older than one already settled is ignored, as a whole; a time before the last one counts as the last.
    - What waits is kept per address and interval, and at most `MOST_PENDING` of those; beyond, the oldest give up
      early. So a scan of a large range costs bounded memory.

Invariants (tests/property/test_ledger_laws.py)
    L1  sum of POD totals + unattributed + pending = sum of all differences of POD, HOST_POD and REST counters.
    L2  Each of the levels POD and NAMESPACE sums to the same; HOST sums to the differences of HOST counters.
    L3  No total goes down while its name lives.
    L4  Settling twice with equal (snapshot, leases, at) changes nothing.
    L5  From a state saved when `must_save` says so, or whenever leases changed, a restart books what no restart would.
    L6  WORKLOAD totals and the tallies of leases whose pod has no workload sum to the same, as far as these leases are
        open, or closed and not yet taken from `tallies`; so do those of LABEL (tests/property/test_naming_laws.py).
    L7  What `tallies` were given sums to the POD totals (tests/property/test_accounts_laws.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from netacct.accounting import parcels
from netacct.accounting.parcels import ParcelState, Waiting
from netacct.accounting.series import Flow, Limits, Name, SeriesState, SeriesTable
from netacct.accounting.tallies import Tallies, TalliesState
from netacct.accounting.tenures import Interval, Tenures, age, meets, share
from netacct.model import (
    UNBOUNDED,
    UNCLASSIFIED,
    Address,
    Count,
    CounterKey,
    Direction,
    Lease,
    Level,
    Pod,
    Reading,
    Scope,
    SeriesKey,
    Snapshot,
)

LATE_BINDING = 120.0
"""Seconds for which bytes wait for the name of their sender."""

MOST_PENDING = 16384
"""So many parcels (one per address and interval) may wait; a node with a scanner on it has thousands."""

MOST_RELEASED = 16384
"""So many addresses are remembered with the time of their last release."""

_NOTHING = (0, 0)

Counts: TypeAlias = Mapping[Address, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SetState:
    """The last reading of one set of counters, without those that are zero."""

    epoch: int
    counts: Counts
    at: float


@dataclass(frozen=True, slots=True)
class LedgerState:
    """A `Ledger` as a value: what a store keeps."""

    at: float
    read_at: float
    sets: Mapping[CounterKey, SetState]
    series: SeriesState
    pending: tuple[ParcelState, ...] = ()
    released: Mapping[Address, float] = field(default_factory=dict)
    resets: int = 0
    ambiguous_bytes: int = 0
    tallies: TalliesState = field(default_factory=dict)


class Ledger:
    """The books. Begin with `baseline` or from an earlier `state()`; then `settle`, again and again.

    Attributes:
        resets: counters that went backwards without a reason.
        ambiguous_bytes: bytes that leases of several pods could claim.
        tallies: what each lease got; who closes a lease takes its tally.
        must_save: what was settled since `saved()` cannot be told again from the kernel and an older state, so save
            before you show it.
    """

    def __init__(
        self, state: LedgerState | None = None, *, limits: Limits | None = None, late_binding: float = LATE_BINDING
    ) -> None:
        self.resets = 0
        self.ambiguous_bytes = 0
        self.tallies = Tallies(state.tallies if state else None)
        self.must_save = False
        self._late_binding = late_binding
        self._at = self._read_at = UNBOUNDED
        self._sets: dict[CounterKey, SetState] = {}
        self._pending: Waiting = {}
        self._released: dict[Address, float] = {}
        self._series = SeriesTable(limits or Limits(), state.series if state else None)
        if state is not None:
            self._restore(state)

    @property
    def at(self) -> float:
        """The time up to which everything is settled."""
        return self._at

    @property
    def since(self) -> float:
        """Where the oldest unsettled interval begins: the leases for the next `settle` are those since then."""
        return min((known.at for known in self._sets.values()), default=self._at)

    @property
    def totals(self) -> Mapping[SeriesKey, Count]:
        """Every total, families summed; those of ended names too, as long as they are kept."""
        return self._series.totals

    @property
    def capped(self) -> int:
        """How many names found no place of their own and went to `__other__`."""
        return self._series.capped

    def pending(self) -> dict[Flow, Count]:
        """The sum of what waits for a name."""
        return parcels.total(self._pending)

    @property
    def waiting(self) -> bool:
        """Whether anything waits for a name."""
        return bool(self._pending)

    def alive(self, now: float) -> Iterator[tuple[Level, Name, Pod | None]]:
        """The names that have series of their own at `now`, and at level POD the pod."""
        return self._series.alive(now)

    def baseline(self, snapshot: Snapshot, at: float) -> None:
        """Take these counters as where counting begins: nothing of them is booked."""
        self._sets.update((reading.key, SetState(reading.epoch, reading.counts, at)) for reading in snapshot.readings)
        self._at, self._read_at = max(at, self._at), max(snapshot.at, self._read_at)
        self.must_save = True

    def contradicts(self, snapshot: Snapshot) -> bool:
        """Whether the kernel is behind this ledger: most counters of the same epoch are lower than they were settled.

        Counters of a living set only grow, so a ledger of the future is not of this kernel: it was rolled back, or
        belongs to another one. A few may be lower (reset behind our back); `settle` deals with those.
        """
        ahead = compared = 0
        for reading in snapshot.readings:
            known = self._sets.get(reading.key)
            if known is None or known.epoch != reading.epoch:
                continue
            pairs = [(known.counts[ip], now) for ip, now in reading.counts.items() if ip in known.counts]
            compared += sum(was != _NOTHING for was, _ in pairs)
            ahead += sum(was[0] > now[0] or was[1] > now[1] for was, now in pairs)
        return 2 * ahead > compared

    def settle(self, snapshot: Snapshot, leases: Iterable[Lease], at: float, *, final: bool = False) -> None:
        """Book what was counted since the last reading.

        Args:
            snapshot: the reading. A set that is missing from it keeps its last values.
            leases: all open leases, and those that closed at `since` or later.
            at: the time of the reading; two readings that differ have different times.
            final: these counters were dropped after this reading (`discard`, a retired class): book them and forget
                them. Such a snapshot may hold a part of a set only.
        """
        if snapshot.at < self._read_at:
            return
        at = max(at, self._at)
        tenures = self._enrol(leases, at)
        for reading in snapshot.readings:
            known = self._sets.get(reading.key)
            start = known.at if known else self._at
            for ip, delta in self._deltas(reading, known):
                self._book(reading.key, ip, delta, tenures.get(ip, ()), (start, at))
            self._remember(reading, known, at, final=final)
        self._give_up(at)
        self._bind(tenures, at)
        self._at, self._read_at = at, snapshot.at

    def name(self, old: Lease, new: Lease, at: float) -> None:
        """A lease's workload, or its pod's label, became known at `at`: what it got so far counts for these, too.

        Once known it must stay known for as long as the lease lasts; another one gets what comes from then on.
        """
        if old.pod != new.pod and (old.pod.namespace, old.pod.name) == (new.pod.namespace, new.pod.name):
            self._series.credit(old.pod, new.pod, self.tallies.of(old).counts, at)
            self.must_save = True

    def add_unclassified(self, lease: Lease, direction: Direction, count: Count, at: float) -> None:
        """Book to a lease what no counter saw and the audit found missing; comes on top of L1."""
        flow = (direction, UNCLASSIFIED)
        self._series.book(lease.pod, flow, count, at)
        self.tallies.add(lease, flow, count)
        self.must_save = True

    def forget_but(self, present: Collection[CounterKey]) -> None:
        """Forget the sets that the kernel has no more. Each would hold up `since`, and with it every closed lease."""
        for key in self._sets.keys() - present:
            del self._sets[key]
            self.must_save = True

    def saved(self) -> None:
        """A store holds this ledger's `state()` now."""
        self.must_save = False

    def state(self) -> LedgerState:
        """Everything, as a value that later settling does not change."""
        sets = {
            key: SetState(known.epoch, {ip: now for ip, now in known.counts.items() if now != _NOTHING}, known.at)
            for key, known in self._sets.items()
        }
        return LedgerState(
            at=self._at,
            read_at=self._read_at,
            sets=sets,
            series=self._series.state(),
            pending=parcels.state(self._pending),
            released=dict(self._released),
            resets=self.resets,
            ambiguous_bytes=self.ambiguous_bytes,
            tallies=self.tallies.state(),
        )

    def _restore(self, state: LedgerState) -> None:
        self._at, self._read_at = state.at, state.read_at
        self._sets = dict(state.sets)
        self._released = dict(state.released)
        self.resets, self.ambiguous_bytes = state.resets, state.ambiguous_bytes
        self._pending = parcels.restore(state.pending)

    def _enrol(self, leases: Iterable[Lease], at: float) -> Tenures:
        """The leases of each address, the newest last; notes who is alive and which addresses were released."""
        tenures: dict[Address, list[Lease]] = {}
        newcomers: list[tuple[Lease, float]] = []
        for lease in leases:
            tenures.setdefault(lease.ip, []).append(lease)
            active = at if lease.closed is None else lease.closed
            if not self._series.keep_alive(lease.pod, lease.opened, active):
                newcomers.append((lease, active))
            if lease.closed is not None:
                # Put last, so that the first is the one released longest ago.
                self._released[lease.ip] = max(lease.closed, self._released.pop(lease.ip, UNBOUNDED))
        for lease, active in newcomers:
            self._series.admit(lease.pod, lease.opened, active, at)
        while len(self._released) > MOST_RELEASED:
            del self._released[next(iter(self._released))]
        for held in tenures.values():
            if len(held) > 1:
                held.sort(key=age)
        return tenures

    def _deltas(self, reading: Reading, known: SetState | None) -> list[tuple[Address, tuple[int, int]]]:
        """What each element counted since the last reading, where that is anything."""
        old: Counts = {}
        if known is not None and known.epoch == reading.epoch:
            old = known.counts
        elif known is not None:
            self.must_save = True
        if old == reading.counts:
            return []
        if not reading.counts.keys() >= old.keys():
            self.must_save = True
        changed = [(ip, now) for ip, now in reading.counts.items() if now != old.get(ip, _NOTHING)]
        deltas = [(ip, self._since(old.get(ip, _NOTHING), now)) for ip, now in changed]
        return [item for item in deltas if item[1] != _NOTHING]

    def _since(self, was: tuple[int, int], now: tuple[int, int]) -> tuple[int, int]:
        if now[0] < was[0] or now[1] < was[1]:
            self.resets += 1
            self.must_save = True
            return now
        return (now[0] - was[0], now[1] - was[1])

    def _book(
        self,
        key: CounterKey,
        ip: Address,
        delta: tuple[int, int],
        tenures: Sequence[Lease],
        interval: Interval,
    ) -> None:
        flow = (key.direction, key.traffic)
        if key.scope in (Scope.HOST, Scope.REST):
            level = Level.HOST if key.scope is Scope.HOST else Level.UNATTRIBUTED
            self._series.add(SeriesKey(level, (), *flow), delta)
            return
        meeting = [lease for lease in tenures if meets(lease, interval)]
        if meeting:
            self._give(meeting, flow, delta, interval, interval[1])
            return
        parcels.put(self._pending, ip, flow, delta, interval, self._released.get(ip, UNBOUNDED))
        # How this interval ends decides who may claim the bytes; a restart would make one long interval of several.
        self.must_save = True

    def _give(
        self,
        candidates: Sequence[Lease],
        flow: Flow,
        count: tuple[int, int],
        interval: Interval,
        at: float,
    ) -> None:
        """Book to the lease that had most of the interval, among equals to the newest; a guess if it is one of several.

        `candidates` are sorted, the newest last.
        """
        lease = candidates[-1]
        if len(candidates) > 1:
            lease = max(reversed(candidates), key=lambda one: share(one, interval))
            if any(other.pod.uid != lease.pod.uid for other in candidates):
                self.ambiguous_bytes += count[0]
        self._series.book(lease.pod, flow, count, at)
        self.tallies.add(lease, flow, count)

    def _remember(self, reading: Reading, known: SetState | None, at: float, *, final: bool) -> None:
        if not final:
            self._sets[reading.key] = SetState(reading.epoch, reading.counts, at)
            return
        self.must_save = True
        left: Counts = {}
        if known is not None and known.epoch == reading.epoch:
            left = {ip: was for ip, was in known.counts.items() if ip not in reading.counts}
        if known is not None and left:
            self._sets[reading.key] = SetState(known.epoch, left, known.at)
        else:
            self._sets.pop(reading.key, None)

    def _give_up(self, at: float) -> None:
        """Book as unattributed what has waited too long, and the oldest of too much."""
        for parcel in parcels.give_up(self._pending, at - self._late_binding, MOST_PENDING):
            for flow, count in parcel.counts.items():
                self._series.add(SeriesKey(Level.UNATTRIBUTED, (), *flow), count)

    def _bind(self, tenures: Tenures, at: float) -> None:
        """Book what waits to the leases that may claim it."""
        for parcel, claiming in parcels.claim(self._pending, tenures):
            for flow, count in parcel.counts.items():
                self._give(claiming, flow, count, (parcel.start, parcel.end), at)
