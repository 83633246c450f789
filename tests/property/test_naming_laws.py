"""The laws of late names: a pod's bytes reach its workload and its label's value, whenever anybody tells these.

CNI opens leases of pods whose owner only the kubelet knows; it tells it before, while or after the pod lives, or never.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from netacct import config
from netacct.accounting.accounts import Account, decode
from netacct.accounting.accounts_read import read_directory
from netacct.accounting.series import OTHER
from netacct.accounting.store import Place, Store
from netacct.accounting.tallies import key_of
from netacct.books import Books
from netacct.identity.leases import needs_reading
from netacct.identity.source import Replace, SourceEvent
from netacct.identity.source import Update as Said
from netacct.model import (
    ZERO,
    Address,
    Count,
    CounterKey,
    Direction,
    Level,
    Observation,
    Pod,
    Reading,
    Scope,
    SeriesKey,
    Snapshot,
)

IPS = [bytes([10, 0, 0, n]) for n in (1, 2)] + [bytes(15) + b"\x01"]
SETS = [
    CounterKey(4, Scope.POD, Direction.RECEIVE, "internet"),
    CounterKey(4, Scope.POD, Direction.TRANSMIT, "pod"),
    CounterKey(6, Scope.POD, Direction.RECEIVE, "internet"),
]
LATE = 20.0
Sums = Counter[tuple[str, ...]]
"""Bytes and packets by whatever names, direction, class, unit."""


@dataclass
class Kernel:
    """Counters, and who truly has which address: pods without a name in CNI's words, with one in the kubelet's."""

    now: float = 1000.0
    counts: dict[CounterKey, dict[Address, tuple[int, int]]] = field(default_factory=lambda: {key: {} for key in SETS})
    held: dict[Address, Observation] = field(default_factory=dict)
    told: dict[str, tuple[Observation, ...]] = field(default_factory=dict)
    pods: int = 0

    def read(self) -> Snapshot:
        """What was counted so far."""
        return Snapshot(self.now, tuple(Reading(key, 1, dict(counts)) for key, counts in self.counts.items()))

    def send(self, which: int, address: int, amount: tuple[int, int]) -> None:
        """Count something, of whoever has the address."""
        ip = IPS[address]
        if ip in self.held:
            held = self.counts[SETS[2] if len(ip) == 16 else SETS[which]]
            was = held.get(ip, (0, 0))
            held[ip] = (was[0] + amount[0], was[1] + amount[1])

    def come(self, address: int) -> list[SourceEvent]:
        """A new pod gets an address; its name may be that of an earlier one."""
        self.pods += 1
        pod = Pod(f"team-{self.pods % 2}", f"p{self.pods % 3}", f"uid{self.pods}")
        seen = Observation("cni", IPS[address], pod, f"box{self.pods}", self.now, self.now)
        return [*self.go(address), self._hold(seen)]

    def go(self, address: int) -> list[SourceEvent]:
        """A pod gives its address back."""
        seen = self.held.pop(IPS[address], None)
        if seen is None:
            return []
        return [Said("cni", (Observation("cni", seen.ip, seen.pod, seen.sandbox, seen.created, self.now, False),))]

    def tell(self, back: int, value: str | None, ended: bool) -> list[SourceEvent]:
        """The kubelet tells owner and label of one of the last pods, as it was or as one that has ended."""
        number = self.pods - back
        if number < 1:
            return []
        labels = () if value is None else (("experiment", value),)
        pod = Pod(f"team-{number % 2}", f"p{number % 3}", f"uid{number}", "Job", f"job-{number % 4}", labels)
        ips = [ip for ip, seen in self.held.items() if seen.pod.uid == pod.uid] or [IPS[2]]
        present = not ended and any(seen.pod.uid == pod.uid for seen in self.held.values())
        seen = tuple(Observation("kubelet", ip, pod, "", self.now - 1.0, self.now, present) for ip in ips)
        self.told[pod.uid] = seen
        return [Said("kubelet", seen)]

    def everything(self) -> list[SourceEvent]:
        """What sources say to an agent that starts."""
        seen = tuple(each for told in self.told.values() for each in told if each.present)
        return [Replace("cni", tuple(self.held.values()), self.now), Replace("kubelet", seen, self.now)]

    def _hold(self, seen: Observation) -> SourceEvent:
        self.held[seen.ip] = seen
        return Said("cni", (seen,))


@dataclass
class Agent:
    """Books over a kernel, in a folder of their own."""

    kernel: Kernel
    folder: Path
    metrics: dict[str, object]

    def __post_init__(self) -> None:
        path = self.folder / "netacct.yaml"
        identity = {"late_binding": f"{LATE:.0f}s"}
        text = {"accounts_dir": str(self.folder / "accounts"), "metrics": self.metrics, "identity": identity}
        path.write_text(json.dumps(text))
        self.config = config.load(str(path))
        self.start()
        self.books.ledger.baseline(self.kernel.read(), self.kernel.now)
        self.books.save(self.kernel.now)

    def start(self) -> None:
        """Begin a life from what is on the disk."""
        self.books = Books(Store(self.folder / "state", Place("boot", "net")), self.config, ["kubelet", "cni"])

    def restart(self) -> None:
        """Die without a word; the next life is told everything anew."""
        self.start()
        self.hear(self.kernel.everything())

    def settle(self) -> None:
        """Read and book, and make the lease changes that sources have told until now."""
        self.books.take(self.kernel.read())
        self.commit()

    def die_early(self, events: list[SourceEvent]) -> None:
        """Hear something, read and store, and die before anybody was told what changed."""
        for event in events:
            self.books.note(event)
        self.books.take(self.kernel.read())
        self.books.save(self.kernel.now)
        self.start()

    def commit(self) -> None:
        """Make the lease changes, and store."""
        if self.books.commit(self.kernel.now):
            self.books.save(self.kernel.now)

    def hear(self, events: list[SourceEvent]) -> None:
        """What an agent does when sources have spoken."""
        for event in events:
            self.books.note(event)
        changes = self.books.pending()
        if changes:
            if needs_reading(changes):
                self.settle()
            self.commit()

    def accounts(self) -> list[Account]:
        """All records, written or not."""
        waiting = [decode(line) for line in self.books._closing.state().lines]
        written = read_directory(self.folder / "accounts", _fail) if (self.folder / "accounts").is_dir() else []
        return list({record.id: record for record in [*written, *waiting]}.values())

    def leases(self, names: Callable[[Pod | Account], tuple[str, ...]]) -> Sums:
        """What accounts and tallies hold, by names of their own."""
        found: Sums = Counter()
        for record in self.accounts():
            _add(found, names(record), record.counts)
        lasting = [*self.books.leases.open_leases(), *self.books._closing.state().leases]
        owners = {key_of(lease): lease.pod for lease in lasting}
        for key, (_, counts) in self.books.ledger.tallies.state().items():
            _add(found, names(owners[key]), counts)
        return +found

    def totals(self, level: Level, width: int) -> Sums:
        """A level's totals by the first labels of each."""
        found: Sums = Counter()
        for key, count in self.books.ledger.totals.items():
            if key.level is level:
                _add(found, key.labels[:width], {(key.direction, key.traffic): count})
        return +found


