"""The source `apiserver`: the pods of this node from the API server. Never used unless somebody names it.

One list and one watch with `spec.nodeName` as field selector, by which API servers index pods: such a watch is woken
for its own node's pods only. It costs the API server what a kubelet's own watch costs, once more for each node.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from netacct import clock, log
from netacct.identity import kube_pod
from netacct.identity.kube_api import IN_CLUSTER, KubeApi
from netacct.identity.node import AUTO, node_name
from netacct.identity.polling import timeless
from netacct.identity.reflector import Object, Pace, Reflector
from netacct.identity.source import Health, Replace, SourceEvent, Update
from netacct.model import Observation

SOURCE = "apiserver"

PATH = "/api/v1/pods"


class ApiServerSource:
    """Follows the pods of one node; each list is a `Replace`, each change that matters an `Update`.

    While the API server cannot be reached, what it said last holds.

    Args:
        kubeconfig: whom to ask, and as whom: a path, or `auto` for the ServiceAccount of the pod that this runs in.
        node: the node's name in Kubernetes, or `auto`.
        labels: the keys of the pod labels to keep.
        networks: the secondary networks whose addresses count (see `multus`).
        pace: how long things take.
    """

    name = SOURCE

    def __init__(
        self,
        kubeconfig: str = IN_CLUSTER,
        node: str = AUTO,
        labels: Collection[str] = (),
        pace: Pace | None = None,
        networks: Collection[str] = (),
    ) -> None:
        self._node, self._labels, self._networks = node_name(node), frozenset(labels), frozenset(networks)
        self._emit: Callable[[SourceEvent], None] = lambda _: None
        self._told: dict[str, tuple[Observation, ...]] = {}
        self._log = log.get(source=self.name, node=self._node)
        params = {"fieldSelector": f"spec.nodeName={self._node}"}
        self._reflector = Reflector(KubeApi(kubeconfig), PATH, params, self._replace, self._event, pace)

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Begin, in a thread: the API server may be slow."""
        self._emit = emit
        self._reflector.start()

    def stop(self) -> None:
        """End the thread. Idempotent; a stopped source starts no more."""
        self._reflector.stop()

    def healthy(self) -> Health:
        """Whether the last request was granted; `age` is how long ago the API server last said anything."""
        return self._reflector.healthy()

    def _replace(self, objects: Iterator[Object]) -> None:
        at = clock.now()
        told = {_uid(each): self._observe(each, at) for each in objects}
        self._told = told
        if not told:
            self._log.info("the API server knows no pod on this node: is this its name?")
        self._emit(Replace(self.name, tuple(seen for all_seen in told.values() for seen in all_seen), at))

    def _event(self, kind: str, changed: Object) -> None:
        """Tell what an event changes; most are about conditions and containers, and change nothing here."""
        at = clock.now()
        uid = _uid(changed)
        before = self._told.pop(uid, ())
        now = () if kind == "DELETED" else self._observe(changed, at)
        if now:
            self._told[uid] = now
        kept = {seen.ip for seen in now}
        gone = [replace(seen, present=False, seen_at=at) for seen in before if seen.present and seen.ip not in kept]
        if gone or not {timeless(seen) for seen in now} <= {timeless(seen) for seen in before}:
            self._emit(Update(self.name, (*gone, *now)))

    def _observe(self, each: Object, at: float) -> tuple[Observation, ...]:
        pod = kube_pod.from_json(each, self._networks)
        return () if pod is None else kube_pod.observations(self.name, (pod,), at, self._labels)


def _uid(each: Object) -> str:
    """By which the API server tells objects apart, also those of static pods."""
    metadata = each.get("metadata")
    return str(metadata.get("uid")) if isinstance(metadata, dict) else ""
