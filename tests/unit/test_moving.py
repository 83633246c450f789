"""Whose counters another datapath's are, when an agent starts: on two datapaths in memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import structlog

from netacct import clock, config, policy_file
from netacct.accounting.store import Store
from netacct.agent import Agent
from netacct.books import Books
from netacct.errors import DatapathError
from netacct.identity.source import Replace
from netacct.kernel import plan as planning
from netacct.kernel.base import Keep, keep_nothing
from netacct.kernel.fake import FakeDatapath, FakeKernel
from netacct.kernel.plan import Plan
from netacct.model import UNBOUNDED, CounterKey, Direction, Level, Observation, Pod, Scope, Snapshot, pack

A = pack("10.244.1.10")
INTERNET = CounterKey(4, Scope.POD, Direction.TRANSMIT, "internet")
POLICY = "classes: {pod: {}, node: {}, service: {}, private: {builtin: private}}\ndefault: internet\n"


class Backend(FakeDatapath):
    """A datapath of a given name, which may refuse to be taken away."""

    broken = False
    closed = False

    def close(self) -> None:
        """See `OpenDatapath.close`."""
        self.closed = True

    def remove(self, keep: Keep = keep_nothing) -> Snapshot:
        """See `Datapath.remove`."""
        if self.broken:
            raise DatapathError("somebody holds the lock")
        return super().remove(keep)


class Node:
    """Two kernels' worth of tables, and the files of one agent."""

    def __init__(self, folder: Path) -> None:
        (folder / "policy.yaml").write_text(POLICY, encoding="utf-8")
        text = (
            f"policy: {folder}/policy.yaml\nlocal_ranges: [10.244.1.0/28]\nmarks: {{mode: 'off'}}\n"
            f"state_dir: {folder}/state\naccounts_dir: {folder}/accounts\n"
        )
        (folder / "netacct.yaml").write_text(text, encoding="utf-8")
        self.config = config.load(str(folder / "netacct.yaml"))
        self.kernels = {"one": FakeKernel(), "two": FakeKernel()}
        self.kernels["two"]._epochs = itertools.count(1000)  # epochs are random: never the same in two kernels

    def backend(self, name: str) -> Backend:
        """A datapath on the tables of that name."""
        made = Backend(self.kernels[name])
        made.name = name
        return made

    def begin(self, name: str) -> Agent:
        """An agent that counts with this datapath; the other is found where it has anything."""
        self.other = self.backend("two" if name == "one" else "one")
        books = Books(Store(Path(self.config.state_dir)), self.config, ["file"])
        policy = policy_file.load(self.config.policy)
        found = self.other if self.other.kernel.sets else None
        agent = Agent(self.config, policy, self.backend(name), books, lambda: found)
        at = clock.now()
        agent.start(
            frozenset(), [Replace("file", (Observation("file", A, Pod("n", "a", "a"), "", UNBOUNDED, at),), at)]
        )
        self.books = books
        return agent

    def count(self, name: str, octets: int) -> None:
        """A datapath counts what the pod sent to the internet."""
        self.kernels[name].count(INTERNET, A, octets)

    def booked(self, agent: Agent) -> int:
        """What the pod sent, by the books of an agent that ends."""
        agent.stop()
        totals = self.books.ledger.totals.items()
        return sum(count.bytes for key, count in totals if key.level in (Level.POD, Level.UNATTRIBUTED))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node on which nothing has run."""
    return Node(tmp_path)


def test_what_counted_until_now_is_booked_and_destroyed(node: Node) -> None:
    """Totals go on over any number of moves; what is left is closed and has nothing any more; the gap is logged."""
    total = 0
    for number, name in enumerate(("one", "two", "one", "one", "two"), 1):
        agent = node.begin(name)
        node.count(name, number)
        total += number
        assert node.booked(agent) == total
        node.count(name, 100)  # while no agent runs
        total += 100
    with structlog.testing.capture_logs() as logs:
        assert node.booked(node.begin("one")) == total
    assert node.other.closed
    assert node.kernels["two"].sets == {}
    (line,) = [line for line in logs if line["event"] == "moved to another datapath"]
    assert (line["was"], line["now"], line["gap_seconds"] >= 0) == ("two", "one", True)


def test_what_counted_beside_is_not_booked(node: Node) -> None:
    """Counters that the books do not know, beside those that they do, are destroyed unbooked: on either side."""
    node.booked(node.begin("one"))
    for chosen in ("one", "two"):
        stranger = node.backend("two")
        stranger.install(_plan_of(node))
        node.count("one", 10)
        node.count("two", 10)
        expected = 10 if chosen == "one" else 20
        assert node.booked(node.begin(chosen)) == expected
        assert node.kernels["two" if chosen == "one" else "one"].sets == {}


def test_new_books_take_nothing_over(node: Node) -> None:
    """Without a store what the other datapath counted is nobody's."""
    node.booked(node.begin("one"))
    node.count("one", 10)
    for file in Path(node.config.state_dir).iterdir():
        file.unlink()
    agent = node.begin("two")
    node.count("two", 3)
    assert node.booked(agent) == 3


def test_books_that_are_ahead_of_what_is_left_are_put_aside(node: Node) -> None:
    """A store that knows more than the other datapath has counted is not of this kernel: totals begin anew."""
    agent = node.begin("one")
    node.count("one", 1000)
    node.booked(agent)
    node.kernels["one"].sets[INTERNET].counts[A] = node.kernels["one"].sets[INTERNET].counts[A]._replace(bytes=5)
    agent = node.begin("two")
    node.count("two", 3)
    assert node.booked(agent) == 3


def test_a_start_that_cannot_take_the_other_away_fails(node: Node) -> None:
    """Where the other datapath stays, nothing is installed beside it that would count twice."""
    node.booked(node.begin("one"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "broken", True)
        with pytest.raises(DatapathError, match="lock"):
            node.begin("two")
    assert node.kernels["two"].sets == {}
    node.count("one", 5)
    assert node.booked(node.begin("two")) == 5


def test_a_running_agent_moves_and_stays_where_it_cannot(node: Node) -> None:
    """`move` books, changes over and goes on; where the present datapath stays, so does the agent with it."""
    agent = node.begin("one")
    node.count("one", 5)
    agent.move(node.backend("two"))
    assert node.kernels["one"].sets == {}
    node.count("two", 6)
    assert agent.view().datapath == "two"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Backend, "broken", True)
        with pytest.raises(DatapathError, match="lock"):
            agent.move(node.backend("one"))
    node.count("two", 7)
    assert agent.view().datapath == "two"
    assert node.booked(agent) == 18


def _plan_of(node: Node) -> Plan:
    return planning.build(policy_file.load(node.config.policy), node.config.local_ranges, (), None)
