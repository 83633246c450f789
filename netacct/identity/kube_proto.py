"""Kubernetes pods as protobuf has them (grpc_messages.PODS_API), made into the slim value of all sources."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from netacct.identity.kube_pod import KubePod, addresses
from netacct.identity.multus import STATUS, secondary
from netacct.identity.workloads import TEMPLATE_HASH


def from_proto(pod: Any, labels: Collection[str] = (), networks: Collection[str] = ()) -> KubePod | None:
    """A pod from a `Pod` message; None where it has no namespace, name or uid, and so is none.

    Args:
        pod: the message, of a kubelet. It lists static pods themselves, and so none of the mirrors that the API server
            has of them (kubernetes, pkg/kubelet/pod/pod_manager.go).
        labels: the keys of the labels to keep, beside what names a workload.
        networks: the secondary networks whose addresses count (see `multus`).
    """
    metadata, status = pod.metadata, pod.status
    namespace, name, uid = metadata.namespace, metadata.name, metadata.uid
    if not (namespace and name and uid):
        return None
    owner = ("", "")
    for each in metadata.ownerReferences:
        if each.controller:
            owner = (each.kind, each.name)
    ips = [each.ip for each in status.podIPs] or [status.podIP]
    if networks and STATUS in metadata.annotations:
        ips += secondary(metadata.annotations[STATUS], networks)
    started = status.startTime.seconds or metadata.creationTimestamp.seconds or None
    host_network = pod.spec.hostNetwork
    return KubePod(
        namespace, name, uid, status.phase, host_network, addresses(ips), owner, kept(metadata.labels, labels), started
    )


def kept(labels: Any, keys: Collection[str]) -> dict[str, str]:
    """Those labels that somebody wants, and what names a workload."""
    return {key: labels[key] for key in (*keys, TEMPLATE_HASH) if key in labels}
