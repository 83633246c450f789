"""What is stopped, killed, changed and rebooted on a node of a real cluster while pods send; the books stay exact."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from clusterlab import classes, manifests, plan, traffic
from clusterlab.agents import SERVICE, UNATTRIBUTED, Agent
from clusterlab.classes import Difference, Totals
from clusterlab.cluster import Cluster
from clusterlab.control_plane import API_SERVER
from clusterlab.hosts import HostError, until
from clusterlab.node import CONTAINERD, KUBE_PROXY, KUBELET, RECEIVERS, STATIC_PODS, Node
from clusterlab.truth import Count, Flows

from netacct.demo import exposition

pytestmark = pytest.mark.cluster

_NAMESPACE = "busy"
_PORT, _INTERNET_PORT = 7000, 7200
_SIZE, _REPLY = 400, 200
_DATAGRAMS = 5
_FOLDER = "/run/flow"
_RESULTS = "/var/lib/cni/results"
_ADDRESSES = "/var/lib/cni/networks/pods"
_PATIENCE = 90.0
_TILL_ANSWERED = "OnFailure"
"""A sender starts anew in its sandbox where no answer came: a Service is nobody's while its nodes are not Ready."""
_UP, _START = "netacct_identity_source_up", "netacct_accounting_start_timestamp_seconds"
Pod = dict[str, Any]
Target = tuple[str, int]


