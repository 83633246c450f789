"""An address that changes hands: whose bytes they are, on a datapath in memory, by a clock that the test sets."""

from __future__ import annotations

import queue
import time
from pathlib import Path

import pytest
from agentnode import A, B, Node

from netacct import clock
from netacct.agent import Agent
from netacct.identity.source import Replace, SourceEvent, Update
from netacct.model import UNBOUNDED, Address, Level, Observation, Pod, pack
from netacct.service import Scrape, Service

A6 = pack("fd00:10:244:1::10")
SECOND = 1.0


class Clock:
    """CLOCK_BOOTTIME, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = clock.now()
        monkeypatch.setattr(time, "clock_gettime", lambda _: self.now)

    def go(self, seconds: float) -> float:
        """Let time pass; returns the time then."""
        self.now += seconds
        return self.now


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the test."""
    return Clock(monkeypatch)


@pytest.fixture
def node(tmp_path: Path, moving: Clock) -> Node:
    """A node without an agent, with a prefilled range."""
    assert moving.now
    return Node(tmp_path)


def cni(name: str, ip: Address = A, *, uid: str = "", box: str = "", present: bool = True) -> Update:
    """What CNI says now of a sandbox that was made now, or is gone now."""
    pod = Pod("n", name, uid or f"uid-{name}")
    at = clock.now()
    return Update("cni", (Observation("cni", ip, pod, box or f"sandbox-{pod.uid}", at, at, present),))


def listed(*names: str, ip: Address = A, started: float = UNBOUNDED, source: str = "kubelet") -> Replace:
    """What a source says that asks now and then and knows no sandboxes: these pods started at some time."""
    at = clock.now()
    seen = [Observation(source, ip, Pod("n", name, f"uid-{name}"), "", started, at) for name in names]
    return Replace(source, tuple(seen), at)


def ambiguous(node: Node) -> int:
    """How many bytes are guessed."""
    return node.books.ledger.ambiguous_bytes


def held(node: Node, moving: Clock, name: str = "old", ip: Address = A) -> Agent:
    """A running agent that knows of a pod, which sent 100 bytes that are booked."""
    agent = node.begin({B: "file"})
    moving.go(SECOND)
    agent.observe([cni(name, ip)])
    moving.go(SECOND)
    node.count(ip, 100)
    agent.pods()
    return agent


def test_an_heir_gets_what_was_counted_after_the_old_pod_had_left(node: Node, moving: Clock) -> None:
    """News that come late are taken by when they happened: an interval that began after a pod left is not its own."""
    agent = held(node, moving)
    moving.go(SECOND)
    left = cni("old", present=False)
    moving.go(SECOND)
    agent.pods()  # reads, and knows nothing yet
    came = cni("heir")
    moving.go(SECOND)
    node.count(A, 30)
    agent.observe([left, came])
    assert node.sent() == {"old": 100, "heir": 30}
    assert ambiguous(node) == 0


@pytest.mark.parametrize(("old", "heir", "gets"), [(9.0, 2.0, "old"), (1.0, 5.0, "heir"), (3.0, 3.0, "heir")])
def test_between_two_readings_who_had_the_address_longer_gets_the_bytes(
    node: Node, moving: Clock, old: float, heir: float, gets: str
) -> None:
    """Where nobody read in between, the longer tenure of the interval gets its bytes, and they count as ambiguous."""
    agent = held(node, moving)
    moving.go(old)
    left = cni("old", present=False)
    moving.go(0.5)
    came = cni("heir")
    node.count(A, 30)
    moving.go(heir)
    agent.observe([left, came])
    assert node.sent() == ({"old": 130} if gets == "old" else {"old": 100, "heir": 30})
    assert ambiguous(node) == 30


def test_an_heir_of_a_second_is_not_billed_for_an_hour_without_an_agent(node: Node, moving: Clock) -> None:
    """What was counted while no agent ran goes to who had the address for most of that, and counts as ambiguous."""
    held(node, moving).stop()
    node.count(A, 5000)
    moving.go(3600)
    came = cni("heir")
    moving.go(SECOND)
    agent = node.begin({B: "file"}, Replace("cni", came.observations, clock.now()))
    assert node.sent() == {"old": 5100}
    assert ambiguous(node) == 5000
    node.count(A, 7)
    agent.pods()
    assert node.sent() == {"old": 5100, "heir": 7}


def test_an_heir_of_an_hour_is_not_left_out_after_one_without_an_agent(node: Node, moving: Clock) -> None:
    """An agent that starts again does not give all to the pod that it knew: the heir had most of the time."""
    held(node, moving).stop()
    moving.go(SECOND)
    came = cni("heir")
    node.count(A, 5000)
    moving.go(3600)
    agent = node.begin({B: "file"}, Replace("cni", came.observations, clock.now()))
    assert node.sent() == {"old": 100, "heir": 5000}
    agent.observe([cni("heir", present=False)])
    assert [line for line in node.accounts() if line[0] == "heir"] == [("heir", 5000)]


def test_an_heir_that_was_made_before_the_release_was_read_gets_its_first_bytes(node: Node, moving: Clock) -> None:
    """A worker that reads late, between the news of the old pod and those of its heir, leaves nothing unattributed."""
    agent = held(node, moving)
    left = cni("old", present=False)
    moving.go(SECOND / 4)
    came = cni("heir")
    moving.go(SECOND / 4)
    agent.observe([left])
    node.count(A, 30)
    moving.go(SECOND)
    agent.pods()
    agent.observe([came])
    assert node.sent() == {"old": 100, "heir": 30}
    assert ambiguous(node) == 0


