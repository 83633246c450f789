"""Pods that are decoded from bytes which no protobuf library made."""

from __future__ import annotations

import pytest
from grpclab import field, varint

from netacct.identity import grpc_messages
from netacct.identity.kube_pod import KubePod
from netacct.identity.kube_proto import from_proto
from netacct.model import pack


def fixed(number: int, width: int) -> bytes:
    """A field of wire type 5 (4 bytes) or 1 (8 bytes), which nothing in a pod has, today."""
    return varint(number << 3 | {4: 5, 8: 1}[width]) + b"\xab" * width


def entry(key: str, value: str) -> bytes:
    """What a map holds."""
    return field(1, key) + field(2, value)


METADATA = b"".join(
    (
        field(1, "train-7d9c-x2x4z"),
        field(2, "train-7d9c-"),  # generateName
        field(3, "team-a"),
        field(4, ""),  # selfLink
        field(5, "3f0c1c5e-0000-4000-8000-000000000001"),
        field(6, "123456"),  # resourceVersion
        field(7, 3),  # generation
        field(8, field(1, 1_790_000_000) + field(2, 5)),  # creationTimestamp
        field(11, entry("experiment", "scaling-laws")),
        field(11, entry("pod-template-hash", "7d9c")),
        field(11, entry("nobody", "wants this")),
        field(12, entry("kubernetes.io/config.source", "api")),  # annotations
        field(13, field(1, "Node") + field(3, "n1") + field(4, "uid-n1") + field(5, "v1")),
        field(
            13,
            field(1, "ReplicaSet") + field(3, "train-7d9c") + field(4, "uid-rs") + field(5, "apps/v1") + field(6, 1),
        ),
        field(17, field(1, "kubelet") + field(2, "Update") + field(7, field(1, b'{"f:status":{}}'))),  # managedFields
        fixed(900, 4),
    )
)
SPEC = b"".join(
    (
        field(2, field(1, "main") + field(2, "registry/image") + field(7, field(1, "HOME") + field(2, "/"))),
        field(3, "Always"),
        field(4, 30),
        field(10, "node1"),
        field(901, 1 << 63),
        fixed(902, 8),
    )
)
STATUS = b"".join(
    (
        field(1, "Running"),
        field(2, field(1, "Ready") + field(2, "True")),
        field(5, "192.168.50.11"),
        field(6, "10.244.1.7"),
        field(7, field(1, 1_790_000_020)),
        field(12, field(1, "10.244.1.7")),
        field(16, field(1, "192.168.50.11")),
        field(12, field(1, "fd00:10:244:1::7")),
        field(9, "BestEffort"),
    )
)
POD = fixed(99, 8) + field(1, METADATA) + field(2, SPEC) + field(77, "unknown") + field(3, STATUS)


def decoded(data: bytes, *labels: str) -> KubePod | None:
    """The pod of an event of these bytes."""
    event = grpc_messages.decode(grpc_messages.pods_api()["WatchPodsEvent"], data)
    return from_proto(event.pod, labels)


def test_a_pod_from_its_bytes() -> None:
    """Each field is read by its number in Kubernetes' own files, and the many that have none here are skipped."""
    assert decoded(field(1, 2) + field(2, POD), "experiment", "absent") == KubePod(
        "team-a",
        "train-7d9c-x2x4z",
        "3f0c1c5e-0000-4000-8000-000000000001",
        "Running",
        host_network=False,
        ips=(pack("10.244.1.7"), pack("fd00:10:244:1::7")),
        owner=("ReplicaSet", "train-7d9c"),
        labels={"experiment": "scaling-laws", "pod-template-hash": "7d9c"},
        started=1_790_000_020.0,
    )