class Busy:
    """A server and a client on each node; clients send to the node's targets while these are written down."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def begin(self) -> None:
        """Start the pods, a service, and a receiver on the internet host."""
        cluster = self.cluster
        cluster.internet.serve(RECEIVERS, [str(cluster.traffic), "serve", str(_INTERNET_PORT)])
        cluster.namespace(_NAMESPACE)
        server = manifests.container(traffic.SERVER, "serve", str(_PORT), port=_PORT)
        servers = [
            manifests.pod(_NAMESPACE, f"server-{node.name}", _placed(server, node), app="server")
            for node in cluster.nodes
        ]
        cluster.apply([manifests.service(_NAMESPACE, "server", _PORT), *servers])
        for node in cluster.nodes:
            self.clients("client", f"client-{node.name}", node=node)
        self.find()

    def end(self) -> None:
        """Take all of it away."""
        self.rest()
        self.cluster.delete_namespace(_NAMESPACE)
        self.cluster.internet.stop(RECEIVERS)

    def find(self) -> None:
        """Find out which addresses servers have now."""
        servers = self.cluster.wait_pods(_NAMESPACE, len(self.cluster.nodes), "app=server")
        self.cluster.wait_pods(_NAMESPACE, len(self.cluster.nodes), "app=client")
        self.servers = {pod["spec"]["nodeName"]: pod for pod in servers}
        (service,) = self.cluster.get("services", _NAMESPACE)
        self.service: list[str] = service["spec"]["clusterIPs"]

    def targets(self, *servers_of: Node) -> list[Target]:
        """The servers of these nodes, and the internet host."""
        servers = [self.servers[node.name] for node in servers_of]
        pods = [(traffic.pod_address(server, family), _PORT) for server in servers for family in plan.FAMILIES]
        return [*pods, *((address, _INTERNET_PORT) for address in plan.INTERNET.values())]

    def everything(self) -> list[Target]:
        """The servers of all nodes, their service, and the internet host."""
        return [*self.targets(*self.cluster.nodes), *((address, _PORT) for address in self.service)]

    def send(self, node: Node, targets: Iterable[Target]) -> None:
        """Let the client of a node send to these from now on."""
        node.path(_FOLDER).mkdir(exist_ok=True)
        node.write(f"{_FOLDER}/targets", traffic.targets_text(targets))

    def rest(self) -> None:
        """Let all clients be silent."""
        for node in self.cluster.nodes:
            node.path(f"{_FOLDER}/targets").unlink(missing_ok=True)

    @contextlib.contextmanager
    def flowing(self, *nodes: Node) -> Iterator[None]:
        """Clients send to everything, before, throughout and after the block, and their answers come."""
        for node in nodes or self.cluster.nodes:
            self.send(node, self.everything())
        self.until_it_flows(*nodes)
        yield
        self.until_it_flows(*nodes)
        self.rest()

    def until_it_flows(self, *nodes: Node) -> None:
        """Wait until each client has sent to each target, and got answers, from now on."""
        for node in nodes or self.cluster.nodes:
            missing = partial(self._missing, node, self._packets(node))
            _until(f"nothing flows on {node.name}", lambda still: not still(), missing)

    def _missing(self, node: Node, before: dict[tuple[str, str], int]) -> set[tuple[str, str]]:
        """Directions and peers of which the node's client has no more packets than before."""
        now = self._packets(node)
        wanted = {(way, peer) for way in ("transmit", "receive") for peer, _ in self.everything()}
        return {way for way in wanted if now.get(way, 0) <= before.get(way, 0)}

    def _packets(self, node: Node) -> dict[tuple[str, str], int]:
        """Packets of the node's client, by direction and peer."""
        sums: dict[tuple[str, str], int] = {}
        for flow, count in self.client_flows(node).items():
            if flow.protocol == "udp":
                way = (flow.direction, flow.peer)
                sums[way] = sums.get(way, 0) + count.packets
        return sums

    def client_flows(self, node: Node) -> Flows:
        """What the client of a node sent and received, in this boot of the node."""
        found = [flows for pod, flows in node.truth.read().items() if pod.name == f"client-{node.name}"]
        return found[0] if found else {}

    def clients(self, app: str, *names: str, node: Node) -> None:
        """Make pods on a node that send to its targets while these are written down."""
        client = manifests.container(*traffic.flow("/flow/targets", _SIZE, _REPLY))
        client["volumeMounts"] = [{"name": "flow", "mountPath": "/flow"}]
        volume = {"name": "flow", "hostPath": {"path": _FOLDER, "type": "DirectoryOrCreate"}}
        spec = _placed(client, node, volumes=[volume])
        self.cluster.apply([manifests.pod(_NAMESPACE, name, spec, app=app) for name in names])

    def senders(self, app: str, *nodes: Node, also: str = "") -> None:
        """Make a pod APP-NODE on each of the nodes (on the first one another of this name) that sends to everything."""
        made = [manifests.pod(_NAMESPACE, f"{app}-{node.name}", self._sender(node), app=app) for node in nodes]
        if also:
            made.append(manifests.pod(_NAMESPACE, also, self._sender(nodes[0]), app=app))
        self.cluster.apply(made)

    def until_sent(self, app: str, *nodes: Node) -> None:
        """Wait until these pods have done so, and delete them."""
        self.ended(app, *nodes)
        self.delete(app)

    def ended(self, app: str, *nodes: Node, number: int = 0) -> list[Pod]:
        """Wait until so many (else one for each node) of these pods have succeeded; kubelets of the nodes shall run."""
        _until(f"{app} has not ended", lambda: _revive(*nodes) and len(self._succeeded(app)) >= (number or len(nodes)))
        return self._succeeded(app)

    def _succeeded(self, app: str) -> list[Pod]:
        pods = self.cluster.get("pods", _NAMESPACE, f"app={app}")
        return [pod for pod in pods if pod["status"]["phase"] == "Succeeded"]

    def delete(self, app: str) -> None:
        """Delete pods, and wait until they are gone."""
        self.cluster.kubectl("delete", "pods", "-n", _NAMESPACE, "-l", f"app={app}", "--now")

    def _sender(self, node: Node) -> manifests.Manifest:
        return _placed(manifests.container(*self.script()), node, restartPolicy=_TILL_ANSWERED)

    def script(self) -> tuple[str, ...]:
        """A container's command: a known amount to everything, then the end; it fails where an answer did not come."""
        return traffic.script(traffic.udp(*target, count=_DATAGRAMS) for target in self.everything())


def _placed(container: manifests.Manifest, node: Node, **settings: Any) -> manifests.Manifest:
    """The spec of a pod that is bound to a node without the scheduler, which shuns a node without its kubelet."""
    return {**manifests.pod_spec(container, **settings), "nodeName": node.name}


@pytest.fixture(scope="module")
def busy(cluster: Cluster) -> Iterator[Busy]:
    """Servers and clients on both nodes; nothing flows yet."""
    made = Busy(cluster)
    made.begin()
    yield made
    made.end()


