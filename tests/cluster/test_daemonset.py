"""netacct as a DaemonSet, from the image and the manifests of this repository, on the nodes of a real cluster."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from clusterlab import classes, manifests, plan, traffic
from clusterlab.agents import CONFIG
from clusterlab.classes import Difference, Totals
from clusterlab.cluster import Cluster, Measurement
from clusterlab.control_plane import manifest_text
from clusterlab.node import Node
from clusterlab.prerequisites import ROOT
from clusterlab.truth import Count

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_NAMESPACE, _NAME = "netacct", "netacct"
_PORT = 7000
_NEEDED = ("apt-get", "dpkg-deb", "gcc", "/usr/share/keyrings/debian-archive-keyring.gpg")

Objects = list[dict[str, Any]]
Apply = Callable[..., None]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The image of this checkout, as `make image` makes it."""
    if lacking := [name for name in _NEEDED if not (shutil.which(name) or Path(name).is_file())]:
        pytest.skip(f"no image can be made here: {', '.join(lacking)} missing")
    made = tmp_path_factory.mktemp("image") / "netacct.tar"
    command = [str(ROOT / "tools/image"), "--output", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return made


@pytest.fixture(scope="module")
def _namespace(cluster: Cluster) -> Iterator[None]:
    """What the manifests make is gone at the end."""
    yield
    cluster.delete_namespace(_NAMESPACE)


@pytest.fixture
def fleet(cluster: Cluster, archive: Path, _namespace: None) -> Iterator[Apply]:
    """Applies the DaemonSet in the place of the session's agents, with keys of netacct.yaml; they return afterwards.

    Whoever takes over goes on with the totals of the one before, which is held here for all tests.
    """
    held = [agent.totals() for agent in cluster.agents]

    def taken_over() -> None:
        held[:] = [_later(agent.totals, earlier) for agent, earlier in zip(cluster.agents, held, strict=True)]

    for node, agent in zip(cluster.nodes, cluster.agents, strict=True):
        if _image() not in node.run(node.ctr("images", "list", "-q")).stdout.split():
            node.import_image(archive)
        agent.stop()

    def apply(mounts: Iterable[str] = (), **settings: Any) -> None:
        objects = _configured(_manifests("daemonset"), settings)
        for path in mounts:
            _mount(objects, path)
        cluster.apply(objects)
        _rolled_out(cluster, _NAME)
        taken_over()

    yield apply
    _delete(cluster, "--all")
    for agent in cluster.agents:
        agent.start()
    taken_over()


@pytest.fixture(scope="module")
def pods(cluster: Cluster) -> Iterator[Objects]:
    """A pod on each node, which answers and sends."""
    cluster.namespace("daemonset")
    server = manifests.container(traffic.SERVER, "serve", str(_PORT), port=_PORT)
    cluster.apply(manifests.stateful_set("daemonset", "store", manifests.pod_spec(server), replicas=2))
    yield cluster.wait_pods("daemonset", 2, "app=store")
    cluster.delete_namespace("daemonset")


@pytest.mark.parametrize("datapath", ["auto", "iptables"])
def test_two_capabilities_are_enough_to_count_exactly(
    cluster: Cluster, fleet: Apply, pods: Objects, datapath: str
) -> None:
    """A pod with NET_ADMIN and NET_RAW, a read-only root, seccomp and no token counts each byte, and audits itself."""
    fleet(datapath=datapath)
    since = _measure(cluster)

    _send(cluster, pods)

    _assert_exact(cluster, since)
    for pod in cluster.get("pods", _NAMESPACE):
        name = str(pod["metadata"]["name"])
        status = _inside(cluster, name, "cat", "/proc/1/status")
        assert _fields(status, "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") == [0, 0x3000, 0x3000, 0x3000, 0]
        assert _fields(status, "NoNewPrivs", "Seccomp") == [1, 2]
        assert "Read-only file system" in _inside(cluster, name, "sh", "-c", "(echo > /written) 2>&1 || true")
        assert "No such file" in _inside(cluster, name, "sh", "-c", "ls /run/secrets/kubernetes.io 2>&1 || true")
        _inside(cluster, name, "python3", "-c", "import bz2, grpc, kubernetes.config, lzma, sqlite3, ssl, uuid")
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    for agent in cluster.agents:
        page = agent.page()
        sources = dict(re.findall(r'^netacct_identity_source_up\{source="([^"]+)"\} ([01])', page, re.MULTILINE))
        assert sources.keys() >= {"cni", "kubelet-pods-api", "cni-ranges"}
        assert set(sources.values()) == {"1"}
        assert set(re.findall(r"^netacct_scrape_collector_success\{[^}]*\} ([01])", page, re.MULTILINE)) == {"1"}
        assert set(re.findall(r"^netacct_blind_spot\{[^}]*\} ([01])", page, re.MULTILINE)) == {"0"}
    cluster.wait(lambda: all(_coverage(agent.page()) > 0.99 for agent in cluster.agents), complaint="no self-audit")


def test_another_image_goes_on_where_the_old_one_stopped(cluster: Cluster, fleet: Apply, pods: Objects) -> None:
    """While a new image rolls out under traffic no total falls, no counter begins anew, and all is exact at the end."""
    fleet()
    since = _measure(cluster)
    _send(cluster, pods)
    begun = [_sample(agent.page(), "netacct_accounting_start_timestamp_seconds") for agent in cluster.agents]
    sets = [_sets(node) for node in cluster.nodes]
    before = {pod["metadata"]["name"] for pod in cluster.get("pods", _NAMESPACE)}
    fresh = f"{_image().rpartition(':')[0]}:next"
    for node in cluster.nodes:
        node.run(node.ctr("images", "tag", "--force", _image(), fresh))
    seen = [agent.totals() for agent in cluster.agents]

    cluster.kubectl("-n", _NAMESPACE, "set", "image", f"daemonset/{_NAME}", f"{_NAME}={fresh}")
    while not _is_rolled_out(cluster):
        _send(cluster, pods)
        seen = [_later(agent.totals, earlier) for agent, earlier in zip(cluster.agents, seen, strict=True)]

    _rolled_out(cluster, _NAME)
    _assert_exact(cluster, since)
    after = cluster.get("pods", _NAMESPACE)
    assert before.isdisjoint(pod["metadata"]["name"] for pod in after)
    assert {pod["spec"]["containers"][0]["image"] for pod in after} == {fresh}
    assert begun == [_sample(agent.page(), "netacct_accounting_start_timestamp_seconds") for agent in cluster.agents]
    assert sets == [_sets(node) for node in cluster.nodes]
    assert not any(_sample(agent.page(), "netacct_unexplained_resets_total") for agent in cluster.agents)


@pytest.mark.parametrize("datapath", ["auto", "iptables"])
def test_rules_outlive_the_daemonset_until_they_are_removed(
    cluster: Cluster, fleet: Apply, pods: Objects, datapath: str
) -> None:
    """What passes while there is no DaemonSet is booked by the next one; remove.yaml leaves no rule and no set."""
    fleet(datapath=datapath)
    since = _measure(cluster)

    _delete(cluster, _NAME)
    assert all(_left(node) for node in cluster.nodes)
    _send(cluster, pods)
    fleet(datapath=datapath)

    _assert_exact(cluster, since)
    _delete(cluster, _NAME)
    cluster.apply(_manifests("remove"))
    _rolled_out(cluster, "netacct-remove")
    assert not [line for node in cluster.nodes for line in _left(node)]


@pytest.mark.skipif(
    Path("/sys/fs/cgroup/cgroup.controllers").exists(), reason="cgroup v2 hosts hide the tree from pods"
)
def test_host_pods_are_told_apart_from_inside_a_pod(cluster: Cluster, fleet: Apply, pods: Objects) -> None:
    """With the cgroup tree mounted, what a hostNetwork pod sends is its own and not the host's, to the byte."""
    spec = manifests.pod_spec(manifests.container(), node=pods[0]["spec"]["nodeName"], hostNetwork=True)
    cluster.apply(manifests.pod("daemonset", "whole", spec, kind="whole"))
    cluster.wait_pods("daemonset", 1, "kind=whole")
    fleet(["/sys/fs/cgroup"], host_pods="cgroup")
    agent = cluster.agents[cluster.nodes.index(cluster.node_of(pods[0]))]
    cluster.wait(lambda: "daemonset/whole" in _names(agent.pods()), complaint="the pod is not known")

    for family in plan.FAMILIES:
        cluster.exec("daemonset", "whole", *traffic.udp(traffic.pod_address(pods[1], family), _PORT).split())

    cluster.settled_truth()
    found = {
        series.direction: count
        for series, count in agent.totals().items()
        if (series.pod, series.traffic) == ("whole", "pod")
    }
    headers = 20 * sum(traffic.HEADERS.values())
    cluster.kubectl("-n", "daemonset", "delete", "pod", "whole")
    assert found == {"transmit": (2 * 20 * 500 + headers, 40), "receive": (2 * 20 * 300 + headers, 40)}


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("rbac-kubelet", ("get", "nodes", "--subresource=pods")),
        ("rbac-apiserver", ("watch", "pods", "--all-namespaces")),
        ("rbac-nodes", ("watch", "nodes")),
    ],
)
def test_a_file_of_rights_grants_what_its_source_asks_for_and_no_more(
    cluster: Cluster, name: str, right: tuple[str, ...]
) -> None:
    """The API server takes each file; with it the ServiceAccount has that right, and never commands in containers."""

    def may(*asked: str) -> bool:
        account = f"--as=system:serviceaccount:{_NAMESPACE}:{_NAME}"
        done = cluster.control_plane.kubectl("auth", "can-i", *asked, account, check=False)
        return done.stdout.strip() == "yes"

    assert not may(*right)
    cluster.apply(_manifests(name))
    granted = may(*right)
    more = [("get", "nodes", "--subresource=proxy"), ("create", "pods", "--subresource=exec"), ("get", "secrets")]
    excess = [asked for asked in [*more, ("patch", "pods"), ("update", "nodes")] if may(*asked)]
    cluster.kubectl("delete", "-f", "-", input=manifest_text(_manifests(name)))
    assert granted
    assert not excess