def test_a_static_pod_from_its_bytes() -> None:
    """A hostNetwork pod that has not started yet counts from its creation, and one podIP is as good as a list."""
    metadata = field(1, "etcd-n1") + field(3, "kube-system") + field(5, "ab" * 16) + field(8, field(1, 1_790_000_000))
    pod = field(1, metadata) + field(2, field(11, 1)) + field(3, field(1, "Pending") + field(6, "192.168.50.11"))
    found = decoded(field(1, 1) + field(2, pod))
    assert found is not None
    assert (found.host_network, found.started) == (True, 1_790_000_000.0)
    assert (found.ips, found.owner) == ((pack("192.168.50.11"),), ("", ""))


def test_a_deleted_pod_from_its_bytes() -> None:
    """Of a pod with name, namespace and uid alone all else is empty."""
    bare = field(1, field(1, "train-0") + field(3, "team-a") + field(5, "u0"))
    assert decoded(field(1, 3) + field(2, bare)) == KubePod(
        "team-a", "train-0", "u0", "", host_network=False, ips=(), owner=("", ""), labels={}, started=None
    )


@pytest.mark.parametrize("missing", [1, 3, 5])
def test_what_has_no_name(missing: int) -> None:
    """A pod without a name, namespace or uid is none."""
    metadata = b"".join(field(number, "x") for number in (1, 3, 5) if number != missing)
    assert decoded(field(1, 1) + field(2, field(1, metadata))) is None


@pytest.mark.parametrize(
    "garbage",
    [
        field(1, 1) + field(2, POD)[:-3],
        field(1, 1) + field(2, field(1, POD[:40])),
        field(2, field(1, field(1, b"\xff\xfe"))),
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x0c",
    ],
    ids=["cut", "cut inside", "no UTF-8", "other words", "a group's end"],
)
def test_garbage(garbage: bytes) -> None:
    """What is no protobuf, or has a name that is no text, is an error in words that name the message."""
    with pytest.raises(ValueError, match="no WatchPodsEvent"):
        decoded(garbage)


def test_a_sandbox_from_its_bytes() -> None:
    """CRI's sandboxes and their status are read by the numbers of its api.proto, and unknown fields are skipped."""
    metadata = field(1, "train-0") + field(2, "u0") + field(3, "team-a") + field(4, 2)
    sandbox = field(1, "s0") + field(2, metadata) + field(3, 0) + field(4, 1_790_000_000_123_456_789)
    sandbox += field(5, entry("experiment", "x")) + field(6, entry("a", "b")) + field(7, "runc")
    types = grpc_messages.cri()
    (item,) = grpc_messages.decode(types["ListPodSandboxResponse"], field(1, sandbox)).items
    assert (item.id, item.metadata.name, item.metadata.uid, item.metadata.namespace) == (
        "s0",
        "train-0",
        "u0",
        "team-a",
    )
    assert (item.state, item.created_at, dict(item.labels)) == (0, 1_790_000_000_123_456_789, {"experiment": "x"})
    network = field(1, "10.244.1.7") + field(2, field(1, "fd00::7"))
    linux = field(1, field(2, field(1, 2) + field(2, 1)))
    status = field(1, "s0") + field(2, metadata) + field(3, 1) + field(5, network) + field(6, linux) + field(9, "runc")
    data = field(1, status) + field(2, entry("info", "{}")) + field(4, 5)
    found = grpc_messages.decode(types["PodSandboxStatusResponse"], data).status
    assert (found.state, found.network.ip, found.linux.namespaces.options.network) == (1, "10.244.1.7", 2)
    assert [each.ip for each in found.network.additional_ips] == ["fd00::7"]


def test_what_is_asked() -> None:
    """The requests are the bytes that api.proto prescribes, also where READY, a zero, is what is asked for."""
    types = grpc_messages.cri()
    request = types["ListPodSandboxRequest"]()
    request.filter.state.state = 0
    assert request.SerializeToString() == field(1, field(2, b""))
    assert types["PodSandboxStatusRequest"](pod_sandbox_id="s0").SerializeToString() == field(1, "s0")
