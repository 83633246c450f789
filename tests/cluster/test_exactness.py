"""Exact to the byte: pods of every kind, every kind of peer, both families, in both modes of kube-proxy.

One run per mode, which the tests of this file judge from all sides: the pods' own counters and sockets, the node's,
the kubelet's cAdvisor, the API server's audit log, and the run itself, booked again by the word of one source alone.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from clusterlab import classes, host_truth, mixture, plan, recorder, replay, traffic
from clusterlab.agents import UNATTRIBUTED
from clusterlab.classes import Totals
from clusterlab.cluster import Cluster, Measurement
from clusterlab.control_plane import AUDIT_LOG
from clusterlab.host_truth import Bounds, HostTotals
from clusterlab.node import Node
from clusterlab.truth import Count, Flows, PodId

from netacct import clock
from netacct.demo import exposition

pytestmark = pytest.mark.cluster

_SOURCES = ("cni", "kubelet-pods-api", "kubelet", "cri")
_LINK_HEADER = 14
_CHATTER = Count(4096, 48)
"""What a pod's interface may carry besides what is counted: ARP, neighbour and router discovery, MLD."""
_HOUSEKEEPING = 120.0
"""Seconds by which cAdvisor has looked at each pod again, also on a slow machine."""
_NOTHING = Count(0, 0)
_IPTABLES = {"iptables": "legacy", "nftables": "nft"}
"""The kind of iptables(8) on the nodes, by the mode of kube-proxy."""
_ASK = """
import ssl, sys, urllib.request
urllib.request.urlopen(sys.argv[1], context=ssl.create_default_context(cafile=sys.argv[2]))
"""


@dataclass
class Run:
    """What a run left to be judged.

    Attributes:
        mode: of kube-proxy.
        before, after: measurements around it.
        begin, end: when the first was made, and when all was over (CLOCK_BOOTTIME seconds).
        flows: what each pod sent and received, by node.
        pods: all of them as the API server has them, by namespace and name.
        pages: of metrics, by node, read when nothing was sent any more.
        host: bounds of what was added to the host's totals, by node; `host_counted` is what agents added.
        listed: what `netacct pods` says, by node.
        link: what cAdvisor counted, by namespace, pod and direction.
        records: of the agents, by node.
    """

    mode: str
    before: Measurement
    after: Measurement
    begin: float
    end: float
    flows: dict[str, dict[PodId, Flows]]
    pods: dict[tuple[str, str], dict[str, Any]]
    pages: dict[str, str]
    host: dict[str, Bounds]
    host_counted: dict[str, HostTotals]
    listed: dict[str, list[dict[str, Any]]]
    link: dict[tuple[str, str, str], Count]
    records: dict[str, Path]

    def sent(self, node: str) -> Totals:
        """What the pods of a node sent and received in this run."""
        return classes.since(self.after.sent[node], self.before.sent[node])

    def counted(self, node: str) -> Totals:
        """What its agent counted in this run."""
        return classes.since(self.after.counted[node], self.before.counted[node])


