"""The sources `kubelet-pods-api` and `cri` on a node of a real cluster, with its kubelet and its containerd."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusterlab import manifests
from clusterlab.cluster import Cluster
from clusterlab.hosts import until
from clusterlab.node import CONTAINERD, KUBELET, STATIC_PODS, Node

from netacct import clock
from netacct.identity import cri, kubelet_pods_api
from netacct.identity.cri import CriSource
from netacct.identity.kubelet_pods_api import KubeletPodsApi
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.model import WHOLE, Observation, unpack

pytestmark = pytest.mark.cluster

_NAMESPACE = "grpc"
_STATIC = "lonely"
_LABELS = ("experiment",)


class Listener:
    """What a source says, merged: the observations that hold now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, bytes, str], Observation] = {}
        self.events = 0

    def hear(self, event: SourceEvent) -> None:
        """Take an event."""
        with self._lock:
            self.events += 1
            if isinstance(event, Replace):
                self._held.clear()
            for seen in event.observations:
                if seen.present:
                    self._held[seen.pod.uid, seen.ip, seen.sandbox] = seen
                else:
                    self._held.pop((seen.pod.uid, seen.ip, seen.sandbox), None)

    def pods(self, namespace: str = _NAMESPACE) -> dict[str, list[Observation]]:
        """The observations of a namespace's pods, by name."""
        found: dict[str, list[Observation]] = {}
        with self._lock:
            for seen in self._held.values():
                if seen.pod.namespace == namespace:
                    found.setdefault(seen.pod.name, []).append(seen)
        return found

    def addresses(self) -> dict[str, set[str]]:
        """The addresses of each pod."""
        return {
            name: {"whole" if one.ip == WHOLE else unpack(one.ip) for one in seen} for name, seen in self.pods().items()
        }

    def knows(self, name: str) -> bool:
        """Whether a pod has been told of."""
        return name in self.pods()

    def until(self, addresses: dict[str, set[str]], patience: float = 120.0) -> None:
        """Wait until the pods with their addresses are these."""
        until(lambda: self.addresses() == addresses, patience, lambda: f"{self.addresses()} is not {addresses}")


class Sources:
    """Both sources on one node, at the paths that they have there by default."""

    def __init__(self, node: Node) -> None:
        self.kubelet, self.runtime = Listener(), Listener()
        sockets = [[str(node.path(path)) for path in module.SOCKETS] for module in (kubelet_pods_api, cri)]
        self.pods_api = KubeletPodsApi(sockets[0], _LABELS)
        self.cri = CriSource(sockets[1], _LABELS, interval=0.5)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Both run for the length of the block."""
        self.pods_api.start(self.kubelet.hear)
        self.cri.start(self.runtime.hear)
        try:
            yield
        finally:
            self.cri.stop()
            self.pods_api.stop()

    def until_up(self) -> None:
        """Wait until both are healthy."""
        for source in (self.pods_api, self.cri):
            _until(source.healthy, lambda health: health.up)


def _until(healthy: Callable[[], Health], holds: Callable[[Health], bool], patience: float = 120.0) -> None:
    until(lambda: holds(healthy()), patience, lambda: str(healthy()))


@contextlib.contextmanager
def _pods(cluster: Cluster, node: Node) -> Iterator[dict[str, dict[str, Any]]]:
    """Pods of every kind on one node; gives the API server's own by name, without the one that completed."""
    spec = manifests.pod_spec(manifests.container(), node=node.name)
    cluster.namespace(_NAMESPACE)
    static = manifests.pod(_NAMESPACE, _STATIC, manifests.pod_spec(manifests.container()), experiment="static")
    node.write(f"{STATIC_PODS}/{_STATIC}.json", json.dumps(static))
    try:
        cluster.apply(
            [
                manifests.deployment(_NAMESPACE, "web", spec, replicas=2),
                manifests.daemon_set(_NAMESPACE, "host", {**spec, "hostNetwork": True}),
                manifests.job(_NAMESPACE, "done", manifests.pod_spec(manifests.container("true"), node=node.name)),
                manifests.pod(_NAMESPACE, "bare", spec, experiment="scaling", other="x"),
            ]
        )
        cluster.wait_pods(_NAMESPACE, 1, "app=done", phase="Succeeded")
        running = cluster.wait_pods(_NAMESPACE, 5)
        yield {str(pod["metadata"]["name"]): pod for pod in running}
    finally:
        node.path(f"{STATIC_PODS}/{_STATIC}.json").unlink()
        cluster.delete_namespace(_NAMESPACE)


