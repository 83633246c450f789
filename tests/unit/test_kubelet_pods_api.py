"""The source `kubelet-pods-api` watches a real gRPC server that says what a kubelet says."""

from __future__ import annotations

import queue
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpclab import ADDED, DELETED, MODIFIED, Kubelet, Server, event, healthy_when, pod
from structlog.testing import capture_logs

from netacct import clock
from netacct.identity import kubelet_pods_api
from netacct.identity.kubelet_pods_api import KubeletPodsApi
from netacct.identity.source import Health, Replace, SourceEvent, Update
from netacct.model import WHOLE, Observation, unpack

SECONDS = 60.0
"""What a test waits for comes in milliseconds on a machine that has nothing else to do."""

Watch = Callable[..., "Watcher"]


class Watcher:
    """A running source and what it said."""

    def __init__(self, *sockets: Path, labels: tuple[str, ...] = (), relist: float = 300.0) -> None:
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.source = KubeletPodsApi([str(path) for path in sockets], labels, relist)
        self.source.start(self.events.put)

    def next(self, kind: type[SourceEvent] = Update) -> list[tuple[str, str, bool]]:
        """What the next event, which is of this kind, says."""
        said = self.events.get(timeout=SECONDS)
        assert isinstance(said, kind)
        return words(said.observations)

    def quiet(self) -> bool:
        """Whether nothing is said for a while."""
        try:
            self.events.get(timeout=0.15)
        except queue.Empty:
            return True
        return False

    def until(self, holds: Callable[[Health], bool]) -> Health:
        """The health, as soon as this holds of it."""
        return healthy_when(self.source, holds)


def words(observations: tuple[Observation, ...]) -> list[tuple[str, str, bool]]:
    """Pod, address and presence of each observation."""
    return [(seen.pod.name, "whole" if seen.ip == WHOLE else unpack(seen.ip), seen.present) for seen in observations]


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Makes watchers that try again soon, and stops them."""
    monkeypatch.setattr(kubelet_pods_api, "RETRY", 0.02)
    monkeypatch.setattr(kubelet_pods_api, "RETRY_LIMIT", 0.2)
    made: list[Watcher] = []

    def start(*sockets: Path, **more: Any) -> Watcher:
        made.append(Watcher(*sockets, **more))
        return made[-1]

    yield start
    for watcher in made:
        watcher.source.stop()


@pytest.fixture
def serve() -> Iterator[Callable[..., Kubelet]]:
    """Makes kubelets, and stops them."""
    made: list[Kubelet] = []

    def start(*args: Any, **more: Any) -> Kubelet:
        made.append(Kubelet(*args, **more))
        return made[-1]

    yield start
    for kubelet in made:
        kubelet.stop()


Serve = Callable[..., Kubelet]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the kubelet has its socket."""
    (tmp_path / "pods-api").mkdir()
    return tmp_path / "pods-api" / "pods-api.sock"


def test_the_pods_of_a_node(path: Path, serve: Serve, watch: Watch) -> None:
    """What the kubelet lists first is told at once: owners, labels that are asked for, ages, and who owns nothing."""
    begin, now = clock.now(), int(time.time())
    end = clock.now()
    serve(
        path,
        [
            pod("train-0", "10.0.0.1", "fd00::1", owner=("StatefulSet", "train"), labels={"team": "x", "no": "y"}),
            pod("web-1", "10.0.0.2", owner=("ReplicaSet", "web-7d9c"), labels={"pod-template-hash": "7d9c"}),
            pod("init", "10.0.0.3", phase="Pending", started=now - 1000),
            pod("new", phase="Pending"),
            pod("done", "10.0.0.2", phase="Succeeded", owner=("Job", "done")),
            pod("etcd-n1", "192.168.50.11", uid="ab" * 16, namespace="kube-system", host=True),
        ],
    )
    began = clock.now()
    watcher = watch(path, labels=("team",))
    said = watcher.events.get(timeout=SECONDS)
    assert isinstance(said, Replace)
    assert words(said.observations) == [
        ("train-0", "10.0.0.1", True),
        ("train-0", "fd00::1", True),
        ("web-1", "10.0.0.2", True),
        ("init", "10.0.0.3", True),
        ("done", "10.0.0.2", False),
        ("etcd-n1", "whole", True),
    ]
    pods = {seen.pod.name: seen for seen in said.observations}
    assert pods["train-0"].pod.labels == (("team", "x"),)
    assert (pods["train-0"].pod.workload_kind, pods["train-0"].pod.workload) == ("StatefulSet", "train")
    assert (pods["web-1"].pod.workload_kind, pods["web-1"].pod.workload) == ("Deployment", "web")
    assert pods["etcd-n1"].pod.uid == "ab" * 16
    assert begin - 3 < pods["init"].created + 1000 < end + 3
    assert {(seen.source, seen.sandbox) for seen in said.observations} == {("kubelet-pods-api", "")}
    assert all(began <= seen.seen_at <= clock.now() for seen in said.observations)
    health = watcher.source.healthy()
    assert (health.up, health.reason, health.present) == (True, "", True)
    assert health.age is not None
    assert health.age < SECONDS