def _fail(text: str) -> None:
    raise AssertionError(text)


def _add(found: Sums, names: tuple[str, ...], counts: object) -> None:
    assert isinstance(counts, dict)
    for (direction, traffic), count in counts.items():
        for unit, number in zip(("bytes", "packets"), count, strict=True):
            found[*names, direction, traffic, unit] += number


def nameless(one: Pod | Account) -> tuple[str, ...]:
    """The namespace of what nobody told the owner of."""
    return ("(named)",) if one.workload else (one.namespace,)


def by_workload(one: Pod | Account) -> tuple[str, ...]:
    """The workload."""
    return (one.namespace, one.workload_kind, one.workload)


ips = st.sampled_from([0, 0, 0, 1, 2])
values = st.sampled_from(["x", "x", "y", None])
sends = st.tuples(st.just("send"), st.integers(0, 1), ips, st.tuples(st.integers(0, 3000), st.integers(1, 3)))
comings = st.tuples(st.just("come"), ips)
goings = st.tuples(st.just("go"), ips)
tellings = st.tuples(st.just("tell"), st.sampled_from([0, 0, 0, 1, 2]), values, st.booleans())
others = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from([0.5, 5.0, 5.0, 25.0])),
    st.tuples(st.just("settle")),
    st.tuples(st.just("settle")),
    st.tuples(st.just("restart")),
    st.tuples(st.just("cut"), st.integers(0, 1), values, st.booleans()),
)
histories = st.lists(
    st.one_of(sends, sends, sends, comings, comings, goings, tellings, tellings, others), min_size=10, max_size=45
)


def step(kernel: Kernel, agents: list[Agent], move: tuple) -> None:  # type: ignore[type-arg]  # many shapes
    """Do one thing, to the kernel, and to the first agent where it is about that."""
    kernel.now += 0.001
    kind, *args = move
    if kind == "wait":
        kernel.now += args[0]
    elif kind == "settle":
        for agent in agents:
            agent.settle()
    elif kind == "cut":
        events = [*kernel.tell(*args), *kernel.go(0)]
        agents[0].die_early(events)
        for agent in agents:
            agent.hear([*events, *kernel.everything()])
    elif kind == "restart":
        agents[0].restart()
        agents[-1].hear(kernel.everything())
    else:
        events = getattr(kernel, kind)(*args)
        for agent in agents:
            agent.hear(events or [])