def _expected(pods: dict[str, dict[str, Any]]) -> dict[str, set[str]]:
    """The addresses of each pod by the API server."""
    return {
        name: {"whole"} if pod["spec"].get("hostNetwork") else {each["ip"] for each in pod["status"]["podIPs"]}
        for name, pod in pods.items()
    }


def _uid(pod: dict[str, Any]) -> str:
    """The uid by which a pod's node knows it."""
    return str(pod["metadata"].get("annotations", {}).get("kubernetes.io/config.mirror") or pod["metadata"]["uid"])


def _sandboxes(node: Node) -> dict[tuple[str, str], str]:
    """Name and uid of each pod of the namespace, with its sandbox, by libcni's files."""
    found = {}
    for path in node.path("/var/lib/cni/results").iterdir():
        document = json.loads(path.read_bytes())
        names = dict(document.get("cniArgs", []))
        if names.get("K8S_POD_NAMESPACE") == _NAMESPACE and document["ifName"] == "eth0":
            found[names["K8S_POD_NAME"], names["K8S_POD_UID"]] = document["containerId"]
    return found


def test_both_know_every_pod(cluster: Cluster) -> None:
    """Kubelet and containerd tell pods of all kinds with the API server's addresses, and nothing of what has ended."""
    node, began = cluster.nodes[0], clock.now()
    sources = Sources(node)
    with _pods(cluster, node) as pods, sources.running():
        for listener in (sources.kubelet, sources.runtime):
            listener.until(_expected(pods))
        by_kubelet, by_runtime = sources.kubelet.pods(), sources.runtime.pods()
        for name, pod in pods.items():
            told = by_kubelet[name] + by_runtime[name]
            assert {seen.pod.uid for seen in told} == {_uid(pod)}
            assert all(began - 1 < seen.created <= clock.now() for seen in told)  # the kubelet's are of whole seconds
        owners = {(seen.pod.workload_kind, seen.pod.workload) for seen in itertools.chain(*by_kubelet.values())}
        assert {("Deployment", "web"), ("DaemonSet", "host")} <= owners
        assert {seen.pod.labels for seen in by_kubelet["bare"] + by_runtime["bare"]} == {(("experiment", "scaling"),)}

        static = f"{_STATIC}-{node.name}"
        assert pods[static]["metadata"]["uid"] != _uid(pods[static])
        in_sandboxes = itertools.chain(*by_runtime.values())
        assert {(one.pod.name, one.pod.uid): one.sandbox for one in in_sandboxes if one.ip != WHOLE} == _sandboxes(node)


def test_kubelet_and_containerd_restart(cluster: Cluster) -> None:
    """What was told holds while either is down, and what happened meanwhile is told at the first answer after it."""
    node = cluster.nodes[0]
    sources = Sources(node)
    with _pods(cluster, node) as pods, sources.running():
        sources.until_up()
        sources.kubelet.until(_expected(pods))

        node.stop(KUBELET)
        _until(sources.pods_api.healthy, lambda health: not health.up and health.present)
        cluster.kubectl("delete", "pod", "-n", _NAMESPACE, "bare", "--force", "--grace-period=0")
        events = sources.kubelet.events
        time.sleep(2)
        assert sources.kubelet.events == events
        assert sources.cri.healthy().up
        node.start(KUBELET)
        _until(sources.pods_api.healthy, lambda health: health.up)
        left = {name: addresses for name, addresses in _expected(pods).items() if name != "bare"}
        sources.kubelet.until(left)

        sources.runtime.until(left)
        node.stop(CONTAINERD)
        _until(sources.cri.healthy, lambda health: not health.up and health.present)
        time.sleep(2)
        assert sources.runtime.addresses() == left
        node.start(CONTAINERD)
        _until(sources.cri.healthy, lambda health: health.up)
        assert sources.runtime.addresses() == left
        assert sources.pods_api.healthy().up

        cluster.apply(manifests.pod(_NAMESPACE, "late", manifests.pod_spec(manifests.container(), node=node.name)))
        for listener in (sources.kubelet, sources.runtime):
            until(functools.partial(listener.knows, "late"), 120, "a later pod is not told")
