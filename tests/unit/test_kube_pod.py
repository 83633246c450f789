"""Pods of Kubernetes in their JSON form, and what is observed of them."""

from __future__ import annotations

import copy
import dataclasses
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netacct import clock
from netacct.identity.kube_pod import KubePod, addresses, from_json, observations
from netacct.model import UNBOUNDED, WHOLE, Observation, Pod, pack

STARTED = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
DOCUMENT: dict[str, Any] = {
    "metadata": {
        "namespace": "team-a",
        "name": "train-0",
        "uid": "3f0c",
        "labels": {"experiment": "scaling-laws", "team": "a"},
        "creationTimestamp": "2026-11-29T11:59:58Z",
        "ownerReferences": [
            {"kind": "Workflow", "name": "w"},
            {"kind": "Job", "name": "train", "controller": True},
        ],
    },
    "spec": {"nodeName": "worker-3"},
    "status": {
        "phase": "Running",
        "startTime": "2026-11-29T12:00:00Z",
        "podIP": "10.0.0.1",
        "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}],
    },
}
POD = KubePod(
    "team-a",
    "train-0",
    "3f0c",
    "Running",
    False,
    (pack("10.0.0.1"), pack("fd00::1")),
    ("Job", "train"),
    {"experiment": "scaling-laws", "team": "a"},
    STARTED,
)


def changed(path: str, value: object) -> dict[str, Any]:
    """The document with another value at a dotted path."""
    document = copy.deepcopy(DOCUMENT)
    part = document
    *parents, last = path.split(".")
    for name in parents:
        part = part[name]
    part[last] = value
    return document


def parsed(document: dict[str, Any]) -> KubePod:
    """The pod of a document, which is one."""
    pod = from_json(document)
    assert pod is not None
    return pod


def test_a_pod_is_what_its_document_says() -> None:
    """Names, phase, addresses of both families, the controller among the owners, labels and start are taken."""
    assert from_json(DOCUMENT) == POD


def test_a_mirror_pod_has_the_uid_that_its_node_knows() -> None:
    """The API server's copy of a static pod says by an annotation which uid CNI and cgroups know the pod by."""
    document = changed("metadata.annotations", {"kubernetes.io/config.mirror": "8d1e"})
    assert parsed(document).uid == "8d1e"


@pytest.mark.parametrize("path", ["metadata.namespace", "metadata.name", "metadata.uid", "metadata"])
@pytest.mark.parametrize("value", [None, "", 7, ["x"]])
def test_what_has_no_name_or_uid_is_no_pod(path: str, value: object) -> None:
    """Without namespace, name and uid, nobody can be told."""
    assert from_json(changed(path, value)) is None


def test_what_is_no_object_is_no_pod() -> None:
    """A list of pods with anything but objects in it is read without these."""
    items: list[Any] = [[], None, "pod", 3]
    assert [from_json(item) for item in items] == [None] * 4


@pytest.mark.parametrize(
    ("path", "value", "field", "expected"),
    [
        ("status", None, "ips", ()),
        ("status", None, "phase", ""),
        ("status.podIPs", None, "ips", (pack("10.0.0.1"),)),
        ("status.podIPs", [{"ip": "10.0.0.1"}, {"ip": "nonsense"}, {}, None], "ips", (pack("10.0.0.1"),)),
        ("status.podIPs", [{"ip": "10.0.0.7"}, {"ip": "10.0.0.7"}], "ips", (pack("10.0.0.7"),)),
        ("status.podIPs", ["10.0.0.7"], "ips", (pack("10.0.0.1"),)),
        ("metadata.labels", {"a": "b", "c": 3, "d": None}, "labels", {"a": "b"}),
        ("metadata.labels", ["a"], "labels", {}),
        ("metadata.ownerReferences", [{"kind": "Job", "name": "train"}], "owner", ("", "")),
        ("metadata.ownerReferences", ["Job", None], "owner", ("", "")),
        ("metadata.ownerReferences", [{"kind": 1, "name": "x", "controller": True}], "owner", ("", "x")),
        ("metadata.annotations", ["x"], "uid", "3f0c"),
        ("spec.hostNetwork", True, "host_network", True),
        ("spec.hostNetwork", "true", "host_network", False),
        ("spec", None, "host_network", False),
    ],
)
def test_what_is_malformed_is_left_out(path: str, value: object, field: str, expected: object) -> None:
    """A part of another type than Kubernetes gives it counts as missing, and spoils nothing else."""
    assert getattr(parsed(changed(path, value)), field) == expected


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("2026-11-29T12:00:00Z", 0.0),
        ("2026-11-29T12:00:00.250000000Z", 0.25),
        ("2026-11-29T13:00:01+01:00", 1.0),
        (None, -2.0),
        ("", -2.0),
        ("yesterday", -2.0),
        (1764417600, -2.0),
        ("2026-11-29T12:00:00", -2.0),
        ("0001-01-01T00:00:00Z", -2.0),
    ],
)
def test_a_start_that_is_none_is_the_creation(text: object, offset: float) -> None:
    """Times are RFC 3339 with an offset; where the start is none of that, the pod's creation stands for it."""
    assert parsed(changed("status.startTime", text)).started == STARTED + offset


