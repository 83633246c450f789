"""hostNetwork pods told apart by the cgroups that a real kubelet makes; and what finds no series of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from clusterlab import classes, manifests, plan, traffic
from clusterlab.agents import CONFIG, Agent
from clusterlab.classes import Series, Totals
from clusterlab.cluster import Cluster
from clusterlab.node import RECEIVERS, Node
from clusterlab.truth import Count

from netacct.demo import exposition

pytestmark = pytest.mark.cluster

_NAMESPACE = "host-pods"
_PORT, _HOST_PORT = 7000, 7300
_COUNT, _SIZE, _REPLY = 20, 500, 300
_NOTHING = Count(0, 0)


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Node]:
    """A node whose agent a test starts anew with settings; afterwards it runs as before."""
    found, agent = cluster.nodes[0], cluster.agents[0]
    cluster.namespace(_NAMESPACE)
    cluster.serve_traffic([cluster.internet], _PORT)
    yield found
    cluster.internet.stop(RECEIVERS)
    cluster.delete_namespace(_NAMESPACE)
    agent.stop()
    agent.start()


def _pods(cluster: Cluster, **specs: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Make pods, and wait until they run."""
    cluster.apply([manifests.pod(_NAMESPACE, name, spec) for name, spec in specs.items()])
    return {pod["metadata"]["name"]: pod for pod in cluster.wait_pods(_NAMESPACE, len(specs))}


def _udp(cluster: Cluster, pod: str, address: str, port: int) -> None:
    cluster.exec(_NAMESPACE, pod, *traffic.udp(address, port, _COUNT, _SIZE, _REPLY).split())


def _count(payload: int, *families: int) -> Count:
    """The bytes and packets of an exchange's one direction in each of these families."""
    return Count(sum(_COUNT * (payload + traffic.HEADERS[family]) for family in families), _COUNT * len(families))


def _restart(agent: Agent, **settings: Any) -> None:
    agent.stop()
    agent.start(**settings)


def test_host_network_pods_are_told_apart(cluster: Cluster, node: Node) -> None:
    """What sockets of a hostNetwork pod send and receive by UDP is the pod's, to the byte, and not the host's."""
    agent, other = cluster.agents[0], cluster.nodes[1]
    _restart(agent, host_pods="cgroup")
    serving = manifests.container(traffic.SERVER, "serve", str(_PORT), port=_PORT)
    host_serving = manifests.container(traffic.SERVER, "serve", str(_HOST_PORT), port=_HOST_PORT)
    pods = _pods(
        cluster,
        client=manifests.pod_spec(manifests.container(), node=node.name, hostNetwork=True),
        server=manifests.pod_spec(host_serving, node=node.name, hostNetwork=True),
        near=manifests.pod_spec(serving, node=node.name),
        far=manifests.pod_spec(serving, node=other.name),
    )
    cluster.wait(
        lambda: {"client", "server", "near"} <= {pod["pod"] for pod in agent.pods()}, complaint="pods are unknown"
    )
    shown = {pod["pod"]: pod["addresses"] for pod in agent.pods()}
    since = cluster.measure()

    for family in plan.FAMILIES:
        for peer in ("near", "far"):
            _udp(cluster, "client", traffic.pod_address(pods[peer], family), _PORT)
            _udp(cluster, peer, node.addresses[family], _HOST_PORT)
        _udp(cluster, "client", plan.INTERNET[family], _PORT)
    now = cluster.measure()

    counted = classes.since(now.counted[node.name], since.counted[node.name])
    sent = classes.since(now.sent[node.name], since.sent[node.name])
    assert not classes.differences(node.name, sent, {key: value for key, value in counted.items() if key in sent})
    ways = {"transmit": (_SIZE, _REPLY), "receive": (_REPLY, _SIZE)}
    expected: Totals = {}
    for way, (client, server) in ways.items():
        # `near` and `far` are two pods
        expected[Series(_NAMESPACE, "client", way, "pod")] = _count(client, 4, 6, 4, 6)
        expected[Series(_NAMESPACE, "client", way, "internet")] = _count(client, 4, 6)
        expected[Series(_NAMESPACE, "server", way, "pod")] = _count(server, 4, 6, 4, 6)
    assert {key: value for key, value in counted.items() if key not in sent} == expected
    assert shown["client"][0].startswith("cgroup:")
    assert shown["client"] != shown["server"]


def test_what_has_no_series_of_its_own(cluster: Cluster, node: Node) -> None:
    """Pods beyond the most series share `__other__` of their namespace, and all levels sum to the same still."""
    agent = cluster.agents[0]
    most = len({(one["namespace"], one["pod"]) for one in agent.pods()}) + 1
    _restart(agent, metrics={**CONFIG["metrics"], "max_pod_series": most})
    spec = manifests.pod_spec(manifests.container(), node=node.name)
    names = [f"p{number}" for number in range(4)]
    _pods(cluster, **dict.fromkeys(names, spec))
    since = cluster.measure()

    for name in names:
        _udp(cluster, name, plan.INTERNET[4], _PORT)

    counted = classes.since(cluster.measure().counted[node.name], since.counted[node.name])
    shown = {series.pod for series in counted}
    assert "__other__" in shown
    assert {sum(count.bytes for key, count in counted.items() if key.direction == "transmit")} == {
        len(names) * _count(_SIZE, 4).bytes
    }
    sums: dict[str, dict[tuple[str, str, str], Count]] = {"pod": {}, "workload": {}, "namespace": {}}
    for series, count in exposition.totals(agent.page()).items():
        if series.level in sums:
            key = series.namespace, series.direction, series.traffic
            sums[series.level][key] = sums[series.level].get(key, _NOTHING).plus(Count(*count))
    assert sums["pod"] == sums["workload"] == sums["namespace"]
