"""What nodes find out about the cluster's ranges from a real kube-proxy and kubelet, and that agents count by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from clusterlab import plan
from clusterlab.agents import Agent
from clusterlab.cluster import Cluster
from clusterlab.experiment import Experiment
from clusterlab.hosts import Host, until
from clusterlab.node import KUBE_PROXY, Node

pytestmark = pytest.mark.cluster

_CONFIG = "/etc/netacct/ranges.yaml"

Found = dict[tuple[str, str], str]
"""Where each network was found, by network and class."""


@pytest.fixture(params=["iptables", "nftables"])
def mode(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """The mode of every node's kube-proxy."""
    for node in cluster.nodes:
        node.set_proxy_mode(request.param)
    yield request.param
    for node in cluster.nodes:
        node.set_proxy_mode(cluster.proxy_mode)


def found(host: Host, *providers: str) -> Found:
    """What these providers find on a host (all, where none is named), by `netacct check` with the default policy."""
    settings: dict[str, Any] = {"policy": "default"}
    if providers:
        settings["cluster_ranges"] = {"providers": list(providers)}
    host.write(_CONFIG, json.dumps(settings))
    checked = json.loads(Agent(host).command("check", "-o", "json", "--config.file", _CONFIG).stdout)
    return {(line["network"], line["traffic"]): line["because"] for line in checked["cluster_ranges"]}


def both(networks: plan.Pair, what: str) -> set[tuple[str, str]]:
    """Both families' networks with their class."""
    return {(network, what) for network in networks.values()}


def until_found(node: Node, expected: set[tuple[str, str]], *providers: str) -> Found:
    """What is found as soon as it is these networks: kube-proxy was restarted a moment ago, perhaps in another mode."""
    last: list[Found] = []

    def told() -> bool:
        last[:] = [found(node, *providers)]
        return set(last[0]) == expected

    until(told, 120, lambda: f"found {last}, not {expected}: {node.read_log(KUBE_PROXY)}")
    return last[0]


def test_nodes_find_pods_and_nodes(cluster: Cluster, mode: str) -> None:
    """Each node finds the pods' ranges in the file of its kube-proxy, and the nodes' subnets, in either mode."""
    del mode
    for node in cluster.nodes:
        seen = until_found(node, both(plan.PODS, "pod"), "kubernetes")
        path = node.folder / "kube-proxy.json"
        assert {seen[one] for one in both(plan.PODS, "pod")} == {f"found in {path} (clusterCIDR)"}
        assert set(found(node)) >= both(plan.PODS, "pod") | both(plan.HOSTS, "node")


def test_rules_of_kube_proxy_tell_what_its_file_does(cluster: Cluster, mode: str) -> None:
    """Without any file the rules name the pods; in mode nftables those of both families, and the Services."""
    expected = {(plan.PODS[4], "pod")}  # the Service `kubernetes`, whose rule it is, has one family
    if mode == "nftables":
        expected = both(plan.PODS, "pod") | both(plan.SERVICES, "service")
    for node in cluster.nodes:
        seen = until_found(node, expected, "rules")
        assert all(("KUBE-SVC-" in because) == (mode == "iptables") for because in seen.values())


def test_the_control_plane_tells_services(cluster: Cluster) -> None:
    """Where kube-apiserver and kube-controller-manager run, their command lines name Services and pods."""
    seen = found(cluster.control_plane, "kubernetes")
    assert set(seen) == both(plan.SERVICES, "service") | both(plan.PODS, "pod")
    assert {because.partition(" (")[0] for because in seen.values()} <= {
        "found in the command line of kube-apiserver",
        "found in the command line of kube-controller-manager",
    }


def test_agents_with_nothing_written_count_by_what_they_find(cluster: Cluster) -> None:
    """With the default policy, which has no CIDR of the cluster, every pod series of both nodes is exact."""
    for agent in cluster.agents:
        agent.stop()
        agent.start(policy="default")
    try:
        since = cluster.measure()
        with Experiment(cluster) as experiment:
            experiment.run("ranges")
            cluster.assert_exact(since)
        node, other = cluster.nodes[0], cluster.nodes[1]
        explained = json.loads(
            Agent(node).command("rules", "explain", plan.pod_gateway(other.number)[4], "-o", "json").stdout
        )
        assert (explained["traffic"], explained["prefix"]) == ("pod", plan.PODS[4])
        assert explained["because"] == f"found in {node.folder / 'kube-proxy.json'} (clusterCIDR)"
    finally:
        for agent in cluster.agents:
            agent.stop()
            agent.start()
