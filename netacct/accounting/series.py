"""The totals that grow: which series a pod's bytes go to, and how many series there may be. Pure.

Bytes of a pod go to its pod series, its workload's, that of its value of one label (where one is configured) and its
namespace's, all at once, so that each level sums to the same. As long as nobody has told a pod's workload or label they
go to the other levels only, and are credited when it is told (`credit`).

A level has room for so many series of its own; who comes later goes to `__other__` of the namespace. That is decided
when a name is first seen with a lease, and sticks until the name has ended: a series that changed its meaning while
somebody watches would be worse than a coarse one.

A name ends when it has been idle for its retention (a pod without a lease; a workload, namespace or `__other__` without
a lease or a byte). It then frees its place, but its total is kept, for the `kept` names per level that ended last, and
goes on from there if the name returns (a StatefulSet's pod), so that nobody who remembers the series sees it fall.
Worker thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from netacct.model import UNBOUNDED, ZERO, Count, Direction, Level, Pod, SeriesKey

OTHER = "__other__"
"""The label of everything that found no series of its own."""

PURGE_SECONDS = 60.0
"""Names that ended keep their places so long at least, unless the level is full."""

NAMED = (Level.POD, Level.WORKLOAD, Level.LABEL, Level.NAMESPACE)
"""The levels that have names, and therefore caps."""

Name: TypeAlias = tuple[str, ...]
"""The label values of a series, but direction and traffic."""

Flow: TypeAlias = tuple[Direction, str]
"""Direction and traffic class."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many names each level may have, and how long they last without a lease (seconds).

    by_label: the pod label whose values level LABEL sums over; "" for none.
    kept: so many ended names per level keep their totals in case they return.
    """

    pods: int = 500
    workloads: int = 500
    namespaces: int = 500
    labels: int = 500
    by_label: str = ""
    pod_retention: float = 300.0
    group_retention: float = 3600.0
    kept: int = 200

    def names(self, level: Level) -> int:
        """How many names of their own this level may have."""
        return {
            Level.POD: self.pods,
            Level.WORKLOAD: self.workloads,
            Level.LABEL: self.labels,
            Level.NAMESPACE: self.namespaces,
        }[level]

    def retention(self, level: Level, name: Name) -> float:
        """How long a name lasts after its last activity."""
        return self.pod_retention if level is Level.POD and name[-1] != OTHER else self.group_retention


@dataclass(slots=True)
class Slot:
    """Where the bytes of one name go (`target` is the name itself, or its `__other__`), and when it was last active.

    `pod` is the pod whose lease under this name opened last (level POD only), `rank` tells when; `keys` are the series
    made so far.
    """

    level: Level
    name: Name
    target: Name
    active: float
    lasts: float
    pod: Pod | None = None
    rank: tuple[float, str] = (UNBOUNDED, "")
    keys: dict[Flow, SeriesKey] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether it takes one of its level's places."""
        return self.target == self.name and self.name[-1] != OTHER

    @property
    def lives_on_bytes(self) -> bool:
        """Whether a byte keeps it alive; a pod's own name lives on leases only."""
        return self.level is not Level.POD or self.name[-1] == OTHER

    def has_ended(self, at: float) -> bool:
        """Whether it has been idle for too long."""
        return at - self.active > self.lasts

    def key(self, flow: Flow) -> SeriesKey:
        """The series of one direction and class."""
        key = self.keys.get(flow)
        if key is None:
            key = self.keys[flow] = SeriesKey(self.level, self.target, *flow)
        return key


class _Route(NamedTuple):
    """The slots of one pod's names, those that they book to, and those that its bytes keep alive."""

    pod: Pod
    slots: tuple[Slot, ...]
    targets: tuple[Slot, ...]
    on_bytes: tuple[Slot, ...]


SlotState: TypeAlias = tuple[Level, Name, Name, float, Pod | None]
"""A slot as a value: level, name, target, last active, pod."""


@dataclass(frozen=True, slots=True)
class SeriesState:
    """A `SeriesTable` as a value. `by_label` is the label that series of level LABEL are about."""

    totals: dict[SeriesKey, Count]
    slots: tuple[SlotState, ...] = ()
    ended: tuple[tuple[Level, Name, float], ...] = ()
    capped: int = 0
    by_label: str = ""


