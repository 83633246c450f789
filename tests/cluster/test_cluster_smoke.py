"""Pods of every common kind send traffic of known size in a real cluster; the agents' series are exact to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from clusterlab import traffic
from clusterlab.classes import expected
from clusterlab.cluster import Cluster
from clusterlab.experiment import DATAGRAMS, Experiment

pytestmark = pytest.mark.cluster


@pytest.fixture(params=[("iptables", "auto"), ("nftables", "iptables")], ids="-".join)
def modes(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[None]:
    """The mode of kube-proxy, and the datapath of the agents."""
    _set_modes(cluster, *request.param)
    yield
    _set_modes(cluster, cluster.proxy_mode, "auto")


def _set_modes(cluster: Cluster, proxy_mode: str, datapath: str) -> None:
    for node, agent in zip(cluster.nodes, cluster.agents, strict=True):
        node.set_proxy_mode(proxy_mode)
        agent.stop()
        agent.start(datapath=datapath)


@pytest.mark.usefixtures("modes")
def test_every_pod_series_is_exact(cluster: Cluster) -> None:
    """Every pod series of both nodes' agents equals the counters in the pods' own network namespaces."""
    since = cluster.measure()
    with Experiment(cluster) as experiment:
        pods = experiment.run("smoke")

        cluster.assert_exact(since)

        for pod in pods:
            _check_sockets(cluster, pod)
        _check_classes(cluster)


def _check_sockets(cluster: Cluster, pod: dict[str, Any]) -> None:
    """What a client's UDP sockets saw is what the counters of its namespace saw."""
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    seen = [one for one in traffic.exchanges(cluster.kubectl("logs", "-n", namespace, name)) if one.protocol == "udp"]
    headers = sum(DATAGRAMS * traffic.HEADERS[traffic.family(one.peer)] for one in seen)
    flows = next(flows for one, flows in cluster.node_of(pod).truth.read().items() if one.name == name)
    sent = sum(count.bytes for flow, count in flows.items() if (flow.direction, flow.protocol) == ("transmit", "udp"))
    received = sum(
        count.bytes for flow, count in flows.items() if (flow.direction, flow.protocol) == ("receive", "udp")
    )
    assert (sent, received) == (sum(one.sent for one in seen) + headers, sum(one.received for one in seen) + headers)
    assert sent > headers


def _check_classes(cluster: Cluster) -> None:
    """The comparison held something of every class."""
    for node in cluster.nodes:
        sent = expected(node.truth.read(), cluster.translations(node))
        classes = {(series.direction, series.traffic) for series, count in sent.items() if count.bytes > 10_000}
        assert classes >= {(way, what) for way in ("transmit", "receive") for what in ("pod", "node", "internet")}