def test_a_pod_s_life(path: Path, serve: Serve, watch: Watch) -> None:
    """A pod that comes, gets its address, completes and is deleted is told step by step; what is no news is not."""
    kubelet = serve(path)
    watcher = watch(path)
    assert watcher.next(Replace) == []
    kubelet.say(event(ADDED, pod("a", phase="Pending")), event(MODIFIED, pod("a", "10.0.0.1", "fd00::1")))
    assert watcher.next() == [("a", "10.0.0.1", True), ("a", "fd00::1", True)]
    kubelet.say(*[event(MODIFIED, pod("a", "10.0.0.1", "fd00::1"))] * 3)
    kubelet.say(event(MODIFIED, pod("a", "10.0.0.1", "fd00::1", phase="Succeeded")))
    assert watcher.next() == [("a", "10.0.0.1", False), ("a", "fd00::1", False)]
    kubelet.say(event(DELETED, pod("a")))
    assert watcher.quiet()


def test_deleted_pods_bring_only_their_name(path: Path, serve: Serve, watch: Watch) -> None:
    """A deletion takes back what was told of that uid, once, however often it comes, and nothing of its successor."""
    kubelet = serve(path, [pod("train-0", "10.0.0.1", uid="u0", owner=("StatefulSet", "train"))])
    watcher = watch(path)
    watcher.next(Replace)
    kubelet.say(event(ADDED, pod("train-0", "10.0.0.1", uid="u1", owner=("StatefulSet", "train"))))
    assert watcher.next() == [("train-0", "10.0.0.1", True)]
    kubelet.say(*[event(DELETED, pod("train-0", uid="u0"))] * 2)
    said = watcher.events.get(timeout=SECONDS)
    assert [(seen.pod.uid, seen.pod.workload, seen.present) for seen in said.observations] == [("u0", "train", False)]
    assert watcher.quiet()


def test_a_change_after_the_end(path: Path, serve: Serve, watch: Watch) -> None:
    """A late change of a deleted pod is not believed: the watch begins anew, and its list decides."""
    kubelet = serve(path, [pod("a", "10.0.0.1"), pod("b", "10.0.0.2")])
    watcher = watch(path)
    watcher.next(Replace)
    kubelet.pods = [pod("b", "10.0.0.2")]
    kubelet.say(event(DELETED, pod("a")), event(MODIFIED, pod("a", "10.0.0.1")))
    assert watcher.next() == [("a", "10.0.0.1", False)]
    while kubelet.watches < 2:
        time.sleep(0.01)
    assert watcher.quiet()
    kubelet.pods.append(pod("c", "10.0.0.1"))
    kubelet.say(event(MODIFIED, pod("c", "10.0.0.1")))
    assert watcher.next(Replace) == [("b", "10.0.0.2", True), ("c", "10.0.0.1", True)]


def test_the_list_is_made_again(path: Path, serve: Serve, watch: Watch) -> None:
    """What the kubelet did not tell in between is found at the next list, and an equal list is no news."""
    kubelet = serve(path, [pod("a", "10.0.0.1")])
    watcher = watch(path, relist=0.3)
    watcher.next(Replace)
    kubelet.pods = [pod("b", "10.0.0.1")]
    assert watcher.next(Replace) == [("b", "10.0.0.1", True)]
    seen = kubelet.watches
    while kubelet.watches < seen + 3:
        time.sleep(0.01)
    assert watcher.events.empty()
    watcher.until(lambda health: health.up)


def test_a_kubelet_that_starts(path: Path, serve: Serve, watch: Watch) -> None:
    """While the kubelet says that it is initializing, it is asked again; nothing is told before it has listed all."""
    kubelet = serve(path, [pod("a", "10.0.0.1")])
    kubelet.refuse = [grpc.StatusCode.FAILED_PRECONDITION] * 10_000
    watcher = watch(path)
    health = watcher.until(lambda health: "is not ready" in health.reason)
    assert (health.up, health.present) == (False, True)
    assert watcher.events.empty()
    kubelet.refuse = []
    assert watcher.next(Replace) == [("a", "10.0.0.1", True)]
    assert kubelet.watches > 1