def test_pods_that_came_and_went_in_milliseconds_have_their_bytes(node: Node, moving: Clock) -> None:
    """Three tenures between two readings: each has a lease and an account; the bytes go to the longest, ambiguous."""
    agent = held(node, moving)
    news: list[SourceEvent] = [cni("old", present=False)]
    for name, seconds in (("a", 0.002), ("b", 0.004), ("c", 0.001)):
        moving.go(0.001)
        news.append(cni(name))
        moving.go(seconds)
        news.append(cni(name, present=False))
    node.count(A, 30)
    agent.observe(news)
    assert node.sent() == {"old": 100, "b": 30}
    assert ambiguous(node) == 30
    assert node.accounts() == [("old", 100), ("a", 0), ("b", 30), ("c", 0)]


def test_bytes_before_the_name_go_to_the_pod_that_comes_with_it(node: Node, moving: Clock) -> None:
    """What an address of a local range sent before anybody spoke of its pod is the pod's, once somebody does."""
    agent = node.begin({B: "file"})
    moving.go(SECOND)
    came = cni("early")
    node.count(A, 30)
    moving.go(SECOND)
    agent.pods()
    assert node.sent() == {}
    agent.observe([came])
    assert node.sent() == {"early": 30}


def test_a_polled_source_gives_an_address_that_was_reused_between_two_polls(node: Node, moving: Clock) -> None:
    """A pod that waited for its sandbox while the old one ran gets what was counted since the old one was missed."""
    agent = node.begin({B: "file"}, listed("old", started=clock.now()))
    started = moving.go(SECOND)
    node.count(A, 100)
    moving.go(SECOND)
    agent.observe([listed()])
    moving.go(SECOND)
    node.count(A, 30)
    moving.go(SECOND)
    agent.pods()
    agent.observe([listed("heir", started=started)])
    assert node.sent() == {"old": 100, "heir": 30}
    assert ambiguous(node) == 0


def test_a_pod_made_again_under_its_name_goes_on_with_its_series(node: Node, moving: Clock) -> None:
    """A StatefulSet's pod of a new uid and address has the sum of both tenures, and there is one pod of the name."""
    agent = held(node, moving, "web-0")
    agent.observe([cni("web-0", present=False)])
    moving.go(SECOND)
    agent.observe([cni("web-0", pack("10.244.1.12"), uid="other")])
    node.count(pack("10.244.1.12"), 30)
    moving.go(SECOND)
    agent.pods()
    assert node.sent() == {"web-0": 130}
    alive = [pod for level, name, pod in node.books.ledger.alive(clock.now()) if level is Level.POD and "web-0" in name]
    assert [pod.uid for pod in alive if pod] == ["other"]
    assert node.accounts() == [("web-0", 100)]


def test_a_new_sandbox_of_a_pod_brings_another_address(node: Node, moving: Clock) -> None:
    """A pod whose sandbox was made anew has the bytes of both addresses, each as long as it held it."""
    agent = held(node, moving)
    moving.go(SECOND)
    again = pack("10.244.1.12")
    agent.observe([cni("old", present=False), cni("old", again, box="second")])
    node.count(again, 30)
    moving.go(SECOND)
    agent.observe([cni("heir")])
    node.count(A, 7)
    moving.go(SECOND)
    agent.pods()
    assert node.sent() == {"old": 130, "heir": 7}
    assert ambiguous(node) == 0


def test_both_families_of_a_pod_change_hands_at_once(node: Node, moving: Clock) -> None:
    """A dual-stack pod's heir takes both addresses; what came between is guessed for both alike."""
    node.configure(local_ranges=["10.244.1.0/28", "fd00:10:244:1::/124"])
    agent = node.begin({B: "file"})
    agent.observe([cni("old"), cni("old", A6)])
    for ip in (A, A6):
        node.count(ip, 100)
    moving.go(SECOND)
    agent.observe([cni("old", present=False), cni("old", A6, present=False)])
    moving.go(SECOND)
    agent.observe([cni("heir"), cni("heir", A6)])
    for ip in (A, A6):
        node.count(ip, 30)
    moving.go(SECOND)
    agent.pods()
    assert node.sent() == {"old": 200, "heir": 60}
    assert ambiguous(node) == 0


def test_the_worker_takes_all_news_before_it_answers(node: Node, moving: Clock) -> None:
    """What sources said while the worker was held up is one observation, and comes before an earlier scrape."""
    worker = Service(lambda: node.config)
    worker._agent = held(node, moving)
    moving.go(SECOND)
    left = cni("old", present=False)
    scrape = Scrape(clock.now() + 60)
    moving.go(SECOND)
    came = cni("heir")
    moving.go(5 * SECOND)
    node.count(A, 30)
    for message in (scrape, left, came):
        worker._queue.put(message)
    node.calls.clear()
    worker._work(0.0)
    assert node.calls.count("read") == 1
    assert scrape.reply.get_nowait()
    assert node.sent() == {"old": 100, "heir": 30}
    with pytest.raises(queue.Empty):
        worker._queue.get_nowait()


def test_after_a_standstill_the_worker_hears_its_sources_first(
    node: Node, moving: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that wakes up late, because all of the process or machine stood still, lets sources wake up, too."""
    worker = Service(lambda: node.config)
    worker._agent = held(node, moving)
    left = cni("old", present=False)
    came = cni("heir")
    node.count(A, 30)
    receive = worker._receive

    def late(wait: float) -> list[SourceEvent]:
        moving.go(10 * SECOND)
        return receive(wait)

    def others_wake_up(_seconds: float) -> None:
        for event in (left, came):
            worker._queue.put(event)

    monkeypatch.setattr(worker, "_receive", late)
    monkeypatch.setattr(time, "sleep", others_wake_up)
    worker._queue.put(Scrape(clock.now() + 60))
    worker._work(0.0)
    assert node.sent() == {"old": 100, "heir": 30}