def _manifests(name: str) -> Objects:
    text = (ROOT / "deploy" / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def _configured(objects: Objects, settings: dict[str, Any]) -> Objects:
    """The manifests with the cluster's policy and the lab's settings; nothing else differs from what is shipped."""
    (configuration,) = (each for each in objects if each["kind"] == "ConfigMap")
    configuration["data"] = {
        "netacct.yaml": yaml.safe_dump({**CONFIG, **settings}),
        "policy.yaml": yaml.safe_dump(plan.POLICY),
    }
    return objects


def _mount(objects: Objects, path: str) -> None:
    """One more mount of the node's, read only, as the README says."""
    (daemon_set,) = (each for each in objects if each["kind"] == "DaemonSet")
    spec = daemon_set["spec"]["template"]["spec"]
    spec["volumes"].append({"name": "more", "hostPath": {"path": path}})
    spec["containers"][0]["volumeMounts"].append({"name": "more", "mountPath": path, "readOnly": True})


def _names(found: Any) -> set[str]:
    return {f"{each['namespace']}/{each['pod']}" for each in found}


def _image() -> str:
    (daemon_set,) = (each for each in _manifests("daemonset") if each["kind"] == "DaemonSet")
    return str(daemon_set["spec"]["template"]["spec"]["containers"][0]["image"])


def _send(cluster: Cluster, pods: Objects) -> None:
    """Each pod sends to the other, both families: some datagrams, and enough by TCP for the self-audit."""
    for one, other in (pods, reversed(pods)):
        for family in plan.FAMILIES:
            address = traffic.pod_address(other, family)
            for command in (traffic.udp(address, _PORT), traffic.tcp(address, _PORT, 1_500_000, 1_500_000)):
                cluster.exec("daemonset", one["metadata"]["name"], *command.split())


def _measure(cluster: Cluster) -> Measurement:
    """What `Cluster.measure` does, of agents that are pods."""
    truth = cluster.settled_truth()
    counted = {node.name: agent.totals() for node, agent in zip(cluster.nodes, cluster.agents, strict=True)}
    sent = {node.name: classes.expected(truth[node.name], cluster.translations(node)) for node in cluster.nodes}
    return Measurement(sent, counted)


def _assert_exact(cluster: Cluster, since: Measurement) -> None:
    now = _measure(cluster)
    rows: list[Difference] = []
    for name, counted in now.counted.items():
        sent = classes.since(now.sent[name], since.sent[name])
        assert sent
        rows += classes.differences(name, sent, classes.since(counted, since.counted[name]))
    assert not rows, f"{len(rows)} series differ:\n{classes.table(rows)}"


def _later(read: Callable[[], Totals], earlier: Totals) -> Totals:
    """The totals of now, of which none is lower; the earlier ones while nobody answers."""
    try:
        now = read()
    except (OSError, http.client.HTTPException, AssertionError):
        return earlier
    fallen = {series: count for series, count in earlier.items() if now.get(series, Count(0, 0)) < count}
    assert not fallen
    return now


def _rolled_out(cluster: Cluster, name: str) -> None:
    try:
        cluster.kubectl("-n", _NAMESPACE, "rollout", "status", f"daemonset/{name}", "--timeout=240s")
    except AssertionError:
        print(cluster.kubectl("-n", _NAMESPACE, "describe", "pods"))
        print(cluster.kubectl("-n", _NAMESPACE, "logs", f"daemonset/{name}", "--all-containers", "--all-pods"))
        raise


def _is_rolled_out(cluster: Cluster) -> bool:
    (each,) = cluster.get("daemonsets", _NAMESPACE)
    status: dict[str, int] = each["status"]
    wanted = len(cluster.nodes)
    done = [status.get("updatedNumberScheduled", 0), status.get("numberAvailable", 0)]
    return status.get("observedGeneration") == each["metadata"]["generation"] and done == [wanted, wanted]


def _delete(cluster: Cluster, name: str) -> None:
    cluster.kubectl("-n", _NAMESPACE, "delete", "daemonset", name)
    cluster.wait(lambda: not cluster.get("pods", _NAMESPACE), 240, "pods of the DaemonSet do not end")


def _inside(cluster: Cluster, pod: str, *argv: str) -> str:
    return cluster.kubectl("-n", _NAMESPACE, "exec", pod, "--", *argv)


def _fields(status: str, *names: str) -> list[int]:
    """Numbers of /proc/PID/status, hexadecimal."""
    known = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return [int(known[name], 16) for name in names]


def _coverage(page: str) -> float:
    with contextlib.suppress(StopIteration):
        return _sample(page, "netacct_coverage_ratio")
    return 0.0


def _sample(page: str, name: str) -> float:
    return float(next(line.split()[1] for line in page.splitlines() if line.startswith(f"{name} ")))


def _sets(node: Node) -> list[str]:
    """Our sets in nf_tables with the numbers that the kernel gave them: another number is another set, at zero."""
    text = "".join(node.run(["nft", "-a", "-t", "list", "table", family, "netacct"]).stdout for family in ("ip", "ip6"))
    found = re.findall(r"^\tset (\S+) \{ # handle (\d+)", text, re.MULTILINE)
    assert found
    return [" ".join(each) for each in found]


def _left(node: Node) -> list[str]:
    """What there is of ours in the kernel of a node. Legacy tables are read where they are: asking makes them."""
    script = """
    for family in ip ip6; do
      for table in $(cat /proc/net/${family}_tables_names 2>/dev/null); do ${family}tables-legacy-save -t $table; done
      nft list tables $family
    done
    ipset list -n
    """
    lines = node.run(["sh", "-c", script]).stdout.splitlines()
    return [line for line in lines if re.search(r"netacct|nacc", line, re.IGNORECASE)]
