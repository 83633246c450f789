"""Pods of every kind that a cluster has, and what they send to every kind of peer: all of it of known size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Self

from clusterlab import manifests, plan, traffic
from clusterlab.cluster import Cluster
from clusterlab.experiment import NAMESPACES as EXPERIMENT
from clusterlab.experiment import NODE_PORT, PORT, Experiment
from clusterlab.node import STATIC_PODS

NAMESPACE = "mixture"
NAMESPACES = (*EXPERIMENT, NAMESPACE)
HOST_PORT = 7200
"""Where hostNetwork pods listen."""
BRIEF_WAVES = 3
BRIEF_PODS = 2
"""Of each wave and node."""
SIZE, REPLY = 500, 300
"""Bytes of payload of each datagram that a client sends, and of each answer."""
NOBODY = ("10.96.250.250", "fd00:10:96::fafa", "10.99.0.9", "fd77::9")
"""Addresses of the classes `service` and `private` at which nobody is."""

SERVERS = ("store", "web", "edge")
"""Labels `app` of the pods that answer."""
WORKLOADS = {
    "store": ("StatefulSet", "store"),
    "web": ("Deployment", "web"),
    "edge": ("DaemonSet", "edge"),
    "nightly": ("CronJob", "nightly"),
}
"""By the label `app`, where it is not a Job's name."""


class Mixture:
    """For the length of a `with` block its servers run; `run` lets clients of every kind send to them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._experiment = Experiment(cluster)

    def __enter__(self) -> Self:
        """Start the servers of an experiment and hostNetwork ones, a static pod per node, and a CronJob."""
        cluster = self._cluster
        cluster.namespace(NAMESPACE)
        host = manifests.container(traffic.SERVER, "serve", str(HOST_PORT), port=HOST_PORT)
        cluster.apply(manifests.daemon_set(NAMESPACE, "host", manifests.pod_spec(host, hostNetwork=True)))
        cluster.apply(manifests.cron_job(NAMESPACE, "nightly", self._spec(_to_internet())))
        self._experiment.begin()
        cluster.wait_pods(NAMESPACE, len(cluster.nodes), "app=host")
        commands = [*self._to_stores(), *_to_internet(), "exec traffic pause"]
        for node in cluster.nodes:
            static = manifests.pod(NAMESPACE, "static", self._spec(commands), app="static")
            node.write(f"{STATIC_PODS}/static.json", json.dumps(static))
        return self

    def __exit__(self, *_: object) -> None:
        """Take all of it away."""
        for node in self._cluster.nodes:
            node.path(f"{STATIC_PODS}/static.json").unlink()
        self._cluster.delete_namespace(NAMESPACE)
        self._experiment.__exit__()

    def run(self, name: str) -> list[dict[str, Any]]:
        """Let everybody send; returns all pods, when those that end have succeeded. Run it once."""
        cluster = self._cluster
        self._run_brief(f"{name}-0")
        self._experiment.run(name)
        cluster.apply(self._job(f"{name}-odd", [*self._to_hosts(), *_to_nobody()], node=""))
        for wave in range(1, BRIEF_WAVES):
            self._run_brief(f"{name}-{wave}")
        cluster.wait_pods(NAMESPACE, 1, f"app={name}-odd", "Succeeded")
        cluster.wait_pods(NAMESPACE, len(cluster.nodes), "app=static")
        cluster.wait_pods(NAMESPACE, 1, "app=nightly", "Succeeded", patience=300)
        cluster.kubectl("patch", "cronjob", "-n", NAMESPACE, "nightly", "-p", '{"spec": {"suspend": true}}')
        return [pod for namespace in NAMESPACES for pod in cluster.get("pods", namespace)]

    def _run_brief(self, name: str) -> None:
        """Jobs that live a second, on each node, and their end."""
        nodes = self._cluster.nodes
        commands = [*self._to_stores(), *_to_internet()]
        jobs = [self._job(f"{name}-{node.name}", commands, node.name, BRIEF_PODS, wave=name) for node in nodes]
        self._cluster.apply(jobs)
        self._cluster.wait_pods(NAMESPACE, BRIEF_PODS * len(nodes), f"wave={name}", "Succeeded")

    def _to_stores(self) -> list[str]:
        """To a pod of each node."""
        return [
            each
            for family in plan.FAMILIES
            for target in self._experiment.targets(family)[: len(self._cluster.nodes)]
            for each in (traffic.udp(*target, size=SIZE), traffic.tcp(*target))
        ]

    def _to_hosts(self) -> list[str]:
        """To hostNetwork pods."""
        return [
            each
            for node in self._cluster.nodes
            for address in node.addresses.values()
            for each in (traffic.udp(address, HOST_PORT, size=SIZE), traffic.tcp(address, HOST_PORT))
        ]

    def _job(
        self, name: str, commands: Iterable[str], node: str, completions: int = 1, **labels: str
    ) -> manifests.Manifest:
        made = manifests.job(NAMESPACE, name, self._spec(commands, node), completions)
        made["spec"]["template"]["metadata"]["labels"] |= labels
        return made

    def _spec(self, commands: Iterable[str], node: str = "") -> manifests.Manifest:
        return manifests.pod_spec(manifests.container(*traffic.script(commands)), node=node)


def workload(pod: dict[str, Any]) -> tuple[str, str]:
    """The kind and name of the workload that a pod of the mixture belongs to, by what its labels say."""
    app = pod["metadata"]["labels"]["app"]
    if app == "static":
        return "Pod", pod["metadata"]["name"]
    return WORKLOADS.get(app, ("Job", app))


def _to_internet() -> list[str]:
    targets = [(plan.INTERNET[family], NODE_PORT) for family in plan.FAMILIES]
    return [each for target in targets for each in (traffic.udp(*target, size=SIZE), traffic.tcp(*target))]


def _to_nobody() -> list[str]:
    """What is sent there is counted, whatever becomes of it; an ICMP error may stop it early."""
    return [f"{traffic.udp(address, PORT, count=5, size=SIZE, reply=0)} || :" for address in NOBODY]
