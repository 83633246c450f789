"""What netacct needs of a Kubernetes pod, as all sources that speak of v1.Pod objects tell it (KubePod)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from socket import AF_INET, AF_INET6, inet_pton
from typing import Any

from netacct import clock
from netacct.identity.multus import STATUS, secondary
from netacct.identity.workloads import workload
from netacct.model import UNBOUNDED, WHOLE, Address, Observation, Pod
from netacct.policy import can_be_local

MIRROR = "kubernetes.io/config.mirror"
"""The annotation by which the API server's copy of a static pod names the uid that the node knows it by."""

ENDED = frozenset({"Succeeded", "Failed"})
"""The phases of pods that own nothing, although they keep their address in `status` (kubernetes/kubernetes#47806)."""


@dataclass(frozen=True, slots=True)
class KubePod:
    """A pod (k8s.io/api core/v1, Pod), as far as it matters here.

    `uid` is the one that its node knows it by, also for static pods. `ips` are `status.podIPs`, and the addresses in
    secondary networks that somebody named; of a hostNetwork pod they are the node's. `owner` is its controller's
    (kind, name), or ("", ""). `started` is Unix seconds: `status.startTime`, else its creation; None where there is
    neither.
    """

    namespace: str
    name: str
    uid: str
    phase: str
    host_network: bool
    ips: tuple[Address, ...]
    owner: tuple[str, str]
    labels: Mapping[str, str]
    started: float | None


def from_json(document: Mapping[str, Any], networks: Collection[str] = ()) -> KubePod | None:
    """A pod from its JSON form, without what is malformed; None where it has no name or uid, and so is none.

    Args:
        document: a v1.Pod.
        networks: the secondary networks whose addresses count (see `multus`).
    """
    metadata, spec, status = (_mapping(_mapping(document).get(part)) for part in ("metadata", "spec", "status"))
    namespace, name = _text(metadata.get("namespace")), _text(metadata.get("name"))
    annotations = _mapping(metadata.get("annotations"))
    uid = _text(annotations.get(MIRROR)) or _text(metadata.get("uid"))
    if not (namespace and name and uid):
        return None
    texts = [_text(_mapping(each).get("ip")) for each in _sequence(status.get("podIPs"))]
    more = secondary(_text(annotations.get(STATUS)), networks) if networks else []
    owners = [_mapping(each) for each in _sequence(metadata.get("ownerReferences"))]
    owner = next((each for each in owners if each.get("controller") is True), {})
    return KubePod(
        namespace,
        name,
        uid,
        _text(status.get("phase")),
        spec.get("hostNetwork") is True,
        addresses([*(texts if addresses(texts) else [_text(status.get("podIP"))]), *more]),
        (_text(owner.get("kind")), _text(owner.get("name"))),
        {key: value for key, value in _mapping(metadata.get("labels")).items() if isinstance(value, str)},
        _time(status.get("startTime")) or _time(metadata.get("creationTimestamp")),
    )


def addresses(texts: Iterable[str]) -> tuple[Address, ...]:
    """Addresses from their text forms, each once, without what is none and what no pod can own (link-local ones)."""
    found: dict[Address, None] = {}
    for text in texts:
        try:  # a tenth of what `model.pack` takes, which matters where a node's pods are listed
            ip = inet_pton(AF_INET6 if ":" in text else AF_INET, text)
        except (OSError, ValueError):
            continue
        if can_be_local(ip):
            found[ip] = None
    return tuple(found)


def observations(
    source: str, pods: Iterable[KubePod], at: float, labels: Collection[str] = ()
) -> tuple[Observation, ...]:
    """What `source` observes when it sees these pods at `at` (CLOCK_BOOTTIME seconds): one observation an address.

    Args:
        source: its name.
        pods: all pods of this node that it knows.
        at: when it learnt it.
        labels: the keys of the labels to keep. Others may change without anybody noticing.
    """
    seen: list[Observation] = []
    for pod in pods:
        kind, name = workload(pod.name, *pod.owner, pod.labels, pod.started)
        kept = tuple(sorted((key, pod.labels[key]) for key in labels if key in pod.labels))
        whose = Pod(pod.namespace, pod.name, pod.uid, kind, name, kept)
        created = UNBOUNDED if pod.started is None else min(clock.from_wall(pod.started), at)
        ips = (WHOLE,) if pod.host_network else pod.ips
        owns = pod.phase not in ENDED
        seen += [Observation(source, ip, whose, "", created, at, present=owns) for ip in ips]
    return tuple(seen)


def _time(text: object) -> float | None:
    """Unix seconds of an RFC 3339 time; None for anything else, and for Go's zero time, which is none."""
    try:
        time = datetime.fromisoformat(_text(text))
    except ValueError:
        return None
    # Without an offset it would be read in the time zone of this process.
    return time.timestamp() if time.tzinfo and time.year > 1 else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _sequence(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
