"""The API server's source makes observations of what a reflector hears."""

from __future__ import annotations

import contextlib
import json
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tlslab import Answering, Reply, Request, Server, kubeconfig

from netacct.identity.apiserver import ApiServerSource
from netacct.identity.node import node_name
from netacct.identity.reflector import Backoff, Pace
from netacct.identity.source import Replace, SourceEvent, Update
from netacct.model import Observation, unpack

QUICK = Pace(backoff=lambda: Backoff(first=0.01, limit=0.05))

LATENCY = 60.0
"""Seconds that a test waits for what should come at once."""


def pod(name: str, version: int, *ips: str, **more: Any) -> dict[str, Any]:
    """A pod as the API server has it, as far as it matters; `more` is of its status."""
    metadata = {
        "namespace": "team-a",
        "name": name,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "labels": {"team": "a", "noise": str(version)},
        "annotations": more.pop("annotations", {}),
    }
    status = {"phase": "Running", "podIPs": [{"ip": ip} for ip in ips], "startTime": "2026-11-29T10:00:00Z", **more}
    return {"metadata": metadata, "spec": {"nodeName": "node1"}, "status": status}


def listing(version: int, *pods: object) -> Answering:
    """Answers with a list."""
    document = {"kind": "PodList", "metadata": {"resourceVersion": str(version)}, "items": list(pods)}
    return lambda _, reply: reply.json(document)


class Lab:
    """A source on a server that gives one list, and then what the test has to say."""

    def __init__(self, directory: Path, first: Answering) -> None:
        self.first = first
        self.lines: queue.Queue[tuple[str, object]] = queue.Queue()
        self.events: queue.Queue[SourceEvent] = queue.Queue()
        self.server = Server(self._answer)
        config = kubeconfig(directory / "kubeconfig", self.server.url)
        self.source = ApiServerSource(config, "node1", ["team"], QUICK)
        self.source.start(self.events.put)

    def tell(self, kind: str, changed: object) -> SourceEvent:
        """Let the API server say this, and return what comes of it."""
        self.lines.put((kind, changed))
        return self.events.get(timeout=LATENCY)

    def close(self) -> None:
        """End everything."""
        self.source.stop()
        self.server.close()

    def _answer(self, request: Request, reply: Reply) -> None:
        if "watch" not in request.query:
            self.first(request, reply)
            return
        reply.begin()
        while not reply.gone():
            with contextlib.suppress(queue.Empty):
                kind, changed = self.lines.get_nowait()
                reply.chunk(json.dumps({"type": kind, "object": changed}).encode() + b"\n")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A node with a pod, a pod of two addresses, and one that has ended; the first event is to be taken."""
    over = pod("over", 3, "10.0.0.3", phase="Succeeded")
    running = Lab(tmp_path, listing(5, pod("p0", 1, "10.0.0.1"), pod("p1", 2, "10.0.0.2", "fd00::2"), over))
    yield running
    running.close()


def told(observations: tuple[Observation, ...]) -> list[tuple[str, str, bool]]:
    """Whose which address is, and whether it is."""
    return [(seen.pod.uid, unpack(seen.ip), seen.present) for seen in observations]


def test_the_list_is_a_replace(lab: Lab) -> None:
    """It asks for the pods of one node, and tells them all."""
    event = lab.events.get(timeout=LATENCY)

    assert isinstance(event, Replace)
    assert told(event.observations) == [
        ("uid-p0", "10.0.0.1", True),
        ("uid-p1", "10.0.0.2", True),
        ("uid-p1", "fd00::2", True),
        ("uid-over", "10.0.0.3", False),
    ]
    assert {seen.pod.labels for seen in event.observations} == {(("team", "a"),)}
    assert lab.server.requests[0].path == "/api/v1/pods"
    assert lab.server.requests[0].query == {"fieldSelector": "spec.nodeName=node1", "resourceVersion": "0"}


def test_pods_come_change_and_go(lab: Lab) -> None:
    """Each change is an update: a new pod, its end, an address that it no longer has, and a pod that is deleted."""
    lab.events.get(timeout=LATENCY)

    events = [
        lab.tell("ADDED", pod("p2", 6, "10.0.0.4")),
        lab.tell("MODIFIED", pod("p2", 7, "10.0.0.4", phase="Failed")),
        lab.tell("MODIFIED", pod("p1", 8, "10.0.0.2")),
        lab.tell("DELETED", pod("p1", 9, "10.0.0.2")),
    ]

    assert all(isinstance(event, Update) for event in events)
    assert [told(event.observations) for event in events] == [
        [("uid-p2", "10.0.0.4", True)],
        [("uid-p2", "10.0.0.4", False)],
        [("uid-p1", "fd00::2", False), ("uid-p1", "10.0.0.2", True)],
        [("uid-p1", "10.0.0.2", False)],
    ]


def test_what_changes_nothing_is_not_told(lab: Lab) -> None:
    """A pod without address, a label that nobody wants, conditions, and the end of a pod that had ended are no news."""
    lab.events.get(timeout=LATENCY)

    for said in (
        ("ADDED", pod("p3", 6)),
        ("MODIFIED", pod("p0", 7, "10.0.0.1", conditions=[{"type": "Ready"}])),
        ("DELETED", pod("over", 8, "10.0.0.3", phase="Succeeded")),
        ("BOOKMARK", {"metadata": {"resourceVersion": "9"}}),
    ):
        lab.lines.put(said)
    event = lab.tell("ADDED", pod("p4", 10, "10.0.0.9"))

    assert told(event.observations) == [("uid-p4", "10.0.0.9", True)]


def test_a_mirror_pod_has_the_uid_that_its_node_knows(lab: Lab) -> None:
    """A static pod's copy at the API server is told by the uid of the pod itself, and goes by it as well."""
    lab.events.get(timeout=LATENCY)
    mirror = pod("static", 6, "10.0.0.5", annotations={"kubernetes.io/config.mirror": "hash"})

    added, deleted = lab.tell("ADDED", mirror), lab.tell("DELETED", mirror)

    assert told(added.observations) == [("hash", "10.0.0.5", True)]
    assert told(deleted.observations) == [("hash", "10.0.0.5", False)]


def test_a_new_list_replaces_all(lab: Lab) -> None:
    """After a 410 what was deleted meanwhile is gone, because the new list does not have it."""
    lab.events.get(timeout=LATENCY)
    lab.first = listing(20, pod("p0", 1, "10.0.0.1"))

    event = lab.tell("ERROR", {"code": 410, "message": "too old"})

    assert isinstance(event, Replace)
    assert told(event.observations) == [("uid-p0", "10.0.0.1", True)]


def test_health_has_the_age_of_the_last_word(lab: Lab) -> None:
    """It is up once the list is there, and how long the API server has been silent is known."""
    lab.events.get(timeout=LATENCY)
    end = time.monotonic() + LATENCY
    while not lab.source.healthy().up and time.monotonic() < end:
        time.sleep(0.005)
    health = lab.source.healthy()

    assert (health.up, health.present) == (True, True)
    assert health.age is not None


def test_the_nodes_name() -> None:
    """The configured name, else that of the downward API, else the host's name in lower case."""
    assert node_name("node-x", {"NODE_NAME": "other"}) == "node-x"
    assert node_name("auto", {"NODE_NAME": "from-env"}) == "from-env"
    assert node_name("auto", {}) == node_name("auto", {"NODE_NAME": " "}) == node_name("auto", {}).lower() != ""