def test_a_pod_without_times_has_none() -> None:
    """Where neither start nor creation is known, the sandbox is of unknown age."""
    document = changed("status.startTime", None)
    document["metadata"]["creationTimestamp"] = None
    pod = parsed(document)
    assert pod.started is None
    assert {seen.created for seen in observations("kubelet", [pod], 9.0)} == {UNBOUNDED}


def test_a_pod_is_observed_once_per_address() -> None:
    """Each address is an observation with workload, start in seconds since boot, and the labels that were asked for."""
    seen = observations("kubelet", [POD], 9.0, ["experiment", "absent"])
    whose = Pod("team-a", "train-0", "3f0c", "Job", "train", (("experiment", "scaling-laws"),))
    created = clock.from_wall(STARTED)
    assert [each.created for each in seen] == pytest.approx([created, created], abs=1.0)
    assert [(each.source, each.ip, each.pod, each.sandbox, each.seen_at, each.present) for each in seen] == [
        ("kubelet", ip, whose, "", 9.0, True) for ip in POD.ips
    ]


def test_a_start_in_the_future_is_now() -> None:
    """A wall clock that was set back makes no pod younger than all that come after it."""
    late = dataclasses.replace(POD, started=time.time() + 3600)
    assert {seen.created for seen in observations("kubelet", [late], 9.0)} == {9.0}


def test_a_label_that_was_not_asked_for_is_not_kept() -> None:
    """Without an allow-list, no label comes along, so that one that changes changes nothing."""
    assert {seen.pod.labels for seen in observations("kubelet", [POD], 9.0)} == {()}


@pytest.mark.parametrize(("phase", "present"), [("Pending", True), ("Unknown", True), ("", True), ("Failed", False)])
def test_an_ended_pod_owns_nothing(phase: str, present: bool) -> None:
    """A pod that has ended is observed as gone, although it keeps its address; one that has not begun owns it."""
    seen = observations("kubelet", [parsed(changed("status.phase", phase))], 9.0)
    assert {each.present for each in seen} == {present}


def test_a_host_network_pod_has_no_address_of_its_own() -> None:
    """The node's addresses, which a hostNetwork pod shows as its own, are observed as the whole node's."""
    (seen,) = observations("kubelet", [parsed(changed("spec.hostNetwork", True))], 9.0)
    assert seen.ip == WHOLE


def test_a_static_pod_is_one_workload_to_its_node_and_to_the_api_server() -> None:
    """Told by the kubelet (no owner) or by the API server (owned by its Node), it is the same pod and workload."""
    mirror = changed("metadata.ownerReferences", [{"kind": "Node", "name": "worker-3", "controller": True}])
    mirror["metadata"] |= {"uid": "copy", "annotations": {"kubernetes.io/config.mirror": "3f0c"}}
    own = changed("metadata.ownerReferences", None)

    def pods(document: dict[str, Any]) -> list[Pod]:
        return [seen.pod for seen in observations("x", [parsed(document)], 9.0)]

    assert pods(mirror) == pods(own) == [Pod("team-a", "train-0", "3f0c", "Pod", "train-0")] * 2


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
paths = st.sampled_from(
    ["metadata", "spec", "status", *[f"metadata.{key}" for key in DOCUMENT["metadata"]]]
    + [f"status.{key}" for key in DOCUMENT["status"]]
)


@given(paths, values)
def test_no_document_breaks_the_reader(path: str, value: object) -> None:
    """Whatever stands at any place of the document, it is read or is no pod; and observing it works."""
    pod = from_json(changed(path, value))
    seen: tuple[Observation, ...] = observations("kubelet", [pod] if pod else [], 9.0)
    assert len(seen) <= 2


def test_addresses_are_packed_once_each() -> None:
    """Addresses in whatever spelling are each there once, in their order."""
    assert addresses(["fd00::1", "x", "FD00:0::1", "10.0.0.1", ""]) == (pack("fd00::1"), pack("10.0.0.1"))


@pytest.mark.parametrize("text", ["127.0.0.1", "224.0.0.1", "255.255.255.255", "fe80::1", "::", "ff02::1"])
def test_an_address_that_no_pod_can_own_is_left_out(text: str) -> None:
    """An address that can be in no local range is not told, also where a pod names it beside a good one."""
    assert addresses([text, "10.0.0.1"]) == (pack("10.0.0.1"),)
