"""The law of accounts: what leases got sums to what namespaces and pods got, whatever comes, goes, fails and dies."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from netacct import config
from netacct.accounting.accounts import Account, State, decode
from netacct.accounting.accounts_read import read_directory
from netacct.accounting.store import Place, Store
from netacct.accounting.tallies import key_of
from netacct.books import Books
from netacct.identity.leases import Close, Update, needs_reading
from netacct.identity.source import Replace
from netacct.identity.source import Update as Said
from netacct.model import (
    UNBOUNDED,
    Address,
    CounterKey,
    Direction,
    Level,
    Observation,
    Pod,
    Reading,
    Scope,
    Snapshot,
)

IPS = [bytes([10, 0, 0, n]) for n in (1, 2)] + [bytes(15) + b"\x01"]
SETS = [
    CounterKey(4, Scope.POD, Direction.RECEIVE, "internet"),
    CounterKey(4, Scope.POD, Direction.TRANSMIT, "pod"),
    CounterKey(6, Scope.POD, Direction.RECEIVE, "internet"),
]
NAMESPACES = ("team-a", "team-b")
Sums = Counter[tuple[str, ...]]
"""Bytes and packets by namespace, pod (or ""), direction, class, unit."""


@dataclass
class Node:
    """Counters that nobody but the kernel has, sources that say who is where, and books that may die."""

    folder: Path
    now: float = 1000.0
    epochs: dict[CounterKey, int] = field(default_factory=lambda: dict.fromkeys(SETS, 1))
    counts: dict[CounterKey, dict[Address, tuple[int, int]]] = field(default_factory=lambda: {key: {} for key in SETS})
    held: dict[tuple[Address, int], Observation] = field(default_factory=dict)
    teams: dict[int, str] = field(default_factory=dict)
    closed: int = 0

    def __post_init__(self) -> None:
        path = self.folder / "netacct.yaml"
        metrics = {"retention": "1d"}
        identity = {"late_binding": "20s"}
        path.write_text(json.dumps({"accounts_dir": str(self.accounts), "metrics": metrics, "identity": identity}))
        self.config = config.load(str(path))
        self.start()
        self.books.ledger.baseline(self.read(), self.now)
        self.books.save(self.now)

    @property
    def accounts(self) -> Path:
        """Where accounts go."""
        return self.folder / "accounts"

    def start(self) -> None:
        """Begin a life from what is on the disk."""
        self.books = Books(Store(self.folder / "state", Place("boot", "net")), self.config, ["file"])

    def read(self, hidden: int | None = None) -> Snapshot:
        """What the kernel counted, but for one set that cannot be read."""
        shown = [key for number, key in enumerate(SETS) if number != hidden]
        return Snapshot(self.now, tuple(Reading(key, self.epochs[key], dict(self.counts[key])) for key in shown))

    def settle(self, hidden: int | None = None) -> None:
        """Read and book, and make the lease changes that sources have told until now."""
        self.books.take(self.read(hidden))
        self.commit()

    def change(self, hidden: int | None = None) -> None:
        """What an agent does when sources have spoken."""
        changes = self.books.pending()
        if not changes:
            return
        if needs_reading(changes):
            self.settle(hidden)
        self.commit()

    def commit(self) -> None:
        """Make the lease changes, count the accounts that end so, and store."""
        changes = self.books.commit(self.now)
        for change in changes:
            self.closed += isinstance(change, Close)
            self.closed += isinstance(change, Update) and change.lease.pod.namespace != change.old.pod.namespace
        if changes:
            self.books.save(self.now)

    def pod(self, number: int) -> Pod:
        """A pod, in the namespace of today."""
        uid = f"uid{number}" if number else ""  # a tenant of a file may have none
        return Pod(self.teams.get(number, NAMESPACES[number % 2]), f"p{number}", uid, "Job", "train")

    def say(self, ip: Address, number: int, age: float | None, *, present: bool, sandbox: str) -> None:
        """A source speaks of an address."""
        created = UNBOUNDED if age is None else self.now - age
        seen = Observation("file", ip, self.pod(number), sandbox, created, self.now, present)
        if present:
            self.held[ip, number] = seen
        else:
            self.held.pop((ip, number), None)
        self.books.note(Said("file", (seen,)))

    def rename(self, number: int, team: str, hidden: int | None) -> None:
        """A tenant moves to another namespace, and keeps its uid and addresses."""
        self.teams[number] = team
        for (ip, holder), seen in list(self.held.items()):
            if holder == number:
                again = Observation("file", ip, self.pod(number), seen.sandbox, seen.created, self.now)
                self.held[ip, number] = again
                self.books.note(Said("file", (again,)))
        self.change(hidden)

    def restart(self) -> None:
        """The process dies without a word; the next one is told everything anew."""
        self.start()
        self.books.note(Replace("file", tuple(self.held.values()), self.now))

    def send(self, which: int, address: int, amount: tuple[int, int]) -> None:
        """The kernel counts something."""
        ip = IPS[address]
        held = self.counts[SETS[2] if len(ip) == 16 else SETS[which]]
        was = held.get(ip, (0, 0))
        held[ip] = (was[0] + amount[0], was[1] + amount[1])

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds

    def come(self, address: int, number: int, age: float | None, sandbox: str, now: bool, hidden: int | None) -> None:
        """A pod gets an address, and the agent hears of it now or later."""
        self.say(IPS[address], number, age, present=True, sandbox=sandbox)
        if now:
            self.change(hidden)

    def go(self, address: int, number: int, age: None, sandbox: str, now: bool, hidden: int | None) -> None:
        """A pod gives an address back, and the agent hears of it now or later."""
        self.say(IPS[address], number, age, present=False, sandbox=sandbox)
        if now:
            self.change(hidden)

    def flush(self, which: int) -> None:
        """A set is made anew, after its last value was booked and stored."""
        self.settle()
        self.books.save(self.now)
        self.epochs[SETS[which]] += 1
        self.counts[SETS[which]] = {}

    def save(self) -> None:
        """A checkpoint."""
        self.books.save(self.now)

    def trouble(self, on: bool) -> None:
        """Make the accounts unwritable, or writable again."""
        aside = self.folder / "aside"
        if on and not self.accounts.is_file():
            if self.accounts.exists():
                self.accounts.rename(aside)
            self.accounts.write_text("in the way")
        elif not on and self.accounts.is_file():
            self.accounts.unlink()
            if aside.exists():
                aside.rename(self.accounts)

    def written(self) -> list[Account]:
        """The records in the files."""
        for directory in (self.accounts, self.folder / "aside"):
            if directory.is_dir():
                return list(read_directory(directory, _fail))
        return []

    def records(self) -> dict[str, Account]:
        """All records, written or not."""
        waiting = [decode(line) for line in self.books._closing.state().lines]
        return {record.id: record for record in [*self.written(), *waiting]}

    def accounted(self) -> Sums:
        """What accounts and tallies say."""
        found: Sums = Counter()
        for record in self.records().values():
            assert record.state is State.CLOSED
            for (direction, traffic), count in record.counts.items():
                _add(found, (record.namespace, record.pod), direction, traffic, count)
        leases = [*self.books.leases.open_leases(), *self.books._closing.state().leases]
        owners = {key_of(lease): lease.pod for lease in leases}
        for key, (_, counts) in self.books.ledger.tallies.state().items():
            for (direction, traffic), count in counts.items():
                _add(found, (owners[key].namespace, owners[key].name), direction, traffic, count)
        return found

    def booked(self) -> Sums:
        """What the totals say."""
        found: Sums = Counter()
        for key, count in self.books.ledger.totals.items():
            if key.level in (Level.POD, Level.NAMESPACE):
                for unit, number in zip(("bytes", "packets"), count, strict=True):
                    found[*key.labels, *[""] * (2 - len(key.labels)), key.direction, key.traffic, unit] += number
        return found


def _fail(text: str) -> None:
    raise AssertionError(text)


def _add(found: Sums, name: tuple[str, str], direction: str, traffic: str, count: tuple[int, int]) -> None:
    for unit, number in zip(("bytes", "packets"), count, strict=True):
        for pod in ("", name[1]):
            found[name[0], pod, direction, traffic, unit] += number


# Mostly one address, one set and two pods, and each change at once, so that histories are about something.
ips = st.sampled_from([0, 0, 0, 0, 1, 2])
pods = st.sampled_from([0, 1, 1, 1, 2])
hidden = st.sampled_from([None, None, 0])
ages = st.sampled_from([None, 0.0, 2.0, 12.0])
sandboxes = st.sampled_from(["", "a", "a", "b"])
at_once = st.sampled_from([True, True, False])
amounts = st.tuples(st.integers(0, 3000), st.integers(1, 3))
sends = st.tuples(st.just("send"), st.sampled_from([0, 0, 1]), ips, amounts)
comings = st.tuples(st.just("come"), ips, pods, ages, sandboxes, at_once, hidden)
goings = st.tuples(st.just("go"), ips, pods, st.none(), sandboxes, at_once, hidden)
renames = st.tuples(st.just("rename"), pods, st.sampled_from(NAMESPACES), hidden)
waits = st.tuples(st.just("wait"), st.sampled_from([0.5, 1.0, 5.0, 25.0]))
settles = st.tuples(st.just("settle"), hidden)
upsets = st.one_of(
    st.tuples(st.just("flush"), st.integers(0, 2)),
    st.tuples(st.just("save")),
    st.tuples(st.just("trouble"), st.booleans()),
)
restarts = st.tuples(st.just("restart"))
moves = st.one_of(sends, sends, sends, comings, comings, goings, renames, waits, settles, upsets, restarts)


def move(node: Node, step: tuple) -> None:  # type: ignore[type-arg]  # what hypothesis draws is of many shapes
    """Do one thing: the step's first item names a method of the node."""
    node.now += 0.001
    getattr(node, step[0])(*step[1:])


