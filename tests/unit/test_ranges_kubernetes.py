"""Local ranges by podCIDRs, against a local server that lists and watches as an API server does."""

from __future__ import annotations

import json
import queue
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from metadata_server import Asked, MetadataServer, Reply, serving

from netacct.errors import NetacctError
from netacct.identity.ranges_kubernetes import KubernetesRanges
from netacct.identity.reflector import Backoff, Pace
from netacct.model import Network

Told = queue.Queue[tuple[Network, ...]]


def node(*cidrs: Any, version: int = 7, **spec: Any) -> dict[str, Any]:
    """A Node, with podCIDRs unless there are none."""
    spec |= {"podCIDRs": list(cidrs), "podCIDR": cidrs[0]} if cidrs else {}
    return {"metadata": {"name": "node1", "uid": "u1", "resourceVersion": str(version)}, "spec": spec}


class ApiServer:
    """Lists the nodes that there are, and sends the events of a queue to whoever watches."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        self.nodes = nodes
        self.status = 200
        self.events: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()

    def __call__(self, asked: Asked) -> Reply | bytes:
        """Answer a list or a watch; a watch ends after one event."""
        url = urllib.parse.urlsplit(asked.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if self.status != 200:
            return Reply(json.dumps({"message": "no"}), self.status)
        assert (url.path, query["fieldSelector"]) == ("/api/v1/nodes", "metadata.name=node1")
        if query.get("watch") != "1":
            return Reply(json.dumps({"kind": "NodeList", "metadata": {"resourceVersion": "7"}, "items": self.nodes}))
        try:
            kind, changed = self.events.get(timeout=0.2)
        except queue.Empty:
            return Reply("")
        return Reply(json.dumps({"type": kind, "object": changed}) + "\n")


@pytest.fixture
def api() -> ApiServer:
    """An API server that knows the node, with a CIDR of each family."""
    return ApiServer(node("10.244.1.0/24", "fd00:10:244:1::/64"))


@pytest.fixture
def server(api: ApiServer) -> Iterator[MetadataServer]:
    """The API server, served."""
    with serving(api) as made:
        yield made


@pytest.fixture
def told() -> Told:
    """What the provider told."""
    return queue.Queue()


@pytest.fixture
def provider(server: MetadataServer, tmp_path: Path) -> Iterator[KubernetesRanges]:
    """A provider that goes by a kubeconfig and does not wait for long."""
    kubeconfig = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": server.url}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    kubeconfig.write_text(
        json.dumps({"clusters": [cluster], "contexts": [context], "users": users, "current-context": "x"})
    )
    pace = Pace(backoff=lambda: Backoff(first=0.02, limit=0.05))
    made = KubernetesRanges(str(kubeconfig), "node1", pace)
    yield made
    made.stop()


def texts(networks: tuple[Network, ...]) -> list[str]:
    """Networks as text."""
    return [str(each) for each in networks]


def test_the_nodes_cidrs(provider: KubernetesRanges, told: Told) -> None:
    """The node's podCIDRs of both families are told, and `wait` waits for them."""
    provider.start(told.put)
    provider.wait(60)
    assert texts(told.get_nowait()) == ["10.244.1.0/24", "fd00:10:244:1::/64"]
    assert provider.facts == ()


def test_cidrs_that_come_later(api: ApiServer, provider: KubernetesRanges, told: Told) -> None:
    """A node that registers before its CIDRs are given gets its ranges with the event that brings them."""
    api.nodes = (node(),)
    api.events.put(("MODIFIED", node("10.244.2.0/24", version=8)))
    provider.start(told.put)
    assert texts(told.get(timeout=60)) == ["10.244.2.0/24"]
    assert provider.healthy().up


def test_nothing_is_taken_back(api: ApiServer, provider: KubernetesRanges, told: Told) -> None:
    """Neither a deleted Node nor one without CIDRs, with unreadable or with impossible ones takes a range away."""
    provider.start(told.put)
    assert len(told.get(timeout=60)) == 2
    for version, (kind, changed) in enumerate(
        [
            ("DELETED", node("10.244.1.0/24")),
            ("ADDED", node()),
            ("MODIFIED", node("10.244.1.0/33")),
            ("MODIFIED", node(["10.244.1.0/24"])),
            ("MODIFIED", node(168427776)),
            ("MODIFIED", node("fd00::%eth0/64")),
            ("MODIFIED", node("127.0.0.0/8")),
            ("MODIFIED", node("10.244.3.0/24")),
        ],
        start=8,
    ):
        changed["metadata"]["resourceVersion"] = str(version)
        api.events.put((kind, changed))
    assert texts(told.get(timeout=60)) == ["10.244.3.0/24"]


def test_the_old_field_alone(api: ApiServer, provider: KubernetesRanges, told: Told) -> None:
    """A Node that has only `podCIDR`, as before dual stack, has that one range."""
    api.nodes = (node(podCIDR="10.244.4.0/24"),)
    provider.start(told.put)
    assert texts(told.get(timeout=60)) == ["10.244.4.0/24"]


def test_a_refusal_is_told(api: ApiServer, provider: KubernetesRanges, told: Told) -> None:
    """Without the right to read nodes the provider is down, and says what to grant."""
    api.status = 403
    provider.start(told.put)
    done = threading.Event()
    for _ in range(1200):
        if "grant" in provider.healthy().reason or done.wait(0.05):
            break
    health = provider.healthy()
    assert not health.up
    assert "grant list and watch on /api/v1/nodes" in health.reason
    assert told.empty()


def test_reading_once(api: ApiServer, provider: KubernetesRanges, capsys: pytest.CaptureFixture[str]) -> None:
    """Who does not follow gets the CIDRs of now, or the reason why there are none, and nothing is logged."""
    assert texts(provider.read(5).ranges) == ["10.244.1.0/24", "fd00:10:244:1::/64"]
    api.nodes = ()
    assert provider.read(5).ranges == ()
    api.nodes = (node("10.244.1.0/33"),)
    with pytest.raises(NetacctError, match="no networks"):
        provider.read(5)
    api.status = 403
    with pytest.raises(NetacctError, match="403"):
        provider.read(5)
    assert capsys.readouterr() == ("", "")