@pytest.fixture(autouse=True)
def _silent(busy: Busy) -> Iterator[None]:
    """What a test that failed let flow is no trouble for the next one."""
    yield
    busy.rest()


def metrics(agent: Agent, name: str) -> dict[str, float]:
    """The samples of a metric, by the value of its only label ("" where it has none)."""
    found = (sample for sample in exposition.samples(agent.page()) if sample[0] == name)
    return {next(iter(labels.values()), ""): value for _, labels, value in found}


def datapath(agent: Agent) -> str:
    """What counts on the agent's node."""
    (found,) = (labels for name, labels, _ in exposition.samples(agent.page()) if name == "netacct_build_info")
    return found["datapath"]


def assert_well(agents: Iterable[Agent]) -> None:
    """Rules are in sync and all sources up, within a minute; and no counter ever fell that nobody can explain."""
    for agent in agents:
        _until("an agent is not well", _is_well, agent)
        assert metrics(agent, "netacct_unexplained_resets_total") == {"": 0}


def _until(complaint: str, condition: Callable[..., object], *arguments: object) -> None:
    """Wait until a condition holds of these arguments."""
    until(partial(condition, *arguments), _PATIENCE, complaint)


def _revive(*nodes: Node) -> bool:
    """Start kubelets that have ended, as a service manager does: where cAdvisor cannot watch all cgroups they end.

    Clusters and containers of the whole machine make and remove cgroups. Returns True, to be one term of a condition.
    """
    for node in nodes:
        if not node.runs(KUBELET):
            node.start(KUBELET)
    return True


def _misses_kubelet(agent: Agent) -> bool:
    return metrics(agent, _UP)["kubelet-pods-api"] == 0


def _has_released(node: Node, ips: set[str]) -> bool:
    """Whether nobody holds these addresses any more; its kubelet shall run."""
    return _revive(node) and not held(node) & ips


def _is_well(agent: Agent) -> bool:
    up = metrics(agent, "netacct_identity_source_up")
    return (
        {"cni", "kubelet-pods-api"} <= set(up)
        and set(up.values()) == {1}
        and metrics(agent, "netacct_rules_in_sync") == {"": 1}
    )


def assert_known_size(busy: Busy, *nodes: Node) -> None:
    """Each datagram of the clients has the size that was asked for; so truth itself is what was sent."""
    for node in nodes:
        for flow, count in busy.client_flows(node).items():
            if flow.protocol == "udp":
                size = (_SIZE if flow.direction == "transmit" else _REPLY) + traffic.HEADERS[traffic.family(flow.peer)]
                assert count.bytes == count.packets * size, flow


def _is_told(node: Node, busy: Busy) -> bool:
    """Whether the API server knows the pods of a node as they run there now, and so their addresses."""
    mine = (pod for pod in busy.cluster.get("pods", _NAMESPACE) if pod["spec"]["nodeName"] == node.name)
    told = {one.get("containerID") for pod in mine for one in pod["status"]["containerStatuses"]}
    return told <= {f"containerd://{task}" for task in _tasks(node)}


def _leads_to_servers(node: Node, busy: Busy) -> bool:
    """Whether kube-proxy's rules of the mode iptables lead to the servers of now, and nowhere else."""
    rules = "".join(node.run([f"{tool}-save", "-t", "nat"]).stdout for tool in ("iptables", "ip6tables"))
    return set(re.findall(rf"--to-destination \[?([^] ]+?)\]?:{_PORT}\b", rules)) == addresses(busy.servers.values())


def names(busy: Busy) -> set[str]:
    """The pods that the API server knows."""
    return {pod["metadata"]["name"] for pod in busy.cluster.get("pods", _NAMESPACE)}


def held(node: Node) -> set[str]:
    """The addresses that the node's IPAM has given away."""
    return {path.name for path in node.path(_ADDRESSES).iterdir() if path.name[0].isdigit() or ":" in path.name}


def addresses(pods: Iterable[Pod]) -> set[str]:
    """The addresses of pods, both families."""
    return {traffic.pod_address(pod, family) for pod in pods for family in plan.FAMILIES}


