"""The sources `kubelet` and `apiserver` against a real kubelet and kube-apiserver, with the rights of the docs."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest
from clusterlab import manifests, plan
from clusterlab.cluster import Cluster
from clusterlab.control_plane import API_SERVER
from clusterlab.hosts import until
from clusterlab.node import KUBELET, STATIC_PODS, Node

from netacct.identity.apiserver import ApiServerSource
from netacct.identity.kubelet import Access, KubeletSource
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.model import WHOLE, Observation, unpack

pytestmark = pytest.mark.cluster

_NAMESPACE = "http"
_ACCOUNT = ("-n", "netacct", "netacct")
"""The ServiceAccount to which docs/identity.md gives the rights."""

_LABELS = ("experiment",)

_USER = "netacct"
"""Who may list the kubelet's pods by client certificate, by docs/identity.md."""

_DOCS = Path(__file__).parents[2] / "docs/identity.md"


class Told:
    """What a source says, merged: the observations that hold now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, bytes], Observation] = {}

    def hear(self, event: SourceEvent) -> None:
        """Take an event."""
        with self._lock:
            if isinstance(event, Replace):
                self._held.clear()
            for seen in event.observations:
                if seen.present:
                    self._held[seen.pod.uid, seen.ip] = seen
                else:
                    self._held.pop((seen.pod.uid, seen.ip), None)

    def seen(self) -> list[Observation]:
        """The observations of this namespace's pods."""
        with self._lock:
            return [seen for seen in self._held.values() if seen.pod.namespace == _NAMESPACE]

    def addresses(self) -> dict[str, set[str]]:
        """The addresses of each pod, by its uid."""
        found: dict[str, set[str]] = {}
        for seen in self.seen():
            found.setdefault(seen.pod.uid, set()).add("whole" if seen.ip == WHOLE else unpack(seen.ip))
        return found

    def until(self, expected: Callable[[], dict[str, set[str]]], patience: float = 120.0) -> None:
        """Wait until the pods with their addresses are these."""
        until(lambda: self.addresses() == expected(), patience, lambda: f"{self.addresses()} is not {expected()}")


class _Running:
    """A source that runs on a node, and what it told."""

    def __init__(self, node: Node, source: KubeletSource | ApiServerSource) -> None:
        self.told, self.source = Told(), source
        with node.entered():
            source.start(self.told.hear)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.stop()

    def until(self, holds: Callable[[Health], bool]) -> Health:
        """Wait until its health is as expected."""
        until(lambda: holds(self.source.healthy()), 120, lambda: str(self.source.healthy()))
        return self.source.healthy()


@pytest.fixture(scope="module")
def node(cluster: Cluster) -> Iterator[Node]:
    """A node with pods of every kind, one of which has completed; a ServiceAccount and a user with the docs' rights."""
    found = cluster.nodes[0]
    spec = manifests.pod_spec(manifests.container(), node=found.name)
    cluster.namespace(_NAMESPACE, "netacct")
    static = manifests.pod(_NAMESPACE, "lonely", manifests.pod_spec(manifests.container()))
    found.write(f"{STATIC_PODS}/lonely.json", json.dumps(static))
    try:
        cluster.kubectl("create", "serviceaccount", *_ACCOUNT)
        cluster.kubectl("apply", "-f", "-", input=_rights())
        cluster.apply(
            [
                manifests.deployment(_NAMESPACE, "web", spec, replicas=2),
                manifests.pod(_NAMESPACE, "host", {**spec, "hostNetwork": True}),
                manifests.job(_NAMESPACE, "done", manifests.pod_spec(manifests.container("true"), node=found.name)),
                manifests.pod(_NAMESPACE, "bare", spec, experiment="scaling", other="x"),
                manifests.pod(_NAMESPACE, "away", {**spec, "nodeSelector": {"kubernetes.io/hostname": "node2"}}),
            ]
        )
        cluster.wait_pods(_NAMESPACE, 1, "app=done", phase="Succeeded")
        cluster.wait_pods(_NAMESPACE, 6)
        yield found
    finally:
        found.path(f"{STATIC_PODS}/lonely.json").unlink()
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", input=_rights())
        cluster.delete_namespace(_NAMESPACE, "netacct")


