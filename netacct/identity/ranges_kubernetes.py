"""Local ranges by Kubernetes: the node's `spec.podCIDRs`, from the API server. Never used unless somebody names it.

The node controller gives a node one CIDR per family (kube-controller-manager --allocate-node-cidrs) and never changes
them while the Node lives (core/v1, NodeSpec; pkg/controller/nodeipam). Which is also why nothing is taken back when the
Node is deleted: its pods are still here, and a kubelet that registers again brings the new CIDRs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from urllib.parse import urlencode

from netacct import log
from netacct.errors import NetacctError
from netacct.identity.https import Exchange
from netacct.identity.json_list import JsonList
from netacct.identity.kube_api import IN_CLUSTER, KubeApi
from netacct.identity.node import AUTO, node_name
from netacct.identity.ranges_provider import Fact, Told
from netacct.identity.reflector import ANY, Object, Pace, Reflector
from netacct.identity.source import Health
from netacct.model import Network, network
from netacct.policy import canonical, local_range_fault

PROVIDER = "kubernetes"

PATH = "/api/v1/nodes"


class KubernetesRanges:
    """Follows one Node, by a list and a watch.

    Args:
        kubeconfig: whom to ask, and as whom: a path, or `auto` for the ServiceAccount of the pod that this runs in.
        node: the node's name in Kubernetes, or `auto`.
        pace: how long things take.
    """

    name = PROVIDER

    def __init__(self, kubeconfig: str = IN_CLUSTER, node: str = AUTO, pace: Pace | None = None) -> None:
        self._node = node_name(node)
        self._ranges: tuple[Network, ...] = ()
        self._changed: Callable[[tuple[Network, ...]], None] = lambda _: None
        self._listed = threading.Event()
        self._log = log.get(source="kubernetes-ranges", node=self._node)
        self._kubeconfig = kubeconfig
        self._params = {"fieldSelector": f"metadata.name={self._node}"}
        self._reflector = Reflector(KubeApi(kubeconfig), PATH, self._params, self._replace, self._event, pace)

    def read(self, seconds: float) -> Told:
        """Ask once, in this call. Raises NetacctError."""
        target = f"{PATH}?{urlencode({**self._params, 'resourceVersion': ANY})}"
        exchange = Exchange()
        try:
            answer = KubeApi(self._kubeconfig).get(exchange, target, seconds)
            if answer.status != HTTPStatus.OK:
                raise NetacctError(f"the API server answers {answer.status}: {answer.text()}")
            nodes = JsonList(answer.chunks(time.monotonic() + seconds, math.inf)).items()
            return Told(canonical(each for node in nodes if isinstance(node, dict) for each in _pod_cidrs(node)))
        except ValueError as error:
            raise NetacctError(f"what the API server answers: {error}") from error
        finally:
            exchange.close()

    @property
    def facts(self) -> tuple[Fact, ...]:
        """None."""
        return ()

    def start(self, changed: Callable[[tuple[Network, ...]], None]) -> None:
        """Begin to ask, and return without waiting for an answer."""
        self._changed = changed
        self._reflector.start()

    def wait(self, seconds: float) -> None:
        """Wait for the first list."""
        self._listed.wait(seconds)

    def stop(self) -> None:
        """End the thread. Idempotent; there is no second start."""
        self._reflector.stop()

    def healthy(self) -> Health:
        """Whether the last request was granted; `age` is how long ago the API server last said anything."""
        return self._reflector.healthy()

    def _replace(self, objects: Iterator[Object]) -> None:
        nodes = list(objects)
        if not nodes:
            self._log.warning("the API server knows no node of this name, so it has no podCIDRs")
        for node in nodes:
            self._take(node)
        self._listed.set()

    def _event(self, kind: str, changed: Object) -> None:
        if kind != "DELETED":
            self._take(changed)

    def _take(self, node: Object) -> None:
        """What a Node says; one that has no podCIDRs yet, or no good ones, changes nothing."""
        try:
            found = _pod_cidrs(node)
        except ValueError as error:
            self._log.error("podCIDRs are not understood, left as they were", why=str(error))
            return
        if found and found != self._ranges:
            self._ranges = found
            self._log.info("local ranges by podCIDRs", ranges=" ".join(map(str, found)))
            self._changed(found)


def _pod_cidrs(node: Object) -> tuple[Network, ...]:
    """The CIDRs of a Node; none where it has none yet. Raises ValueError for such as cannot be local ranges."""
    spec = node.get("spec")
    said = spec.get("podCIDRs") or [spec.get("podCIDR")] if isinstance(spec, dict) else []
    try:
        found = canonical(network(text) for text in said if text)
    except (ValueError, TypeError):
        raise ValueError(f"{said!r:.100} are no networks") from None
    for fault in filter(None, map(local_range_fault, found)):
        raise ValueError(fault)
    return found
