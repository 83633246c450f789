"""The laws of the ledger, against a naive oracle that knows the whole history and keeps no state between steps."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from netacct.accounting.ledger import Ledger, LedgerState
from netacct.accounting.series import OTHER, Limits
from netacct.model import (
    UNBOUNDED,
    WHOLE,
    ZERO,
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

IPS = [bytes([10, 0, 0, n]) for n in (1, 2)] + [bytes(15) + b"\x01"]
POD_SETS = [
    CounterKey(4, Scope.POD, Direction.RECEIVE, "internet"),
    CounterKey(4, Scope.POD, Direction.TRANSMIT, "pod"),
    CounterKey(6, Scope.POD, Direction.RECEIVE, "internet"),
]
WHOLE_SETS = [
    CounterKey(4, Scope.REST, Direction.RECEIVE, "internet"),
    CounterKey(4, Scope.HOST, Direction.TRANSMIT, "tunnel"),
]
LATE = 20.0
Totals = dict[SeriesKey, Count]


@dataclass
class World:
    """A kernel with counters, and a lease book without judgement."""

    now: float = 100.0
    epochs: dict[CounterKey, int] = field(default_factory=lambda: dict.fromkeys([*POD_SETS, *WHOLE_SETS], 1))
    counts: dict[CounterKey, dict[Address, tuple[int, int]]] = field(
        default_factory=lambda: {key: {} for key in [*POD_SETS, *WHOLE_SETS]}
    )
    open: dict[Address, Lease] = field(default_factory=dict)
    closed: list[Lease] = field(default_factory=list)
    pods: int = 0

    def send(self, key: CounterKey, ip: Address, count: tuple[int, int]) -> None:
        """Count a packet or more; that takes a moment."""
        self.now += 1 / 64
        old = self.counts[key].get(ip, (0, 0))
        self.counts[key][ip] = (old[0] + count[0], old[1] + count[1])

    def read(self, hidden: CounterKey | None = None) -> Snapshot:
        """Every set but one."""
        return Snapshot(
            self.now,
            tuple(Reading(key, self.epochs[key], dict(counts)) for key, counts in self.counts.items() if key != hidden),
            (hidden,) if hidden else (),
        )

    def leases(self) -> list[Lease]:
        """All leases there ever were."""
        return [*self.open.values(), *self.closed]

    def close(self, ip: Address) -> None:
        """End the lease of an address, if it has one."""
        if ip in self.open:
            self.closed.append(replace(self.open.pop(ip), closed=self.now))

    def take(self, ip: Address, age: float | None) -> None:
        """A new pod gets the address; its sandbox is `age` seconds old, or of unknown age."""
        self.close(ip)
        self.pods += 1
        pod = Pod(f"ns{self.pods % 2}", f"pod-{self.pods % 3}", f"uid{self.pods}", "Job", f"job-{self.pods % 2}")
        created = UNBOUNDED if age is None else self.now - age
        self.open[ip] = Lease(ip, pod, f"box{self.pods}", created, self.now)


Step = tuple[Snapshot, list[Lease], float]


def begin(lease: Lease) -> float:
    """When a lease's pod may have begun to send."""
    return lease.opened if lease.created == UNBOUNDED else lease.created


Counted = tuple[float, float, Address, CounterKey, Count]
"""Something that one counter counted: interval, address, set, how much."""


def counted_in(steps: list[Step], number: int, start: float) -> list[Counted]:
    """What the counters grew by at one step, by comparing each with its last appearance in all of the history."""
    snapshot, _, at = steps[number]
    found = []
    for reading in snapshot.readings:
        earlier = [(old, when) for past, _, when in steps[:number] for old in past.readings if old.key == reading.key]
        previous, since = earlier[-1] if earlier else (None, start)
        for ip, now in reading.counts.items():
            was = previous.counts.get(ip, (0, 0)) if previous and previous.epoch == reading.epoch else (0, 0)
            if now[0] < was[0] or now[1] < was[1]:
                was = (0, 0)
            found.append((since, at, ip, reading.key, Count(now[0] - was[0], now[1] - was[1])))
    return [item for item in found if item[-1] != ZERO]


def age(lease: Lease) -> tuple[float, float, float, str]:
    """How new a lease is."""
    return (lease.created, lease.opened, lease.closed or 1e9, lease.sandbox)