def give_again(node: Node, wanted: set[str]) -> None:
    """Let the node's IPAM, which goes round in its ranges, come to these addresses next (host-local's own files)."""
    for number, family in enumerate(plan.FAMILIES):
        first = min(ipaddress.ip_address(each) for each in wanted if traffic.family(each) == family)
        node.write(f"{_ADDRESSES}/last_reserved_ip.{number}", str(first - 1))


@pytest.mark.parametrize("service", [KUBELET, CONTAINERD, KUBE_PROXY])
def test_a_service_of_the_nodes_is_stopped_and_started(cluster: Cluster, busy: Busy, service: str) -> None:
    """While one service of each node is away, by SIGTERM or SIGKILL, and pods are made, all is counted exactly."""
    one, two = cluster.nodes
    since = cluster.measure()
    with busy.flowing():
        one.stop(service, signal.SIGTERM)
        two.stop(service, signal.SIGKILL)
        busy.senders("late", one, two)
        if service == KUBE_PROXY:  # the others are needed to start pods, and to end them
            busy.until_sent("late", one, two)
        if service == KUBELET:
            for agent in cluster.agents:
                _until("nobody misses the kubelet", _misses_kubelet, agent)
        busy.until_it_flows()
        one.start(service)
        two.start(service)
        if service != KUBE_PROXY:
            busy.until_sent("late", one, two)
    cluster.assert_exact(since)
    assert_well(cluster.agents)
    assert_known_size(busy, one, two)


def test_the_api_server_is_stopped_and_started(cluster: Cluster, busy: Busy) -> None:
    """While the API server is away, by SIGKILL and by SIGTERM, static pods come and go, and all is counted exactly."""
    since = cluster.measure()
    for end in (signal.SIGKILL, signal.SIGTERM):
        with busy.flowing():
            with contextlib.suppress(HostError):  # open watches keep it for a minute, so after SIGTERM comes SIGKILL
                cluster.control_plane.stop(API_SERVER, end, patience=3)
            assert not cluster.control_plane.runs(API_SERVER)
            _static_pods(busy, f"static-{end.name.lower()}")
            cluster.control_plane.start(API_SERVER)
            cluster.control_plane.wait_api()
    cluster.wait_ready()
    cluster.assert_exact(since)
    assert_well(cluster.agents)


def _static_pods(busy: Busy, name: str) -> None:
    """A static pod on each node sends what it shall, ends, and is removed."""
    nodes = busy.cluster.nodes
    before = {node.name: held(node) for node in nodes}
    spec = manifests.pod_spec(manifests.container(*busy.script()), restartPolicy=_TILL_ANSWERED)
    path = f"{STATIC_PODS}/{name}.json"
    for node in nodes:
        node.write(path, json.dumps(manifests.pod(_NAMESPACE, name, spec)))
    for node in nodes:
        _until("a static pod has not sent", _has_sent, node, f"{name}-{node.name}", busy)
        node.path(path).unlink()
    for node in nodes:
        _until("a static pod stays", _has_released, node, held(node) - before[node.name])


def _has_sent(node: Node, name: str, busy: Busy) -> bool:
    flows = [flows for pod, flows in node.truth.read().items() if pod.name == name]
    got = sum(count.packets for one in flows for flow, count in one.items() if flow.direction == "receive")
    return got >= _DATAGRAMS * len(busy.everything())


def test_addresses_of_pods_deleted_by_force_are_used_again(cluster: Cluster, busy: Busy) -> None:
    """Pods deleted by force without their kubelet are counted to their end; heirs of their addresses get their own."""
    node = cluster.nodes[0]
    busy.send(node, busy.everything())
    busy.clients("doomed", "doomed-one", "doomed-two", node=node)
    doomed = cluster.wait_pods(_NAMESPACE, 2, "app=doomed")
    wanted = addresses(doomed)
    busy.rest()
    since = cluster.measure()
    with busy.flowing():
        node.stop(KUBELET, signal.SIGKILL)
        cluster.kubectl("delete", "pods", "-n", _NAMESPACE, "-l", "app=doomed", "--force", "--grace-period=0")
        assert not {"doomed-one", "doomed-two"} & names(busy)
        busy.until_it_flows()
        assert held(node) >= wanted
        node.start(KUBELET)
        _until("doomed pods stay", _has_released, node, wanted)
        give_again(node, wanted)
        busy.senders("heir", node, also="doomed-one")
        heirs = busy.ended("heir", node, number=2)
        assert addresses(heirs) == wanted
        busy.delete("heir")
    sent = {pod.uid for pod in node.truth.read() if pod.name.startswith("doomed")}
    assert len(sent) == 3
    cluster.assert_exact(since)
    assert_well(cluster.agents)


