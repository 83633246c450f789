"""Addresses in secondary networks, as Multus writes them, are a pod's only where somebody named the network."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest

from netacct.identity import grpc_messages, kube_pod, multus
from netacct.identity.kube_pod import from_json
from netacct.identity.kube_proto import from_proto
from netacct.model import pack

STATUS = json.dumps(
    [
        {"name": "cbr0", "interface": "eth0", "ips": ["10.244.1.7", "fd00:10:244:1::7"], "default": True, "dns": {}},
        {"name": "team-a/storage", "interface": "net1", "ips": ["10.9.0.5", "fd00:9::5"], "mac": "02:00:00:00:00:01"},
        {"name": "team-a/fabric", "interface": "net2", "ips": ["10.9.0.5"], "device-info": {"type": "pci"}},
    ]
)

NETWORKS = ("team-a/storage",)


def document(annotation: str) -> dict[str, Any]:
    """A pod with this annotation."""
    return {
        "metadata": {"namespace": "a", "name": "p", "uid": "u", "annotations": {multus.STATUS: annotation}},
        "status": {"phase": "Running", "podIPs": [{"ip": "10.244.1.7"}]},
    }


def from_bytes(annotation: str, networks: Collection[str]) -> tuple[bytes, ...]:
    """The addresses of the same pod as the kubelet's Pods API has it."""
    pod = grpc_messages.pods_api()["Pod"]()
    pod.metadata.namespace, pod.metadata.name, pod.metadata.uid = "a", "p", "u"
    pod.metadata.annotations[multus.STATUS] = annotation
    pod.status.podIPs.add(ip="10.244.1.7")
    found = from_proto(grpc_messages.decode(grpc_messages.pods_api()["Pod"], pod.SerializeToString()), (), networks)
    assert found is not None
    return found.ips


def from_text(annotation: str, networks: Collection[str]) -> tuple[bytes, ...]:
    """The addresses of the pod's JSON form."""
    found = from_json(document(annotation), networks)
    assert found is not None
    return found.ips


@pytest.mark.parametrize("read", [from_text, from_bytes])
def test_a_named_network_adds_its_addresses(read: Any) -> None:
    """The pod has the addresses of the network that was named, in both families, besides its own."""
    assert read(STATUS, NETWORKS) == (pack("10.244.1.7"), pack("10.9.0.5"), pack("fd00:9::5"))


@pytest.mark.parametrize("read", [from_text, from_bytes])
@pytest.mark.parametrize("networks", [(), ("team-b/storage",), ("cbr0",)])
def test_others_add_none(read: Any, networks: tuple[str, ...]) -> None:
    """Networks that nobody named, or the default one, add nothing to the pod's own addresses."""
    assert read(STATUS, networks) == (pack("10.244.1.7"),)


@pytest.mark.parametrize("read", [from_text, from_bytes])
@pytest.mark.parametrize(
    "annotation",
    [
        "",
        "nonsense",
        "{}",
        "[1, null]",
        '[{"name": "team-a/storage"}]',
        '[{"name": ["team-a/storage"], "ips": ["10.9.0.5"]}]',
        '[{"name": {}, "ips": ["10.9.0.5"]}]',
        '[{"name": "team-a/storage", "ips": "x"}]',
        '[{"name": "team-a/storage", "ips": [7, "10.9.0.x"]}]',
        "[" * 30000,
        " " * (multus.SIZE_LIMIT + 1) + STATUS,
    ],
    ids=lambda text: text[:40],
)
def test_a_malformed_annotation_adds_nothing(read: Any, annotation: str) -> None:
    """Whatever the annotation holds, the pod keeps its own addresses."""
    assert read(annotation, frozenset(NETWORKS)) == (pack("10.244.1.7"),)


def test_a_secondary_address_is_observed_like_any_other() -> None:
    """Each of the addresses is an observation of the same pod."""
    pod = from_json(document(STATUS), NETWORKS)
    assert pod is not None
    seen = kube_pod.observations("kubelet", [pod], 5.0)
    assert [each.ip for each in seen] == [pack("10.244.1.7"), pack("10.9.0.5"), pack("fd00:9::5")]
    assert {each.pod.uid for each in seen} == {"u"}