def owner(item: Counted, leases: list[Lease]) -> Lease | None:
    """The lease that had most of the interval, the newest of several."""
    since, end, ip, _, _ = item
    there = [x for x in leases if x.ip == ip and begin(x) < end and (x.closed is None or x.closed > since)]
    return max(there, key=lambda x: (share(x, since, end), age(x)), default=None)


def share(lease: Lease, since: float, end: float) -> float:
    """How much of an interval a lease had."""
    return min(end, lease.closed or end) - max(since, begin(lease))


def late_owner(item: Counted, freed: float, leases: list[Lease]) -> Lease | None:
    """Of those made before the interval's end, and after the last release, the one that had most of the interval."""
    since, end, ip, _, _ = item
    able = [
        x
        for x in leases
        if x.ip == ip
        and (x.closed is None or x.closed > since)
        and (x.created == UNBOUNDED or freed <= x.created < end)
    ]
    return max(able, key=lambda x: (share(x, since, end), age(x)), default=None)


def labels_of(lease: Lease) -> list[tuple[Level, tuple[str, ...]]]:
    """The names that a lease's bytes are booked under."""
    pod = lease.pod
    return [
        (Level.POD, (pod.namespace, pod.name)),
        (Level.WORKLOAD, (pod.namespace, pod.workload_kind, pod.workload)),
        (Level.NAMESPACE, (pod.namespace,)),
    ]


def names_at_once(item: Counted, leases: list[Lease]) -> list[tuple[Level, tuple[str, ...]]]:
    """The names that something counted is booked under at once; none where it has to wait."""
    if item[3].scope is not Scope.POD:
        return [(Level.HOST if item[3].scope is Scope.HOST else Level.UNATTRIBUTED, ())]
    lease = owner(item, leases)
    return labels_of(lease) if lease else []


def expected(steps: list[Step], start: float) -> tuple[Totals, Count]:
    """The totals (and the sum of what is pending) that a history gives, worked out from all of it, naively."""
    totals: Totals = defaultdict(lambda: ZERO)
    waiting: list[tuple[float, Counted]] = []

    def book(names: list[tuple[Level, tuple[str, ...]]], item: Counted) -> None:
        for level, labels in names:
            series = SeriesKey(level, labels, item[3].direction, item[3].traffic)
            totals[series] = totals[series].plus(item[4])

    for number, (_, leases, at) in enumerate(steps):
        for item in counted_in(steps, number, start):
            names = names_at_once(item, leases)
            if names:
                book(names, item)
            else:
                freed = [x.closed for x in leases if x.ip == item[2] and x.closed is not None]
                waiting.append((max(freed, default=UNBOUNDED), item))
        still = []
        for freed_at, item in waiting:
            lease = late_owner(item, freed_at, leases)
            if at - item[1] > LATE:
                book([(Level.UNATTRIBUTED, ())], item)
            elif lease:
                book(labels_of(lease), item)
            else:
                still.append((freed_at, item))
        waiting = still
    pending = ZERO
    for _, item in waiting:
        pending = pending.plus(item[4])
    return dict(totals), pending


counts = st.tuples(st.integers(0, 3000), st.integers(1, 3))
# Mostly one address and one set, so that histories are about something.
ips = st.sampled_from([0, 0, 0, 0, 1, 2])
sets = st.sampled_from([0, 0, 0, 1])
ages = st.sampled_from([None, None, 0.0, 0.5, 2.0, 7.0, 12.0])
sends = st.tuples(st.just("send"), sets, ips, counts)
waits = st.tuples(st.just("wait"), st.sampled_from([0.0, 1.0, 1.0, 5.0, 20.0, 25.0]))
takes = st.tuples(st.just("take"), ips, ages, st.sampled_from(["settle", "settle", "before", "later"]))
closes = st.tuples(st.just("close"), ips, st.sampled_from(["settle", "settle", "before", "later"]))
settles = st.tuples(st.just("settle"), st.sampled_from([None, None, 0, 1, 2]))
upsets = st.one_of(
    st.tuples(st.just("flush"), sets),
    st.tuples(st.just("vanish"), sets, ips),
    st.tuples(st.just("lower"), sets, ips),
    st.tuples(st.just("whole"), st.integers(0, 1), counts),
)
moves = st.one_of(sends, sends, waits, waits, takes, closes, settles, settles, upsets)
histories = st.lists(moves, min_size=8, max_size=50)