@pytest.mark.parametrize("end", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL, None])
def test_a_watch_that_ends(path: Path, serve: Serve, watch: Watch, end: grpc.StatusCode | None) -> None:
    """Where the kubelet ends the watch, as it does with slow readers, the next one tells what was missed."""
    kubelet = serve(path, [pod("a", "10.0.0.1")])
    watcher = watch(path)
    watcher.next(Replace)
    kubelet.pods.append(pod("b", "10.0.0.2"))
    kubelet.say(end)
    assert watcher.next(Replace) == [("a", "10.0.0.1", True), ("b", "10.0.0.2", True)]
    watcher.until(lambda health: health.up)


def test_a_kubelet_that_restarts(path: Path, serve: Serve, watch: Watch) -> None:
    """While the kubelet is down what it said holds and health says why; after its return its first list is told."""
    kubelet = serve(path, [pod("a", "10.0.0.1"), pod("b", "10.0.0.2")])
    watcher = watch(path)
    watcher.next(Replace)
    kubelet.stop()
    assert watcher.until(lambda health: not health.up).present
    assert watcher.quiet()
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    assert "refused" in watcher.until(lambda health: "refused" in health.reason.lower()).reason.lower()
    assert watcher.quiet()
    path.unlink()
    serve(path, [pod("b", "10.0.0.2"), pod("c", "10.0.0.3")])
    assert watcher.next(Replace) == [("b", "10.0.0.2", True), ("c", "10.0.0.3", True)]
    watcher.until(lambda health: health.up)


def test_a_kubelet_that_comes_late(tmp_path: Path, serve: Serve, watch: Watch) -> None:
    """A node without the socket is no trouble; when directory and socket appear, they are found without a poll."""
    path = tmp_path / "kubelet" / "pods-api" / "pods-api.sock"
    watcher = watch(path)
    health = watcher.until(lambda health: "no Pods API socket" in health.reason)
    assert (health.up, health.present, health.age) == (False, False, None)
    path.parent.mkdir(parents=True)
    serve(path, [pod("a", "10.0.0.1")])
    assert watcher.next(Replace) == [("a", "10.0.0.1", True)]
    assert watcher.source.healthy().present


def test_a_file_that_is_no_socket(path: Path, watch: Watch) -> None:
    """A regular file in the socket's place is as good as none."""
    path.write_text("")
    assert not watch(path).until(lambda health: "no Pods API socket" in health.reason).present


def test_the_other_path(tmp_path: Path, path: Path, serve: Serve, watch: Watch) -> None:
    """Where nobody answers at the first path, the second one is asked."""
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    other = tmp_path / "kubelet.sock"
    serve(other, [pod("a", "10.0.0.1")])
    assert watch(path, other).next(Replace) == [("a", "10.0.0.1", True)]


@pytest.mark.parametrize("service", ["v1beta1.Pods", "v1.Pods"])
def test_later_names_of_the_service(path: Path, serve: Serve, watch: Watch, service: str) -> None:
    """A service that has left alpha is found by its new name, which is asked first from then on."""
    kubelet = serve(path, [pod("a", "10.0.0.1")], service)
    watcher = watch(path)
    assert watcher.next(Replace) == [("a", "10.0.0.1", True)]
    assert watcher.source._services[0] == service
    kubelet.pods.append(pod("b", "10.0.0.2"))
    kubelet.say(None)
    assert len(watcher.next(Replace)) == 2


def test_a_kubelet_without_the_service(path: Path, watch: Watch) -> None:
    """A socket where none of the names is served is a reason in words."""
    with Server(path, "v2.Pods", {}, {}):
        watcher = watch(path)
        health = watcher.until(lambda health: "does not serve this" in health.reason)
        assert (health.up, health.present) == (False, True)
        watcher.source.stop()


def test_garbage_in_the_list(path: Path, serve: Serve, watch: Watch) -> None:
    """A pod that is not understood leaves the source unhealthy, and a list with such a pod takes nothing back."""
    kubelet = serve(path, [pod("a", "10.0.0.1")])
    watcher = watch(path)
    watcher.next(Replace)
    kubelet.pods = [b"\x08\x01\x12\x05garbage", pod("b", "10.0.0.2")]
    kubelet.say(None)
    assert watcher.next(Replace) == [("a", "10.0.0.1", True), ("b", "10.0.0.2", True)]
    assert watcher.until(lambda health: not health.up).reason == "not all pods of the kubelet are understood"
    kubelet.pods = [pod("b", "10.0.0.2")]
    kubelet.say(None)
    assert watcher.next(Replace) == [("b", "10.0.0.2", True)]
    watcher.until(lambda health: health.up)


