"""The lab itself: what a reboot keeps, and that the comparison sees what is wrong."""

from __future__ import annotations

import pytest
from clusterlab import cgroups, manifests, plan, traffic
from clusterlab.classes import Series
from clusterlab.cluster import Cluster
from clusterlab.node import KUBE_PROXY
from clusterlab.truth import Count

pytestmark = pytest.mark.cluster

_PORT = 7000


def test_a_reboot_keeps_the_disk_and_nothing_else(cluster: Cluster) -> None:
    """After a reboot files of /etc are there, those of /run are not, and the node's pods run again, exactly counted."""
    node = cluster.nodes[0]
    cluster.namespace("reboot")
    server = manifests.container(traffic.SERVER, "serve", str(_PORT), port=_PORT)
    cluster.apply(manifests.deployment("reboot", "web", manifests.pod_spec(server, node=node.name)))
    (before,) = cluster.wait_pods("reboot", 1)
    since = cluster.measure()
    node.write("/etc/kept", "disk")
    node.write("/run/lost", "memory")
    started = before["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]

    node.reboot()

    assert node.path("/etc/kept").read_text(encoding="ascii") == "disk"
    assert not node.path("/run/lost").exists()
    cluster.wait(lambda: cluster.get("pods", "reboot")[0]["status"]["containerStatuses"][0]["restartCount"] == 1)
    (after,) = cluster.wait_pods("reboot", 1)
    assert after["status"]["containerStatuses"][0]["state"]["running"]["startedAt"] > started
    cluster.agents[0].wait()
    for family in plan.FAMILIES:
        address = traffic.pod_address(after, family)
        node.run([str(cluster.traffic), *traffic.udp(address, _PORT).split()[1:]])
    assert before["metadata"]["uid"] in {pod.uid for pod in node.truth.read()}
    cluster.assert_exact(since)
    cluster.delete_namespace("reboot")


def test_a_byte_too_few_is_seen(cluster: Cluster) -> None:
    """A series that lacks what a pod sent is a difference, named with both figures."""
    cluster.namespace("seen")
    cluster.apply(manifests.pod("seen", "sender", manifests.pod_spec(manifests.container())))
    (pod,) = cluster.wait_pods("seen", 1)
    node = cluster.node_of(pod)
    agent = cluster.agents[cluster.nodes.index(node)]
    cluster.serve_traffic([cluster.internet], _PORT)
    since = cluster.measure()
    agent.stop()  # and with it goes who would repair the rules
    node.run(["nft", "delete", "table", "ip", "netacct"])
    cluster.exec("seen", "sender", *traffic.udp(plan.INTERNET[4], _PORT, 10, 500, 300).split())
    agent.start()

    rows = [(row.series, row.sent, row.counted) for row in cluster.differences(since)]

    cluster.internet.stop("receivers")
    cluster.delete_namespace("seen")
    assert rows == [
        (Series("seen", "sender", "receive", "internet"), Count(10 * 328, 10), Count(0, 0)),
        (Series("seen", "sender", "transmit", "internet"), Count(10 * 528, 10), Count(0, 0)),
    ]


def test_two_clusters_at_once(cluster: Cluster) -> None:
    """A second cluster comes up beside the first, with kube-proxy by nftables, and leaves no cgroup behind."""
    with Cluster(f"{cluster.prefix}b", nodes=1, proxy_mode="nftables") as other:
        (node,) = other.get("nodes")
        assert node["metadata"]["name"] == "node1"
        assert other.nodes[0].runs(KUBE_PROXY)
        tables = other.nodes[0].run(["nft", "list", "tables"]).stdout
        assert "table ip kube-proxy" in tables
        names = [other.nodes[0].cgroup, cluster.nodes[0].cgroup]
        assert all((root / name).exists() for root in cgroups.hierarchies() for name in names)
    assert not any((root / names[0]).exists() for root in cgroups.hierarchies())
    assert not other.work.exists()
    assert cluster.get("nodes")
