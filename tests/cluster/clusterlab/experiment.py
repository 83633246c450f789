"""An experiment in a cluster: servers of every common kind, and Jobs that send traffic of known size to all of them."""

from __future__ import annotations

from typing import Any, Self

from clusterlab import manifests, plan, traffic
from clusterlab.cluster import Cluster
from clusterlab.hosts import Host
from clusterlab.node import RECEIVERS

PORT, EDGE_PORT, HOST_PORT, NODE_PORT = 7000, 7080, 30080, 7100
NAMESPACES = ("research", "serving", "data")
DATAGRAMS = 20
"""In each exchange by UDP."""
PER_NODE = 2
"""Pods of each Job."""


class Experiment:
    """For the length of a `with` block its servers run; each `run` is one Job more per node."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._receivers: list[Host] = []

    def __enter__(self) -> Self:
        """Start a StatefulSet, a Deployment behind a ClusterIP, a DaemonSet with a hostPort, and servers on hosts."""
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        """Take all of it away."""
        self._cluster.delete_namespace(*NAMESPACES)
        for host in self._receivers:
            host.stop(RECEIVERS)

    def begin(self) -> None:
        """Start the servers, and wait until they run."""
        cluster = self._cluster
        self._receivers = [cluster.internet, *cluster.nodes]
        cluster.serve_traffic(self._receivers, NODE_PORT)
        cluster.namespace(*NAMESPACES)
        server = manifests.container(traffic.SERVER, "serve", str(PORT), port=PORT)
        edge = manifests.container(traffic.SERVER, "serve", str(EDGE_PORT), port=EDGE_PORT, host_port=HOST_PORT)
        cluster.apply(
            [
                manifests.stateful_set("data", "store", manifests.pod_spec(server), replicas=2),
                manifests.deployment("serving", "web", manifests.pod_spec(server), replicas=2),
                manifests.service("serving", "web", PORT),
                manifests.daemon_set("serving", "edge", manifests.pod_spec(edge)),
            ]
        )
        self._stores = cluster.wait_pods("data", 2, "app=store")
        cluster.wait_pods("serving", 2, "app=web")
        cluster.wait_pods("serving", len(cluster.nodes), "app=edge")

    def run(self, name: str) -> list[dict[str, Any]]:
        """Run a Job per node that sends to every target; returns their pods, which have succeeded."""
        self._cluster.apply([self._job(name, node.name) for node in self._cluster.nodes])
        number = PER_NODE * len(self._cluster.nodes)
        return self._cluster.wait_pods("research", number, f"experiment={name}", phase="Succeeded")

    def targets(self, family: plan.Family) -> list[tuple[str, int]]:
        """Address and port of pods of each node, a ClusterIP, hostPorts, nodes, the internet host."""
        (service,) = self._cluster.get("services", "serving")
        nodes = self._cluster.nodes
        return [
            *((traffic.pod_address(pod, family), PORT) for pod in self._stores),
            (next(ip for ip in service["spec"]["clusterIPs"] if traffic.family(ip) == family), PORT),
            *((node.addresses[family], HOST_PORT) for node in nodes),
            *((node.addresses[family], NODE_PORT) for node in nodes),
            (plan.INTERNET[family], NODE_PORT),
        ]

    def _job(self, name: str, node: str) -> manifests.Manifest:
        targets = [target for family in plan.FAMILIES for target in self.targets(family)]
        commands = [traffic.udp(*target, count=DATAGRAMS) for target in targets]
        commands += [traffic.tcp(*target) for target in targets]
        commands.append(traffic.greet(plan.API_SERVICE[4], 443))
        spec = manifests.pod_spec(manifests.container(*traffic.script(commands)), node=node)
        made = manifests.job("research", f"{name}-{node}", spec, completions=PER_NODE)
        made["spec"]["template"]["metadata"]["labels"]["experiment"] = name
        return made