@settings(max_examples=150, deadline=None)
@given(st.lists(moves, min_size=15, max_size=60))
def test_accounts_and_open_leases_sum_to_the_totals(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see move
    """At every moment, what closed and open leases got sums to each namespace's and pod's totals, by class and way."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder))
        for step in history:
            move(node, step)
            assert +node.accounted() == +node.booked()


@settings(max_examples=150, deadline=None)
@given(st.lists(moves, min_size=15, max_size=60))
def test_each_lease_has_one_record(history: list[tuple]) -> None:  # type: ignore[type-arg]  # see move
    """When all is settled and written, each lease that closed has one line in the file, and no tally is left over."""
    with tempfile.TemporaryDirectory() as folder:
        node = Node(Path(folder))
        for step in history:
            move(node, step)
        node.trouble(False)
        node.now += 1.0
        for (ip, number), seen in list(node.held.items()):
            node.say(ip, number, None, present=False, sandbox=seen.sandbox)
        node.change()
        for lease in node.books.leases.open_leases():  # words that nobody took back
            node.books.note(Replace("file", (), node.now))
            assert lease
        node.change()
        node.settle()
        node.books.save(node.now)
        lines = (node.accounts / "accounts.jsonl").read_text().splitlines() if node.closed else []
        assert len({decode(line).id for line in lines}) == len(lines) == node.closed
        assert len(node.books.ledger.tallies) == 0
        assert not node.books._closing.state().leases