class SeriesTable:
    """All totals and who may have some. `capped` counts the names that were sent to `__other__`."""

    def __init__(self, limits: Limits, state: SeriesState | None = None) -> None:
        self.limits = limits
        self.totals: dict[SeriesKey, Count] = {}
        self.capped = 0
        self._slots: dict[Level, dict[Name, Slot]] = {level: {} for level in NAMED}
        self._own: dict[Level, int] = dict.fromkeys(NAMED, 0)
        self._ended: dict[Level, dict[Name, float]] = {level: {} for level in NAMED}
        self._purged: dict[Level, float] = {}
        self._routes: dict[tuple[str, str], _Route] = {}
        if state is not None:
            self._restore(state)

    def state(self) -> SeriesState:
        """Everything, as a value."""
        slots = tuple(
            (level, name, slot.target, slot.active, slot.pod)
            for level, slots in self._slots.items()
            for name, slot in slots.items()
        )
        ended = tuple((level, name, at) for level, names in self._ended.items() for name, at in names.items())
        return SeriesState(dict(self.totals), slots, ended, self.capped, self.limits.by_label)

    def keep_alive(self, pod: Pod, opened: float, active: float) -> bool:
        """Note that a lease of `pod` lasts or lasted until `active`; returns whether all of its names have places.

        A place that was held when the lease opened is held until now, however long ago the last look was. Do this for
        every lease before the first `admit`, which takes away the places of the idle.
        """
        route = self._routes.get((pod.namespace, pod.name))
        is_known = route is not None and (route.pod is pod or route.pod == pod)
        for slot in route.slots if route is not None and is_known else self._slots_of(pod):
            if opened - slot.active > slot.lasts:
                is_known = False
            elif active > slot.active:
                slot.active = active
        return is_known

    def admit(self, pod: Pod, opened: float, active: float, at: float) -> None:
        """Give every name of a pod a place, if its lease, from `opened` until `active`, is not over for good."""
        if at - active <= min(self.limits.retention(level, name) for level, name in self._names_of(pod)):
            self._find_route(pod, opened, active, at)

    def book(self, pod: Pod, flow: Flow, count: tuple[int, int], at: float) -> None:
        """Add to every series of a pod."""
        route = self._routes.get((pod.namespace, pod.name))
        if route is None or (route.pod is not pod and route.pod != pod):
            route = self._find_route(pod, UNBOUNDED, at, at)
        for slot in route.targets:
            self.add(slot.keys.get(flow) or slot.key(flow), count)
        for slot in route.on_bytes:
            slot.active = max(slot.active, at)

    def credit(self, old: Pod, new: Pod, counts: Mapping[Flow, Count], at: float) -> None:
        """What was booked to `old` before its workload or label was known, as `new` tells it, counts for these too.

        A level that `old` had a name at gets nothing. Both are one pod of one name.
        """
        names = self._names_of(new)
        late = {level for level, _ in names} - {level for level, _ in self._names_of(old)}
        place = self._slots[Level.POD].get((old.namespace, old.name))
        if place is not None and place.pod == old:
            place.pod = new
        if not late:
            return
        for level, name in names:
            if level not in late and level is not Level.NAMESPACE:
                continue  # the namespace must have its place: it decides whose `__other__`
            slot, target = self._places(level, name, at, at)
            if level in late and counts:
                slot.active = target.active = max(slot.active, target.active, at)
                for flow, count in counts.items():
                    self.add(target.key(flow), count)

    def add(self, key: SeriesKey, count: tuple[int, int]) -> None:
        """Add to one series (of the host, or unattributed)."""
        old = self.totals.get(key, ZERO)
        # Past the generated __new__, which would take a quarter of a settlement's time.
        self.totals[key] = tuple.__new__(Count, (old[0] + count[0], old[1] + count[1]))

    def alive(self, now: float) -> Iterator[tuple[Level, Name, Pod | None]]:
        """The names that have series of their own at `now`, `__other__` included."""
        for level, slots in self._slots.items():
            for name, slot in slots.items():
                if slot.target == name and not slot.has_ended(now):
                    yield level, name, slot.pod

    def _restore(self, state: SeriesState) -> None:
        """Go on where `state` ended; values of another label than is asked for now are not this one's."""
        forgotten = () if state.by_label == self.limits.by_label else (Level.LABEL,)
        self.totals = {key: total for key, total in state.totals.items() if key.level not in forgotten}
        self.capped = state.capped
        for level, name, target, active, pod in state.slots:
            if level not in forgotten:
                self._insert(level, name, target, active).pod = pod
        for level, name, active in state.ended:
            if level not in forgotten:
                self._ended[level][name] = active

    def _names_of(self, pod: Pod) -> list[tuple[Level, Name]]:
        return names_of(pod, self.limits.by_label)

    def _slots_of(self, pod: Pod) -> Iterator[Slot]:
        for level, name in self._names_of(pod):
            slot = self._slots[level].get(name)
            if slot is not None:
                yield slot
                if slot.target != name and slot.target in self._slots[level]:
                    yield self._slots[level][slot.target]

    def _find_route(self, pod: Pod, opened: float, active: float, at: float) -> _Route:
        slots: list[Slot] = []
        targets: list[Slot] = []
        for level, name in self._names_of(pod):
            slot, target = self._places(level, name, active, at)
            slot.active, target.active = max(slot.active, active), max(target.active, active)
            slots += [slot] if slot is target else [slot, target]
            targets.append(target)
            if level is Level.POD and (opened, pod.uid) >= slot.rank:
                slot.pod, slot.rank = pod, (opened, pod.uid)
        on_bytes = tuple(slot for slot in slots if slot.lives_on_bytes)
        route = self._routes[pod.namespace, pod.name] = _Route(pod, tuple(slots), tuple(targets), on_bytes)
        return route

    def _places(self, level: Level, name: Name, active: float, at: float) -> tuple[Slot, Slot]:
        """The place of a name, and the one that its bytes are booked to: the same, or that of `__other__`."""
        slot = self._place(level, name, active, at)
        return slot, slot if slot.target == name else self._place(level, slot.target, active, at)

    def _place(self, level: Level, name: Name, active: float, at: float) -> Slot:
        """The place of a name; a new one where it has none, or the old one has lapsed."""
        slot = self._slots[level].get(name)
        if slot is not None and not slot.has_ended(at):
            return slot
        self._end(level, [name])
        limit = self.limits.names(level)
        is_full = self._own[level] >= limit or len(self._slots[level]) > 2 * limit
        if is_full or at - self._purged.get(level, UNBOUNDED) >= PURGE_SECONDS:
            self._purge(level, at)
        target = name
        if name[-1] != OTHER and self._own[level] >= limit:
            target = self._other(level, name)
            self.capped += 1
        self._ended[level].pop(name, None)
        return self._insert(level, name, target, active)

    def _insert(self, level: Level, name: Name, target: Name, active: float) -> Slot:
        slot = Slot(level, name, target, active, self.limits.retention(level, name))
        self._slots[level][name] = slot
        self._own[level] += slot.is_own
        return slot

    def _other(self, level: Level, name: Name) -> Name:
        """The `__other__` of a name: per namespace, unless the namespace itself found no place."""
        if level is Level.NAMESPACE:
            return (OTHER,)
        namespace = self._slots[Level.NAMESPACE][name[:1]].target
        return (*namespace, *[OTHER] * (len(name) - 1))

    def _purge(self, level: Level, at: float) -> None:
        """End what has been idle, and forget the totals of what ended longest ago."""
        if self._purged.get(level) == at:
            return
        self._purged[level] = at
        self._end(level, [name for name, slot in self._slots[level].items() if slot.has_ended(at)])
        ended = self._ended[level]
        if len(ended) <= self.limits.kept:
            return
        oldest = sorted(ended, key=lambda name: ended[name])[: len(ended) - self.limits.kept * 3 // 4]
        for name in oldest:
            del ended[name]
        gone = set(oldest)
        for key in [key for key in self.totals if key.level is level and key.labels in gone]:
            del self.totals[key]

    def _end(self, level: Level, names: Iterable[Name]) -> None:
        for name in names:
            slot = self._slots[level].pop(name, None)
            if slot is None:
                continue
            self._routes.clear()
            self._own[level] -= slot.is_own
            if slot.target == name:
                self._ended[level][name] = slot.active


def names_of(pod: Pod, by_label: str = "") -> list[tuple[Level, Name]]:
    """The names under which a pod's bytes are summed. The namespace comes first: it decides whose `__other__`.

    There is none for what is not known: the workload as long as nobody told it, and the value of the label `by_label`
    as long as nobody told workload or labels. A pod that is known to lack the label has the value "".
    """
    names: list[tuple[Level, Name]] = [(Level.NAMESPACE, (pod.namespace,)), (Level.POD, (pod.namespace, pod.name))]
    if pod.workload:
        names.append((Level.WORKLOAD, (pod.namespace, pod.workload_kind, pod.workload)))
    if by_label and (pod.workload or pod.labels):
        names.append((Level.LABEL, (pod.namespace, dict(pod.labels).get(by_label, ""))))
    return names