@pytest.fixture
def by_iptables(cluster: Cluster) -> Iterator[Agent]:
    """The agent of the second node counts by iptables; then, as the other one, by what it finds, as does kube-proxy."""
    agent = cluster.agents[1]
    agent.stop()
    agent.start(datapath="iptables")
    yield agent
    agent.stop()
    agent.start()
    for node in cluster.nodes:
        node.set_proxy_mode(cluster.proxy_mode)


def test_kube_proxy_changes_its_mode(cluster: Cluster, busy: Busy, by_iptables: Agent) -> None:
    """Agents keep their datapath while kube-proxy changes its mode; one started anew obeys hints, and totals go on."""
    agent = by_iptables
    since = cluster.measure()
    with busy.flowing():
        for mode in ("nftables", "iptables"):
            for node in cluster.nodes:
                node.set_proxy_mode(mode)
            for node in cluster.nodes:
                _until(f"kube-proxy has not changed to {mode}", _is_proxied, node, mode, busy)
            busy.until_it_flows()
            assert [datapath(each) for each in cluster.agents] == ["nftables", "iptables"]
    assert_well(cluster.agents)
    agent.stop()
    agent.start()
    assert datapath(agent) == "nftables"  # where the kubelet has its chains
    with busy.flowing():
        pass
    now = cluster.measure()
    for node in cluster.nodes:
        # without any kube-proxy's rules a ClusterIP is nobody's for a moment
        both = (_untranslated(each) for each in (now.sent[node.name], now.counted[node.name]))
        before = (_untranslated(each) for each in (since.sent[node.name], since.counted[node.name]))
        sent, counted = (classes.since(*pair) for pair in zip(both, before, strict=True))
        assert_equal(node, sent, counted)
    assert_well(cluster.agents)


def _is_proxied(node: Node, mode: str, busy: Busy) -> bool:
    """Whether the rules of a mode are there for the service, and those of the other one are gone."""
    table = node.run(["nft", "list", "table", "ip", "kube-proxy"], check=False).stdout
    saved = node.run(["iptables-save", "-t", "nat"], check=False).stdout
    by_nftables, by_iptables = (busy.service[0] in rules for rules in (table, saved))
    return (by_nftables, by_iptables) == (mode == "nftables", mode == "iptables")


def _untranslated(totals: Totals) -> Totals:
    """Totals in which what went to a service counts as what went to its pods."""
    merged: Totals = {}
    for series, count in totals.items():
        one = series._replace(traffic="pod") if series.traffic == "service" else series
        merged[one] = merged.get(one, Count(0, 0)).plus(count)
    return merged


def assert_equal(node: Node, sent: Totals, counted: Totals) -> None:
    """Fail unless the books of a node are exact; the failure shows what is not."""
    rows = classes.differences(node.name, sent, counted)
    assert not rows, f"{len(rows)} series differ:\n{classes.table(rows)}"