def family_key(set_number: int, ip: Address) -> CounterKey:
    """A pod set of the address's family."""
    return POD_SETS[2] if len(ip) == 16 else POD_SETS[set_number % 2]


def move(world: World, step: tuple) -> bool:  # type: ignore[type-arg]  # what hypothesis draws is of many shapes
    """Do one thing to the world; returns whether it is a lease change that is settled in the same instant."""
    kind, *args = step
    if kind == "send":
        world.send(family_key(args[0], IPS[args[1]]), IPS[args[1]], args[2])
    elif kind == "whole":
        world.send(WHOLE_SETS[args[0]], WHOLE, args[1])
    elif kind == "wait":
        world.now += args[0]
    elif kind == "take":
        world.take(IPS[args[0]], args[1])
    elif kind == "close":
        world.close(IPS[args[0]])
    elif kind == "flush":
        world.epochs[POD_SETS[args[0]]] += 1
        world.counts[POD_SETS[args[0]]] = {}
    elif kind == "vanish":
        world.counts[family_key(args[0], IPS[args[1]])].pop(IPS[args[1]], None)
    elif kind == "lower":
        held = world.counts[family_key(args[0], IPS[args[1]])]
        held.update({ip: (count[0] // 2, count[1] // 2) for ip, count in held.items() if ip == IPS[args[1]]})
    return bool(step[-1] == "settle")


def settles_before(step: tuple) -> bool:  # type: ignore[type-arg]  # see move
    """Whether the counters are settled with the leases as they were before this change."""
    return bool(step[-1] == "before")


def relevant(world: World, ledger: Ledger) -> list[Lease]:
    """What the agent would hand in: open leases, and those that closed since the oldest unsettled interval began."""
    return [lease for lease in world.leases() if lease.closed is None or lease.closed >= ledger.since]


def new_ledger(world: World) -> Ledger:
    """A ledger of this world that counts from now on."""
    ledger = Ledger(late_binding=LATE, limits=Limits(pod_retention=1e9, group_retention=1e9))
    ledger.baseline(world.read(), world.now)
    return ledger


def level_sum(ledger: Ledger, level: Level) -> Count:
    """Everything of one level."""
    total = ZERO
    for key, count in ledger.totals.items():
        if key.level is level:
            total = total.plus(count)
    return total


def pending_sum(ledger: Ledger) -> Count:
    """Everything that waits."""
    total = ZERO
    for count in ledger.pending().values():
        total = total.plus(count)
    return total


@settings(max_examples=400)
@given(histories)
def test_totals_are_what_the_whole_history_says(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see move
    """Whatever happens in whatever order, each total is what a naive look at the whole history gives."""
    world = World()
    ledger = new_ledger(world)
    start = world.now
    steps: list[Step] = [(world.read(), [], world.now)]
    for step in [*history, ("settle", None)]:
        before = settles_before(step)
        if not before and not move(world, step) and step[0] != "settle":
            continue
        hidden = POD_SETS[step[1]] if step[0] == "settle" and step[1] is not None else None
        snapshot = world.read(hidden)
        ledger.settle(snapshot, relevant(world, ledger), world.now)
        steps.append((snapshot, world.leases(), world.now))
        if before:
            move(world, step)
    totals, pending = expected(steps, start)
    assert dict(ledger.totals) == totals
    assert pending_sum(ledger) == pending


@given(histories)
def test_every_counted_byte_is_in_exactly_one_place(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see move
    """Pod totals, unattributed and pending add up to what the counters grew by, at every step, and levels agree."""
    world = World()
    ledger = new_ledger(world)
    counted = host = ZERO
    for step in [*history, ("settle", None)]:
        if step[0] in ("flush", "vanish", "lower"):
            ledger.settle(world.read(), relevant(world, ledger), world.now)
        # An element that is back before anybody saw it gone is beyond telling, so here it is seen.
        if move(world, step) or step[0] in ("settle", "vanish"):
            ledger.settle(world.read(), relevant(world, ledger), world.now)
        if step[0] == "send":
            counted = counted.plus(Count(*step[3]))
        elif step[0] == "whole" and WHOLE_SETS[step[1]].scope is Scope.REST:
            counted = counted.plus(Count(*step[2]))
        elif step[0] == "whole":
            host = host.plus(Count(*step[2]))
        elif step[0] == "lower":
            # What is left after a reset behind our back cannot be told from what was sent after it.
            ip = IPS[step[2]]
            left = world.counts[family_key(step[1], ip)].get(ip, (0, 0))
            resets = ledger.resets
            ledger.settle(world.read(), relevant(world, ledger), world.now)
            counted = counted.plus(Count(*left)) if ledger.resets > resets else counted
    booked = level_sum(ledger, Level.POD)
    assert booked.plus(level_sum(ledger, Level.UNATTRIBUTED)).plus(pending_sum(ledger)) == counted
    assert level_sum(ledger, Level.NAMESPACE) == level_sum(ledger, Level.WORKLOAD) == booked
    assert level_sum(ledger, Level.HOST) == host


@given(histories)
def test_no_total_ever_goes_down(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see move
    """A total that was seen is never seen lower, whatever the counters do."""
    world = World()
    ledger = new_ledger(world)
    for step in history:
        before = dict(ledger.totals)
        if move(world, step) or step[0] == "settle":
            ledger.settle(world.read(), relevant(world, ledger), world.now)
        for key, count in before.items():
            assert ledger.totals[key].bytes >= count.bytes
            assert ledger.totals[key].packets >= count.packets


@example(
    [  # a name that two pods give a place in one settlement lives on the later of them
        *(("take", 0, None, "before"),) * 2,
        *(("send", 0, 0, (0, 1)),) * 2,
        ("take", 0, None, "before"),
        ("take", 0, None, "settle"),
    ]
)
@given(histories)
def test_settling_twice_changes_nothing(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see move
    """The same snapshot, leases and time once more leave the ledger's whole state as it was."""
    world = World()
    ledger = new_ledger(world)
    for step in history:
        if move(world, step) or step[0] == "settle":
            snapshot, leases = world.read(), relevant(world, ledger)
            ledger.settle(snapshot, leases, world.now)
            state = ledger.state()
            ledger.settle(snapshot, leases, world.now)
            assert ledger.state() == state


crashes = st.sampled_from([("crash",), ("crash",), ("save",)])


@settings(max_examples=400)
@given(st.lists(st.one_of(sends, waits, takes, settles, crashes, crashes, moves), min_size=8, max_size=50))
def test_a_crash_changes_no_total(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see move
    """A process that dies at any step and starts again from its last save books what an immortal one books."""
    world = World()
    immortal, mortal = new_ledger(world), new_ledger(world)
    saved: LedgerState = mortal.state()
    for step in [*history, ("settle", None)]:
        if step[0] == "crash":
            mortal = Ledger(saved, late_binding=LATE, limits=Limits(pod_retention=1e9, group_retention=1e9))
            continue
        if step[0] in ("flush", "vanish", "lower"):
            # What a counter held at its end is lost to whoever did not save it.
            for ledger in (immortal, mortal):
                ledger.settle(world.read(), relevant(world, ledger), world.now)
            saved = mortal.state()
        changed = move(world, step)
        if changed or step[0] in ("settle", "lower", "take", "close"):
            hidden = POD_SETS[step[1]] if step[0] == "settle" and step[1] is not None else None
            for ledger in (immortal, mortal):
                ledger.settle(world.read(hidden), relevant(world, ledger), world.now)
        if mortal.must_save or step[0] in ("save", "lower", "take", "close"):
            mortal.saved()
            saved = mortal.state()
    assert mortal.totals == immortal.totals
    assert mortal.pending() == immortal.pending()


@given(histories, st.integers(0, 2), st.integers(0, 2), st.integers(0, 2))
def test_caps_move_bytes_but_never_lose_one(
    history: list[tuple],  # type: ignore[type-arg]  # see move
    pods: int,
    workloads: int,
    namespaces: int,
) -> None:
    """With room for few names, `__other__` takes the rest, and each level still sums to the same."""
    world = World()
    limits = Limits(pods, workloads, namespaces, pod_retention=1e9, group_retention=1e9)
    capped, free = Ledger(late_binding=LATE, limits=limits), new_ledger(world)
    capped.baseline(world.read(), world.now)
    for step in [*history, ("settle", None)]:
        if move(world, step) or step[0] == "settle":
            for ledger in (capped, free):
                ledger.settle(world.read(), relevant(world, ledger), world.now)
    for level, room in ((Level.POD, pods), (Level.WORKLOAD, workloads), (Level.NAMESPACE, namespaces)):
        assert level_sum(capped, level) == level_sum(free, level)
        assert len({key.labels for key in capped.totals if key.level is level and key.labels[-1] != OTHER}) <= room