def _run_pod(cluster: Cluster, node: Node, name: str) -> None:
    """Make one more pod on the node, and wait until it runs."""
    cluster.apply(manifests.pod(_NAMESPACE, name, manifests.pod_spec(manifests.container(), node=node.name)))
    cluster.kubectl("wait", "pod", "-n", _NAMESPACE, name, "--for=condition=Ready", "--timeout=240s")


def _delete_pod(cluster: Cluster, name: str) -> None:
    """Delete a pod at the API server, whether its kubelet knows or not."""
    cluster.kubectl("delete", "pod", "-n", _NAMESPACE, name, "--force", "--grace-period=0")


def _rights() -> str:
    """The manifests in docs/identity.md: roles, who has them, and a FlowSchema, by which the API server counts."""
    found = re.findall(r"^```yaml\n(.*?)^```$", _DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    text = "---\n".join(manifest for manifest in found if "kind: ClusterRole" in manifest)
    assert [text.count(f"kind: {kind}\n") for kind in ("ClusterRole", "ClusterRoleBinding", "FlowSchema")] == [2, 2, 1]
    return text


def _expected(cluster: Cluster, node: Node) -> dict[str, set[str]]:
    """The addresses of each pod of the node that has not ended, by the uid that the node knows, as kubectl has them."""
    found = {}
    for pod in cluster.get("pods", _NAMESPACE):
        if pod["spec"].get("nodeName") == node.name and pod["status"]["phase"] == "Running":
            mirror = pod["metadata"].get("annotations", {}).get("kubernetes.io/config.mirror")
            ips = {each["ip"] for each in pod["status"]["podIPs"]}
            found[mirror or pod["metadata"]["uid"]] = {"whole"} if pod["spec"].get("hostNetwork") else ips
    return found


def _token(cluster: Cluster, path: Path) -> Path:
    """A token of the ServiceAccount, in a file."""
    path.write_text(cluster.kubectl("create", "token", *_ACCOUNT, "--duration=1h"))
    return path


def _by_certificate(cluster: Cluster, node: Node, user: str) -> KubeletSource:
    """A source that asks the node's kubelet with a client certificate of this user."""
    cluster.pki.sign(user, f"/CN={user}")
    path = cluster.pki.path
    how = Access(_url(node), path("ca.crt"), path(f"{user}.crt"), path(f"{user}.key"))
    return KubeletSource(how, interval=0.5, labels=_LABELS)


def _url(node: Node) -> str:
    return f"https://{node.addresses[4]}:10250"


def test_the_kubelet_lists_its_pods_to_who_may(cluster: Cluster, node: Node) -> None:
    """A client certificate whose user may `get nodes/pods` gets all pods of the node, static ones by their own uid."""
    with _Running(node, _by_certificate(cluster, node, _USER)) as running:
        running.told.until(lambda: _expected(cluster, node))

        seen = {each.pod.name: each.pod for each in running.told.seen()}
        assert {pod.workload for name, pod in seen.items() if name.startswith("web-")} == {"web"}
        assert seen["bare"].labels == (("experiment", "scaling"),)
        assert running.source.healthy().up


def test_the_kubelet_refuses_who_may_not(cluster: Cluster, node: Node) -> None:
    """Without the right the kubelet's own words and what to grant are the reason; without an identity, that."""
    with _Running(node, _by_certificate(cluster, node, "nobody")) as running:
        reason = running.until(lambda health: health.present and not health.up).reason
    assert "403: Forbidden (user=nobody, verb=get, resource=nodes, subresource(s)=[pods proxy])" in reason
    assert "grant `get` on `nodes/pods`" in reason

    token = Path(cluster.pki.path("no-token"))
    token.write_text("nonsense")
    stranger = KubeletSource(Access(_url(node), cluster.pki.path("ca.crt"), token_file=str(token)))
    with _Running(node, stranger) as running:
        assert "401: Unauthorized" in running.until(lambda health: health.present and not health.up).reason


def test_the_kubelet_takes_the_token_of_a_service_account(cluster: Cluster, node: Node, tmp_path: Path) -> None:
    """A ServiceAccount's token is as good, also where only the kubelet's own certificate is trusted, and by IPv6."""
    url = f"https://[{node.addresses[6]}]:10250"
    how = Access(url, cluster.pki.path(f"{node.name}.crt"), token_file=str(_token(cluster, tmp_path / "token")))
    with _Running(node, KubeletSource(how, interval=0.5)) as running:
        running.told.until(lambda: _expected(cluster, node))


def test_what_the_kubelet_told_holds_while_it_is_away(cluster: Cluster, node: Node) -> None:
    """A kubelet that is stopped takes nothing back, and what happened meanwhile is told when it is there again."""
    _run_pod(cluster, node, "lost")
    with _Running(node, _by_certificate(cluster, node, _USER)) as running:
        running.told.until(lambda: _expected(cluster, node))
        before = running.told.addresses()
        node.stop(KUBELET)
        with contextlib.ExitStack() as stack:
            stack.callback(node.start, KUBELET)
            running.until(lambda health: "Connection refused" in health.reason)
            _delete_pod(cluster, "lost")
            assert running.told.addresses() == before
        running.until(lambda health: health.up)
        running.told.until(lambda: _expected(cluster, node))


def _kubeconfig(cluster: Cluster, path: Path) -> str:
    """A kubeconfig of the ServiceAccount."""
    token = str(_token(cluster, path / "token"))
    server = f"https://{plan.CONTROL_PLANE[4]}:{plan.API_PORT}"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server, "certificate-authority": cluster.pki.path("ca.crt")}}],
        "users": [{"name": "u", "user": {"tokenFile": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.joinpath("kubeconfig").write_text(json.dumps(document))
    return str(path / "kubeconfig")


def _requests(cluster: Cluster) -> int:
    """How many requests of the ServiceAccount the API server has dispatched, by its own metrics."""
    text = cluster.kubectl("get", "--raw", "/metrics")
    found = re.findall(
        r'^apiserver_flowcontrol_dispatched_requests_total\{flow_schema="netacct",[^}]*\} (\S+)$',
        text,
        re.MULTILINE,
    )
    return sum(int(float(value)) for value in found)


def test_the_api_server_is_asked_twice(cluster: Cluster, node: Node, tmp_path: Path) -> None:
    """One list and one watch tell all pods of the node and each change of them: two requests, by its own metrics."""
    before = _requests(cluster)
    with _Running(node, ApiServerSource(_kubeconfig(cluster, tmp_path), node.name, _LABELS)) as running:
        running.told.until(lambda: _expected(cluster, node))
        assert {each.pod.labels for each in running.told.seen() if each.pod.name == "bare"} == {
            (("experiment", "scaling"),)
        }
        for name in ("more0", "more1", "more2"):
            _run_pod(cluster, node, name)
            running.told.until(lambda: _expected(cluster, node))
            _delete_pod(cluster, name)
            running.told.until(lambda: _expected(cluster, node))

        assert _requests(cluster) - before == 2
        assert running.source.healthy().up


def test_the_api_server_goes_and_comes(cluster: Cluster, node: Node, tmp_path: Path) -> None:
    """While it is away what it told holds; when it is back the source goes on by itself, with a handful of requests."""
    _run_pod(cluster, node, "later")
    with _Running(node, ApiServerSource(_kubeconfig(cluster, tmp_path), node.name)) as running:
        running.told.until(lambda: _expected(cluster, node))
        before = running.told.addresses()
        cluster.control_plane.stop(API_SERVER, signal.SIGKILL)  # else it waits for those who watch
        with contextlib.ExitStack() as stack:
            stack.callback(cluster.control_plane.wait_api)
            stack.callback(cluster.control_plane.start, API_SERVER)
            running.until(lambda health: "Connection refused" in health.reason)
            assert running.told.addresses() == before
        _delete_pod(cluster, "later")

        running.until(lambda health: health.up)
        running.told.until(lambda: _expected(cluster, node))
        assert _requests(cluster) <= 4  # of this life of the API server