def test_a_node_is_rebooted(cluster: Cluster, busy: Busy) -> None:
    """After a reboot totals begin at 0, pods with new sandboxes own what they send, and old CNI results nothing."""
    node, other = cluster.nodes
    agent = cluster.agents[0]
    with busy.flowing():
        pass
    since = cluster.measure()
    began = metrics(agent, _START)[""]
    old = {path.name for path in node.path(_RESULTS).iterdir()}
    assert old
    tasks = _tasks(node)
    wanted = addresses(pod for pod in cluster.get("pods", _NAMESPACE) if pod["spec"]["nodeName"] == node.name)
    busy.send(other, busy.targets(other))
    give_again(node, wanted)

    node.reboot()

    assert {path.name for path in node.path(_RESULTS).iterdir()} >= old
    agent.wait()
    results = node.path(_RESULTS)
    assert agent.totals() == {}
    assert metrics(agent, _START)[""] > began
    _until("old sandboxes stay", lambda: _revive(node) and not old & {each.name for each in results.iterdir()})
    cluster.wait_ready()
    _until("statuses are of before", _is_told, node, busy)
    busy.find()
    for each in cluster.nodes:
        _until("kube-proxy leads elsewhere", _leads_to_servers, each, busy)
    assert not tasks & _tasks(node)
    with busy.flowing():
        busy.senders("reborn", node, other)
        busy.until_sent("reborn", node, other)
    now = cluster.measure()
    assert_equal(node, now.sent[node.name], now.counted[node.name])
    before = since.sent[other.name], since.counted[other.name]
    after = now.sent[other.name], now.counted[other.name]
    assert_equal(other, *(classes.since(*pair) for pair in zip(after, before, strict=True)))
    assert_well(cluster.agents)
    assert {pod["pod"]: set(pod["addresses"]) for pod in agent.pods() if pod["addresses"]} == {
        pod["metadata"]["name"]: addresses([pod])
        for pod in cluster.get("pods")
        if pod["spec"]["nodeName"] == node.name and not pod["spec"].get("hostNetwork")
    }


def _tasks(node: Node) -> set[str]:
    """The sandboxes and containers that run on a node."""
    return set(node.run(node.ctr("tasks", "list", "-q")).stdout.split())


@pytest.fixture
def impatient(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Settings with which agents wait two seconds for who owns what they counted; after the test all have the usual."""
    yield {"identity": {"late_binding": "2s"}}
    for agent in cluster.agents:
        agent.stop()
        agent.start()


def test_agents_are_killed(cluster: Cluster, busy: Busy, impatient: dict[str, Any]) -> None:
    """Killed at any moment agents lose nothing; a pod that came and went without any agent is nobody's, to the byte."""
    since = cluster.measure()
    with busy.flowing():
        for agent in cluster.agents:
            agent.kill()
        before = {node.name: held(node) for node in cluster.nodes}
        busy.senders("unseen", *cluster.nodes)
        busy.until_sent("unseen", *cluster.nodes)
        for node in cluster.nodes:
            _until("a pod stays", _has_released, node, held(node) - before[node.name])
            busy.clients("stays", f"stays-{node.name}", node=node)
        cluster.wait_pods(_NAMESPACE, len(cluster.nodes), "app=stays")
        for lines in (1, 2, 4):
            for node, agent in zip(cluster.nodes, cluster.agents, strict=True):
                _kill_early(node, agent, lines, impatient)
        for agent in cluster.agents:
            agent.start(**impatient)
        busy.senders("seen", *cluster.nodes)
        busy.until_sent("seen", *cluster.nodes)
        busy.delete("stays")
    for agent in cluster.agents:
        _until("nothing is unattributed", _has_unattributed, agent)
    rows = cluster.differences(since)
    for node in cluster.nodes:
        unseen = {_way(row): row.sent.bytes for row in rows if row.series.pod == f"unseen-{node.name}"}
        nobodys = {
            _way(row): row.counted.bytes for row in rows if (row.node, row.series.pod) == (node.name, UNATTRIBUTED)
        }
        assert nobodys == unseen
    assert {row.series.pod.partition("-")[0] for row in rows} == {UNATTRIBUTED, "unseen"}, classes.table(rows)
    assert_well(cluster.agents)


def _kill_early(node: Node, agent: Agent, lines: int, settings: dict[str, Any]) -> None:
    """Start an agent, and kill it when it has logged so many lines."""
    log = node.folder / f"{SERVICE}.log"
    already = len(log.read_text(encoding="utf-8").splitlines())
    agent.start(wait=False, **settings)
    _until("the agent does not start", lambda: len(log.read_text(encoding="utf-8").splitlines()) >= already + lines)
    agent.kill()


def _has_unattributed(agent: Agent) -> bool:
    return any(series.pod == UNATTRIBUTED for series in agent.totals())


def _way(row: Difference) -> tuple[str, str]:
    return row.series.direction, row.series.traffic
