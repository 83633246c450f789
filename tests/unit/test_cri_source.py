"""The source `cri` asks a real gRPC server that says what a container runtime says."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpclab import Runtime, Server, healthy_when

from netacct import clock
from netacct.identity import cri
from netacct.identity.cri import CriSource
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.model import UNBOUNDED, WHOLE, Observation, unpack

SECONDS = 60.0
"""What a test waits for comes in milliseconds on a machine that has nothing else to do."""


class Asker:
    """A running source and what it said."""

    def __init__(self, *sockets: Path, **more: Any) -> None:
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.source = CriSource([str(path) for path in sockets], interval=0.03, **more)
        self.source.start(self.events.put)

    def observations(self) -> tuple[Observation, ...]:
        """Those of the next event."""
        said = self.events.get(timeout=SECONDS)
        assert isinstance(said, Replace)
        return said.observations

    def next(self) -> list[tuple[str, str, str]]:
        """Pod, address and sandbox of each."""
        return [
            (seen.pod.name, "whole" if seen.ip == WHOLE else unpack(seen.ip), seen.sandbox)
            for seen in self.observations()
        ]

    def until(self, holds: Callable[[Health], bool]) -> Health:
        """The health, as soon as this holds of it."""
        return healthy_when(self.source, holds)


Ask = Callable[..., Asker]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ask]:
    """Makes askers who are in no hurry, and stops them."""
    monkeypatch.setattr(cri, "SECONDS", SECONDS)
    made: list[Asker] = []

    def start(*sockets: Path, **more: Any) -> Asker:
        made.append(Asker(*sockets, **more))
        return made[-1]

    yield start
    for asker in made:
        asker.source.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the runtime has its socket."""
    return tmp_path / "containerd.sock"


@pytest.fixture
def runtime(path: Path) -> Iterator[Runtime]:
    """A runtime without pods."""
    made = Runtime(path)
    yield made
    made.server.stop()


def wait_for_lists(runtime: Runtime, more: int = 3) -> None:
    """Wait until so many more questions were asked."""
    until = runtime.lists + more
    while runtime.lists < until:
        time.sleep(0.005)


def test_the_sandboxes_of_a_node(path: Path, runtime: Runtime, ask: Ask) -> None:
    """Each ready sandbox is told with its addresses, age and wanted labels; hostNetwork pods have the node's."""
    begin, made = clock.now(), time.time() - 1000
    end = clock.now()
    labels = {"team": "x", "io.kubernetes.pod.name": "train-0"}
    runtime.add("s0", "train-0", "10.0.0.1", "fd00::1", created=int(made * 1e9), labels=labels)
    runtime.add("s1", "gone", "10.0.0.2", state=1)
    runtime.add("s2", "etcd-n1", uid="ab" * 16, host=True)
    runtime.add("s3", "cri-o-says-so", "192.168.50.11", host=True)
    first, second, etcd, other = ask(path, labels=["team"]).observations()
    assert [unpack(first.ip), unpack(second.ip), etcd.ip, other.ip] == ["10.0.0.1", "fd00::1", WHOLE, WHOLE]
    assert (first.source, first.sandbox, first.present) == ("cri", "s0", True)
    assert (first.pod.namespace, first.pod.name, first.pod.uid) == ("team-a", "train-0", "uid-train-0")
    assert (first.pod.labels, first.pod.workload) == ((("team", "x"),), "")
    assert etcd.pod.uid == "ab" * 16
    assert begin - 2 < first.created + 1000 < end + 2
    assert etcd.created == UNBOUNDED


def test_each_sandbox_is_looked_at_once(path: Path, runtime: Runtime, ask: Ask) -> None:
    """Only what is new is asked for, and what is gone is forgotten."""
    runtime.add("s0", "a", "10.0.0.1")
    asker = ask(path)
    asker.next()
    wait_for_lists(runtime)
    runtime.add("s1", "b", "10.0.0.2")
    assert asker.next() == [("a", "10.0.0.1", "s0"), ("b", "10.0.0.2", "s1")]
    wait_for_lists(runtime)
    assert runtime.asked == ["s0", "s1"]
    del runtime.sandboxes["s0"]
    assert asker.next() == [("b", "10.0.0.2", "s1")]
    assert list(asker.source._known) == ["s1"]


def test_a_sandbox_that_is_made_again(path: Path, runtime: Runtime, ask: Ask) -> None:
    """The same pod in a new sandbox has a new address, and the sandbox that is not ready any more says nothing."""
    runtime.add("s0", "a", "10.0.0.1")
    asker = ask(path)
    asker.next()
    runtime.add("s0", "a", "10.0.0.1", state=1)
    runtime.add("s1", "a", "10.0.0.9")
    while (said := asker.next()) == []:
        pass  # between the two
    assert said == [("a", "10.0.0.9", "s1")]


def test_a_sandbox_without_an_address(path: Path, runtime: Runtime, ask: Ask) -> None:
    """A sandbox that has none yet is asked again, until it has."""
    runtime.add("s0", "a")
    runtime.add("s1", "closing", "10.0.0.7", status=1)
    asker = ask(path)
    assert asker.next() == []
    wait_for_lists(runtime)
    runtime.add("s0", "a", "10.0.0.1")
    assert asker.next() == [("a", "10.0.0.1", "s0")]


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNKNOWN])
def test_a_sandbox_that_is_broken(path: Path, runtime: Runtime, ask: Ask, code: grpc.StatusCode) -> None:
    """One sandbox that is gone between two questions, or broken, does not hide the others."""
    runtime.add("s0", "a", "10.0.0.1")
    runtime.add("s1", "b", "10.0.0.2")
    runtime.broken["s0"] = code
    asker = ask(path)
    assert asker.next() == [("b", "10.0.0.2", "s1")]
    assert asker.source.healthy().up