@settings(max_examples=70, deadline=None)
@given(histories)
def test_each_level_sums_to_the_namespace_but_for_what_has_no_name(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see step
    """At every moment, namespaces = workloads + what leases got whose owner nobody told; the same holds for labels."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel()
        agent = Agent(kernel, Path(folder), {"by_label": "experiment", "retention": "1d"})
        for move in [*history, ("settle",)]:
            step(kernel, [agent], move)
            everyone, unnamed = agent.totals(Level.NAMESPACE, 1), agent.leases(nameless)
            unnamed = Counter({key: count for key, count in unnamed.items() if key[0] != "(named)"})
            assert agent.totals(Level.WORKLOAD, 1) + unnamed == everyone
            assert agent.totals(Level.LABEL, 1) + unnamed == everyone


@settings(max_examples=70, deadline=None)
@given(histories)
def test_a_workload_has_what_its_leases_got(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see step
    """Each workload's total is the sum of all accounts and tallies that name it, whenever they came to do so."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel()
        agent = Agent(kernel, Path(folder), {"retention": "1d"})
        for move in [*history, ("settle",)]:
            step(kernel, [agent], move)
            named = Counter({key: count for key, count in agent.leases(by_workload).items() if key[2]})
            assert agent.totals(Level.WORKLOAD, 3) == named


@settings(max_examples=70, deadline=None)
@given(histories, st.integers(1, 2))
def test_no_total_goes_down_and_caps_lose_nothing(history: list[tuple], room: int) -> None:  # type: ignore[type-arg]  # see step
    """A late name lowers no total, of whatever level, and in a full level it goes to `__other__`."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as beside:
        kernel = Kernel()
        limits = {f"max_{level}_series": room for level in ("workload", "label", "namespace")}
        capped = Agent(kernel, Path(folder), {"by_label": "experiment", "retention": "1d", **limits})
        free = Agent(kernel, Path(beside), {"by_label": "experiment", "retention": "1d"})
        shown: dict[SeriesKey, Count] = {}
        for move in [*history, ("settle",)]:
            step(kernel, [capped, free], move)
            if move[0] == "restart":
                capped.settle()  # what nobody saw of a life that died may be told again
            totals = dict(capped.books.ledger.totals)
            assert all(totals.get(key, ZERO) >= count for key, count in shown.items())
            shown = totals
        for level in (Level.WORKLOAD, Level.LABEL):
            assert capped.totals(level, 0) == free.totals(level, 0)
            own = {key.labels for key in shown if key.level is level and key.labels[-1] != OTHER}
            assert len(own) <= room


@settings(max_examples=70, deadline=None)
@given(histories)
def test_a_crash_changes_no_name(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see step
    """An agent that dies at any step and starts again has the totals and accounts of one that never died."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as beside:
        kernel = Kernel()
        metrics: dict[str, object] = {"by_label": "experiment", "retention": "1d"}
        mortal, immortal = Agent(kernel, Path(folder), metrics), Agent(kernel, Path(beside), metrics)
        for move in [*history, ("settle",)]:
            step(kernel, [mortal, immortal], move)
        assert mortal.books.ledger.totals == immortal.books.ledger.totals
        assert {record.id: record.workload for record in mortal.accounts()} == {
            record.id: record.workload for record in immortal.accounts()
        }


@settings(max_examples=70, deadline=None)
@given(histories, values)
def test_who_is_told_in_time_is_told_for_good(history: list[tuple], value: str | None) -> None:  # type: ignore[type-arg]  # see step
    """Whoever's owner is told while the lease lasts, or just after, has all bytes in its workload and its account."""
    with tempfile.TemporaryDirectory() as folder:
        kernel = Kernel()
        agent = Agent(kernel, Path(folder), {"by_label": "experiment", "retention": "1d"})
        for move in [*history, ("go", 0)]:
            step(kernel, [agent], move)
            for back in range(move[0] == "come", kernel.pods if move[0] in ("come", "go", "cut") else 0):
                step(kernel, [agent], ("tell", back, value, True))
        kernel.now += 1.0
        agent.settle()
        assert all(record.workload for record in agent.accounts())
        assert agent.totals(Level.WORKLOAD, 1) == agent.totals(Level.NAMESPACE, 1) == agent.totals(Level.LABEL, 1)