@pytest.fixture(scope="module", params=["iptables", "nftables"])
def run(cluster: Cluster, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run with kube-proxy in one of its modes, agents by `auto`, which record it."""
    folder = tmp_path_factory.mktemp("records")
    records = {node.name: folder / node.name for node in cluster.nodes}
    _restart(cluster, request.param, records)
    with contextlib.ExitStack() as stack:
        stack.callback(_restart, cluster, cluster.proxy_mode, {})
        for node in cluster.nodes:
            stack.enter_context(host_truth.metered(node))
        before, host_before, host_pages = cluster.measure(), *_look_at_hosts(cluster)
        begin = clock.now()
        with mixture.Mixture(cluster) as running:
            pods = running.run(f"run-{request.param}")
            flows, after, host_after, pages = _look_at_all(cluster)
            found = Run(
                mode=request.param,
                before=before,
                after=after,
                begin=begin,
                flows=flows,
                pods={(pod["metadata"]["namespace"], pod["metadata"]["name"]): pod for pod in pods},
                pages=pages,
                host={name: host_truth.since(host_after[name], host_before[name]) for name in pages},
                host_counted={name: host_truth.added(_host(pages[name]), _host(host_pages[name])) for name in pages},
                listed={node.name: agent.pods() for node, agent in zip(cluster.nodes, cluster.agents, strict=True)},
                link=_link_bytes(cluster, flows),
                records=records,
                end=clock.now(),
            )
            time.sleep(1.5 * recorder.POLL)  # whoever asks every so often has asked once more
            found.end = clock.now()
            yield found


def _restart(cluster: Cluster, mode: str, records: dict[str, Path]) -> None:
    """Start the agents anew when kube-proxy is in this mode, with a record or without.

    Where it works by iptables, so does everybody, and by the legacy kind; else everything is in nftables.
    """
    for node, agent in zip(cluster.nodes, cluster.agents, strict=True):
        if agent.runs:
            agent.stop()
        node.set_proxy_mode(mode)
        node.set_iptables(_IPTABLES[mode] if records else "nft")
        agent.start(program=_recording(cluster, node, records[node.name]) if records else ())


def _recording(cluster: Cluster, node: Node, record: Path) -> list[str]:
    path = cluster.pki.path
    access = {
        "url": f"https://{node.addresses[4]}:10250",
        "ca_file": path("ca.crt"),
        "certificate_file": path("admin.crt"),
        "key_file": path("admin.key"),
    }
    # -P: the folder of the program is no place to import from
    return [sys.executable, "-P", recorder.__file__, str(record), json.dumps(access)]


def _look_at_all(
    cluster: Cluster,
) -> tuple[dict[str, dict[PodId, Flows]], Measurement, dict[str, Bounds], dict[str, str]]:
    """What pods sent, what agents show, and `_look_at_hosts`, during which no pod sent anything."""
    while True:
        flows = cluster.settled_truth()
        measured, (bounds, pages) = cluster.measure(), _look_at_hosts(cluster)
        if cluster.truth() == flows:  # else a neighbour was asked after, some seconds after the last packet
            return flows, measured, bounds, pages


def _look_at_hosts(cluster: Cluster) -> tuple[dict[str, Bounds], dict[str, str]]:
    """A page of metrics of each agent, and between what the host's totals lay at that moment."""
    bounds, pages = {}, {}
    for node, agent in zip(cluster.nodes, cluster.agents, strict=True):
        time.sleep(1.1)  # a reading younger than a second would be shared
        low = host_truth.read(node)
        pages[node.name] = agent.page()
        bounds[node.name] = Bounds(low, host_truth.read(node))
    return bounds, pages


def _host(page: str) -> HostTotals:
    return {
        (series.direction, series.traffic): count.bytes
        for series, count in exposition.totals(page).items()
        if series.level == "host"
    }


def _link_bytes(cluster: Cluster, flows: dict[str, dict[PodId, Flows]]) -> dict[tuple[str, str, str], Count]:
    """What cAdvisor says of each pod, when it has looked at all of them since they were quiet."""
    end = time.monotonic() + _HOUSEKEEPING
    expected = _expected_on_link(flows)
    while True:
        found: dict[tuple[str, str, str], Count] = {}
        for node in cluster.nodes:
            found |= _cadvisor(cluster.kubectl("get", "--raw", f"/api/v1/nodes/{node.name}/proxy/metrics/cadvisor"))
        if time.monotonic() > end or all(count.packets >= expected[key].packets for key, count in found.items()):
            return found
        time.sleep(1)


def _cadvisor(page: str) -> dict[tuple[str, str, str], Count]:
    found: dict[tuple[str, str, str], Count] = {}
    for name, labels, value in exposition.samples(page):
        _, _, what = name.partition("container_network_")
        direction, _, unit = what.removesuffix("_total").partition("_")
        if labels.get("namespace") not in mixture.NAMESPACES or labels.get("interface") != "eth0":
            continue
        if unit in ("bytes", "packets"):
            key = labels["namespace"], labels["pod"], direction
            part = Count(int(value), 0) if unit == "bytes" else Count(0, int(value))
            found[key] = found.get(key, _NOTHING).plus(part)
    return found


def _expected_on_link(flows: dict[str, dict[PodId, Flows]]) -> dict[tuple[str, str, str], Count]:
    found: dict[tuple[str, str, str], Count] = {}
    for several in flows.values():
        for pod, its in several.items():
            for flow, count in its.items():
                key = pod.namespace, pod.name, flow.direction
                part = Count(count.bytes + _LINK_HEADER * count.packets, count.packets)
                found[key] = found.get(key, _NOTHING).plus(part)
    return found


def test_every_pod_series_is_exact(run: Run) -> None:
    """Every pod series of both agents is what the pods' own counters saw, nothing is left, and no class is missing."""
    rows = [row for node in run.pages for row in classes.differences(node, run.sent(node), run.counted(node))]
    assert not rows, f"{len(rows)} series differ:\n{classes.table(rows)}"
    seen = {(series.direction, series.traffic) for node in run.pages for series in run.counted(node)}
    assert seen >= {(way, what) for way in ("transmit", "receive") for what in ("pod", "node", "internet")}
    assert seen >= {("transmit", "service"), ("transmit", "private")}


def test_the_datapath_is_that_of_kube_proxy(run: Run) -> None:
    """By `auto` agents count as kube-proxy works: by iptables or by nftables."""
    assert {exposition.datapath(page) for page in run.pages.values()} == {run.mode}


def test_udp_is_what_sockets_saw(cluster: Cluster, run: Run) -> None:
    """What the sockets of a pod sent and received by UDP is what its agent's counters are compared with."""
    flows = {(pod.namespace, pod.name): its for several in run.flows.values() for pod, its in several.items()}
    compared = 0
    for (namespace, name), pod in run.pods.items():
        if pod["spec"].get("hostNetwork"):
            continue
        said = traffic.exchanges(cluster.kubectl("logs", "-n", namespace, name))
        seen = [each for each in said if each.protocol == "udp"]
        assert _by_udp(flows[namespace, name]) == _on_wire(
            seen, client=pod["metadata"]["labels"]["app"] not in mixture.SERVERS
        ), name
        compared += 1
    assert compared > 3 * len(run.pages)


def _by_udp(flows: Flows) -> tuple[int, int]:
    """Bytes sent and received by UDP."""
    sums = {"transmit": 0, "receive": 0}
    for flow, count in flows.items():
        sums[flow.direction] += count.bytes if flow.protocol == "udp" else 0
    return sums["transmit"], sums["receive"]


def _on_wire(seen: list[traffic.Exchange], *, client: bool) -> tuple[int, int]:
    """The same by what sockets saw: clients send datagrams of one size, servers answer of another."""
    sizes = (mixture.SIZE, mixture.REPLY) if client else (mixture.REPLY, mixture.SIZE)
    sent = received = 0
    for each in seen:
        header = traffic.HEADERS[traffic.family(each.peer)]
        sent += each.sent + header * (each.sent // sizes[0])
        received += each.received + header * (each.received // sizes[1])
    return sent, received


def test_levels_sum_to_the_same(run: Run) -> None:
    """Of each direction and class, namespaces, workloads and pods sum to the same, in bytes and in packets."""
    for page in run.pages.values():
        sums: dict[str, dict[tuple[str, str, str], Count]] = {"pod": {}, "workload": {}, "namespace": {}}
        for series, count in exposition.totals(page).items():
            if series.level in sums:
                key = series.namespace, series.direction, series.traffic
                sums[series.level][key] = sums[series.level].get(key, _NOTHING).plus(Count(*count))
        assert sums["workload"] == sums["pod"]
        assert sums["namespace"] == sums["pod"]
        assert sums["pod"]


def test_workloads_are_exact(run: Run) -> None:
    """A Deployment, StatefulSet, DaemonSet, Job, CronJob and static pod have what their pods on the node sent."""
    for node, page in run.pages.items():
        expected: dict[tuple[str, str, str, str], Count] = {}
        for series, count in run.sent(node).items():
            kind, name = mixture.workload(run.pods[series.namespace, series.pod])
            key = series.namespace, f"{kind}/{name}", series.direction, series.traffic
            expected[key] = expected.get(key, _NOTHING).plus(count)
        counted = {
            (series.namespace, series.name, series.direction, series.traffic): Count(*count)
            for series, count in exposition.totals(page).items()
            if series.level == "workload"
        }
        assert {key: counted.get(key) for key in expected} == expected
    kinds = {mixture.workload(pod)[0] for pod in run.pods.values()}
    assert kinds == {"Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob", "Pod"}


def test_host_series_are_bounded(run: Run) -> None:
    """What each node's own sockets sent and received, by class, is what the host's series grew by."""
    for node, bounds in run.host.items():
        assert host_truth.outside(run.host_counted[node], bounds) == {}, node
        assert {("transmit", "pod"), ("receive", "pod"), ("transmit", "node")} <= run.host_counted[node].keys()


def test_cadvisor_agrees(run: Run) -> None:
    """The kubelet's cAdvisor has the counted bytes of each pod, 14 more for each packet, and the link's own chatter."""
    counted: dict[tuple[str, str, str], Count] = {}
    for page in run.pages.values():
        for series, count in exposition.totals(page).items():
            key = series.namespace, series.name, series.direction
            if series.level == "pod" and key in run.link:
                on_link = Count(count.bytes + _LINK_HEADER * count.packets, count.packets)
                counted[key] = counted.get(key, _NOTHING).plus(on_link)
    beside = {
        key: Count(count.bytes - counted[key].bytes, count.packets - counted[key].packets)
        for key, count in run.link.items()
    }
    wrong = {
        key: count
        for key, count in beside.items()
        if not (0 <= count.bytes <= _CHATTER.bytes and 0 <= count.packets <= _CHATTER.packets)
    }
    assert not wrong
    pods = {key[:2] for key in beside}
    alive = {
        key
        for key, pod in run.pods.items()
        if pod["status"]["phase"] == "Running" and not pod["spec"].get("hostNetwork")
    }
    assert pods == alive


def test_pods_are_listed(run: Run) -> None:
    """`netacct pods` lists each pod of its node that runs: namespace, name, workload, addresses, and who told it."""
    for node, listed in run.listed.items():
        expected = {}
        for (namespace, name), pod in run.pods.items():
            if (
                pod["spec"]["nodeName"] == node
                and pod["status"]["phase"] == "Running"
                and not pod["spec"].get("hostNetwork")
            ):
                addresses = {each["ip"] for each in pod["status"]["podIPs"]}
                expected[namespace, name] = (*mixture.workload(pod), addresses, ["cni", "kubelet-pods-api"])
        shown = {
            (pod["namespace"], pod["pod"]): (
                pod["workload_kind"],
                pod["workload"],
                set(pod["addresses"]),
                pod["sources"],
            )
            for pod in listed
            if pod["namespace"] in mixture.NAMESPACES
        }
        assert shown == expected


@pytest.mark.parametrize("source", _SOURCES)
def test_each_source_alone(run: Run, source: str, tmp_path: Path) -> None:
    """By the word of one source alone a pod that it saw is exact, one that it never saw is `unattributed`."""
    missed = 0
    for node, record in run.records.items():
        folder = tmp_path / node
        folder.mkdir()
        found = replay.replay(record, source, folder, run.begin)
        expected: Totals = {}
        for series, count in run.sent(node).items():
            known = (series.namespace, series.pod) in found.seen
            missed += not known
            key = series if known else series._replace(namespace="", pod=UNATTRIBUTED)
            expected[key] = expected.get(key, _NOTHING).plus(count)
        rows = classes.differences(node, expected, found.counted)
        assert not rows, f"{len(rows)} series differ:\n{classes.table(rows)}"
    assert source != "cni" or not missed


def test_no_pod_is_too_brief_for_cni(run: Run) -> None:
    """CNI sees each pod that lives for a second; whether one who asks every few seconds does is chance."""
    brief = {key for key, pod in run.pods.items() if "wave" in pod["metadata"]["labels"]}
    seen = {
        (each.pod.namespace, each.pod.name)
        for record in run.records.values()
        for _, each in replay.said_by(record, "cni")
        if each.present
    }
    assert brief
    assert brief <= seen


def test_the_api_server_is_never_asked(cluster: Cluster, run: Run) -> None:
    """During the run nobody but kubelet and kube-proxy of a node asks the API server, by its own audit log."""
    node = cluster.nodes[0]
    url = f"https://{plan.CONTROL_PLANE[4]}:{plan.API_PORT}/version"
    node.run([sys.executable, "-c", _ASK, url, cluster.pki.path("ca.crt")], check=False)
    addresses = {address for each in cluster.nodes for address in each.addresses.values()}
    asked: dict[bool, set[str]] = {True: set(), False: set()}
    for line in cluster.control_plane.path(AUDIT_LOG).read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if not addresses.isdisjoint(event["sourceIPs"]):
            at = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
            during = clock.to_wall(run.begin) <= at <= clock.to_wall(run.end)
            asked[during].add(event.get("userAgent", "").partition("/")[0])
    assert "kubelet" in asked[True]
    assert asked[True] <= {"kubelet", "kube-proxy"}
    assert "Python-urllib" in asked[False], "the log does not show who else asks from a node"