def test_garbage_among_the_changes(path: Path, serve: Serve, watch: Watch) -> None:
    """Events that are not understood, or are of a type that nobody knows, are passed over."""
    kubelet = serve(path)
    watcher = watch(path)
    watcher.next(Replace)
    kubelet.say(b"\xff\xff", event(7, pod("x", "10.0.0.9")), event(0, pod("y", "10.0.0.9")), event(ADDED))
    kubelet.say(event(ADDED, pod("a", "10.0.0.1")))
    assert watcher.next() == [("a", "10.0.0.1", True)]
    assert kubelet.watches == 1


def test_a_deletion_before_the_list_is_complete(path: Path, serve: Serve, watch: Watch) -> None:
    """What is added and deleted before the list ends is not told."""
    kubelet = serve(path, [pod("b", "10.0.0.2")])
    kubelet.before = [event(ADDED, pod("a", "10.0.0.1")), event(DELETED, pod("a")), event(MODIFIED, pod("b"))]
    assert watch(path).next(Replace) == [("b", "10.0.0.2", True)]


def test_five_thousand_pods(path: Path, serve: Serve, watch: Watch) -> None:
    """More pods than any node may have are listed whole, and of each the change that matters is told."""
    pods = [pod(f"p{number}", f"10.0.{number // 250}.{number % 250}") for number in range(5000)]
    kubelet = serve(path, [event(ADDED, each) for each in pods])
    watcher = watch(path)
    assert len(watcher.next(Replace)) == 5000
    kubelet.say(*[event(MODIFIED, each) for each in pods], event(DELETED, pods[4999]))
    assert watcher.next() == [("p4999", "10.0.19.249", False)]


def test_a_kubelet_that_hangs(path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that takes the call and says nothing is not up, the log has it, and stopping does not wait for it."""
    monkeypatch.setattr(kubelet_pods_api, "PATIENCE", 0.05)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(path))
        stopped.listen()
        with capture_logs() as lines:
            watcher = watch(path, relist=0.2)
            watcher.until(lambda health: "did not list its pods" in health.reason)
            watcher.until(lambda health: "did not answer in time" in health.reason)
            watcher.source.stop()
    assert [line["log_level"] for line in lines] == ["warning"]


def test_it_can_start_again(path: Path, serve: Serve, watch: Watch) -> None:
    """A source that was stopped says nothing more, and watches again when it is started again."""
    kubelet = serve(path, [pod("a", "10.0.0.1")])
    watcher = watch(path)
    watcher.next(Replace)
    watcher.source.stop()
    watcher.source.stop()
    kubelet.say(event(ADDED, pod("b", "10.0.0.2")))
    assert watcher.quiet()
    watcher.source.start(watcher.events.put)
    assert watcher.next(Replace) == [("a", "10.0.0.1", True)]


def test_pauses_grow(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that stays away is asked after ever longer pauses, up to half a minute, and the log has it once."""
    monkeypatch.setattr(random, "uniform", lambda _low, _high: 1.0)
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    source = KubeletPodsApi([str(path)])
    source._look(None)
    with capture_logs() as lines:
        assert [source._turn() for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
        assert lines == []
        assert [source._turn() for _ in range(5)] == [8.0, 16.0, 30.0, 30.0, 30.0]
    assert [line["log_level"] for line in lines] == ["warning"]
    monkeypatch.setattr(kubelet_pods_api, "PATIENCE", 0.0)  # a watch that worked for a while was one that worked
    assert source._turn() == 0.5
    monkeypatch.undo()
    path.unlink()
    source._look(None)
    assert source._turn() == kubelet_pods_api.RETRY_LIMIT
    assert not source.healthy().present


def test_a_restart_in_the_log(path: Path, serve: Serve, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kubelet that is away for a moment is no warning, and a line when it is back; the next list is none."""
    monkeypatch.setattr(kubelet_pods_api, "RETRY", 60.0)
    with capture_logs() as lines:
        kubelet = serve(path, [pod("a", "10.0.0.1")])
        watcher = watch(path)
        watcher.next(Replace)
        kubelet.stop()
        watcher.until(lambda health: not health.up)
        kubelet = serve(path, [pod("b", "10.0.0.1")])
        watcher.next(Replace)
        assert [line["log_level"] for line in lines] == ["info", "info"]
        watcher.source.stop()
