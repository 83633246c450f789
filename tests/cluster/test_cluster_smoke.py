"""Pods of every common kind send traffic of known size in a real cluster; the agents' series are exact to the byte."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from clusterlab import manifests, plan, traffic
from clusterlab.classes import expected
from clusterlab.cluster import Cluster
from clusterlab.hosts import Host

pytestmark = pytest.mark.cluster

_PORT, _EDGE_PORT, _HOST_PORT, _NODE_PORT = 7000, 7080, 30080, 7100
_NAMESPACES = ("team-a", "team-b", "team-c")


@contextlib.contextmanager
def _namespaces(cluster: Cluster) -> Iterator[None]:
    cluster.namespace(*_NAMESPACES)
    try:
        yield
    finally:
        cluster.delete_namespace(*_NAMESPACES)


@contextlib.contextmanager
def _receivers(cluster: Cluster) -> Iterator[None]:
    hosts: list[Host] = [cluster.internet, *cluster.nodes]
    cluster.serve_traffic(hosts, _NODE_PORT)
    try:
        yield
    finally:
        for host in hosts:
            host.stop("receivers")


def _servers(cluster: Cluster) -> None:
    server = manifests.container(traffic.SERVER, "serve", str(_PORT), port=_PORT)
    edge = manifests.container(traffic.SERVER, "serve", str(_EDGE_PORT), port=_EDGE_PORT, host_port=_HOST_PORT)
    cluster.apply(
        [
            manifests.stateful_set("team-a", "store", manifests.pod_spec(server), replicas=2),
            manifests.deployment("team-b", "web", manifests.pod_spec(server), replicas=2),
            manifests.service("team-b", "web", _PORT),
            manifests.daemon_set("team-c", "edge", manifests.pod_spec(edge)),
        ]
    )


def _targets(cluster: Cluster, version: plan.Family) -> list[tuple[str, int]]:
    """Every place that a pod sends to: pods of both nodes, a ClusterIP, hostPorts, nodes, the internet host."""
    stores = cluster.wait_pods("team-a", 2, "app=store")
    cluster.wait_pods("team-b", 2, "app=web")
    cluster.wait_pods("team-c", 2, "app=edge")
    assert {pod["spec"]["nodeName"] for pod in stores} == {"node1", "node2"}
    (service,) = cluster.get("services", "team-b")
    cluster_ip = next(ip for ip in service["spec"]["clusterIPs"] if traffic.family(ip) == version)
    return [
        *((traffic.pod_address(pod, version), _PORT) for pod in stores),
        (cluster_ip, _PORT),
        *((node.addresses[version], _HOST_PORT) for node in cluster.nodes),
        *((node.addresses[version], _NODE_PORT) for node in cluster.nodes),
        (plan.INTERNET[version], _NODE_PORT),
    ]


def _job(cluster: Cluster, node: str) -> dict[str, Any]:
    """A Job on one node that sends UDP and TCP to every target in both families, and to the API server."""
    targets = [target for version in plan.FAMILIES for target in _targets(cluster, version)]
    commands = [make(*target) for target in targets for make in (traffic.udp, traffic.tcp)]
    commands.append(traffic.greet(plan.API_SERVICE[4], 443))
    spec = manifests.pod_spec(manifests.container(*traffic.script(commands)), node=node)
    return manifests.job("team-c", f"train-{node}", spec, completions=2)


def test_every_pod_series_is_exact(cluster: Cluster) -> None:
    """Every pod series of both nodes' agents equals the counters in the pods' own network namespaces."""
    with _namespaces(cluster), _receivers(cluster):
        _servers(cluster)
        cluster.apply([_job(cluster, node.name) for node in cluster.nodes])
        jobs = cluster.wait_pods("team-c", 4, "job-name", phase="Succeeded")

        cluster.assert_exact()

        for pod in jobs:
            _check_sockets(cluster, pod)
        _check_classes(cluster)


def _check_sockets(cluster: Cluster, pod: dict[str, Any]) -> None:
    """What a client's UDP sockets saw is what the counters of its namespace saw."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    seen = traffic.exchanges(cluster.kubectl("logs", "-n", namespace, name))
    flows = next(flows for one, flows in cluster.node_of(pod).truth.read().items() if one.name == name)
    for direction in ("transmit", "receive"):
        sockets = sum(
            (one.sent if direction == "transmit" else one.received) + 20 * traffic.HEADERS[traffic.family(one.peer)]
            for one in seen
            if one.protocol == "udp"
        )
        counted = sum(c.bytes for flow, c in flows.items() if flow.direction == direction and flow.protocol == "udp")
        assert sockets == counted > 0, (name, direction)


def _check_classes(cluster: Cluster) -> None:
    """The comparison held something of every class."""
    for node in cluster.nodes:
        sent = expected(node.truth.read(), cluster.translations(node))
        classes = {(series.direction, series.traffic) for series, count in sent.items() if count.bytes > 10_000}
        assert classes >= {(way, what) for way in ("transmit", "receive") for what in ("pod", "node", "internet")}