def test_a_sandbox_that_is_no_pod_s(path: Path, runtime: Runtime, ask: Ask) -> None:
    """A sandbox that names no pod is nobody's, and nothing is asked about it."""
    runtime.add("s0", "a", "10.0.0.1", uid="")
    assert ask(path).next() == []
    assert runtime.asked == []


def test_a_runtime_that_restarts(path: Path, ask: Ask) -> None:
    """While the runtime is down what it said holds, also where its socket is gone, and its first answer is told."""
    first = Runtime(path)
    first.add("s0", "a", "10.0.0.1")
    asker = ask(path)
    asker.next()
    first.server.stop()
    health = asker.until(lambda health: "nobody answers" in health.reason)
    assert (health.up, health.present) == (False, True)
    assert health.age is not None
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    asker.until(lambda health: "refused" in health.reason.lower())
    path.unlink()
    assert asker.events.empty()
    second = Runtime(path)
    second.add("s1", "b", "10.0.0.2")
    while (said := asker.next()) == []:
        pass  # asked before the sandbox was added
    assert said == [("b", "10.0.0.2", "s1")]
    assert asker.source.healthy().up
    asker.source.stop()
    second.server.stop()


def test_a_runtime_that_refuses(path: Path, runtime: Runtime, ask: Ask) -> None:
    """An error of the runtime is a reason in words, and takes nothing back."""
    runtime.add("s0", "a", "10.0.0.1")
    asker = ask(path)
    asker.next()
    runtime.refuse = grpc.StatusCode.RESOURCE_EXHAUSTED
    assert asker.until(lambda health: not health.up).reason.endswith("refuses for now (no)")
    runtime.refuse = None
    asker.until(lambda health: health.up)
    assert asker.events.empty()


def test_garbage(path: Path, ask: Ask) -> None:
    """A runtime whose answers are not understood is not up, and nothing is told."""
    methods = {"ListPodSandbox": lambda _request, _context: b"\x0a\xff\xff"}
    with Server(path, "runtime.v1.RuntimeService", methods, {}):
        asker = ask(path)
        reason = asker.until(lambda health: "no " in health.reason).reason
        assert reason == f"{path}: what it answers is no ListPodSandboxResponse"
        assert asker.events.empty()
        asker.source.stop()


def test_a_node_without_a_runtime(path: Path, ask: Ask) -> None:
    """No socket is no trouble, and nothing is said."""
    asker = ask(path)
    health = asker.until(lambda health: "no container runtime" in health.reason)
    assert (health.up, health.present, health.age) == (False, False, None)
    assert asker.events.empty()


def test_a_containerd_without_cri(path: Path, ask: Ask) -> None:
    """A containerd that serves no CRI, as Docker's, counts as no runtime."""
    with Server(path, "containerd.services.version.v1.Version", {}, {}):
        asker = ask(path)
        assert not asker.until(lambda health: "does not serve this" in health.reason).present
        asker.source.stop()


def test_two_runtimes(tmp_path: Path, path: Path, runtime: Runtime, ask: Ask) -> None:
    """Where several answer, all are told, each socket once; where one has none behind it, the others are."""
    runtime.add("s0", "a", "10.0.0.1")
    (tmp_path / "crio.sock").symlink_to(path)
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "left.sock"))
    other = Runtime(tmp_path / "k3s.sock")
    other.add("s1", "b", "10.0.0.2")
    asker = ask(*(tmp_path / name for name in ("left.sock", "crio.sock", "containerd.sock", "k3s.sock")))
    assert asker.next() == [("a", "10.0.0.1", "s0"), ("b", "10.0.0.2", "s1")]
    other.server.stop()
    asker.until(lambda health: not health.up)
    assert asker.events.empty()
    asker.source.stop()


def test_where_a_better_source_is_up(path: Path, runtime: Runtime, ask: Ask) -> None:
    """The runtime is asked only while it is needed; when that ends, what was told is taken back."""
    runtime.add("s0", "a", "10.0.0.1")
    needed = [False]
    asker = ask(path, needed=lambda: needed[0])
    asker.until(lambda health: "better source" in health.reason)
    assert runtime.lists == 0
    needed[0] = True
    assert asker.next() == [("a", "10.0.0.1", "s0")]
    needed[0] = False
    assert asker.next() == []


def test_a_stop_does_not_wait(path: Path, ask: Ask) -> None:
    """A runtime that takes the call and says nothing does not hold up whoever stops the source."""
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(path))
        hanging.listen()
        hanging.settimeout(SECONDS)
        asker = ask(path)
        taken, _ = hanging.accept()
        with taken:
            assert taken.recv(1)
            asker.source.stop()
        assert asker.source.healthy().reason.endswith("CANCELLED (Channel closed!)")


def test_a_thousand_sandboxes(path: Path, runtime: Runtime, ask: Ask) -> None:
    """More sandboxes than nodes usually have are told, and not asked for twice."""
    for number in range(1000):
        runtime.add(f"s{number}", f"p{number}", f"10.0.{number // 250}.{number % 250}")
    asker = ask(path)
    assert len(asker.observations()) == 1000
    wait_for_lists(runtime)
    assert len(runtime.asked) == 1000
