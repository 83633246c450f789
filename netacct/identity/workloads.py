"""Which workload a pod belongs to, by its controller's name and the pod's labels: pure, and without an API call.

A pod names its controller (`metadata.ownerReferences`), and two kinds of controllers are made by others, after whom
they are named: a Deployment's ReplicaSet NAME-HASH, where HASH is also the pod's label `pod-template-hash`, and a
CronJob's Job NAME-MINUTES, where MINUTES is the scheduled time in minutes since 1970 (kubernetes, in pkg/controller:
deployment/sync.go, cronjob/utils.go). What does not prove itself to be one of these stays what the pod says.

A pod without a controller is a workload of its own: so are static pods, whose copies in the API server name their Node
as controller (kubernetes, pkg/kubelet/pod/mirror_client.go), while the node itself knows of none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TEMPLATE_HASH = "pod-template-hash"
"""The label that a Deployment puts on its pods. Argo Rollouts has another name for it: its ReplicaSets stay those."""

_SCHEDULED = re.compile(r"(.+)-([0-9]{8,10})")

LATE_SECONDS = 7 * 86400.0
"""So long after its time may a CronJob's pod start: a Job named by a date (train-20261129) is not mistaken for one."""


BARE = "Pod"
"""The kind of workload that a pod without a controller is."""


def workload(pod: str, kind: str, name: str, labels: Mapping[str, str], started: float | None) -> tuple[str, str]:
    """The workload (kind, name) of a pod; never empty.

    Args:
        pod: its name.
        kind: of its controller, as `ReplicaSet`; "" where it has none.
        name: of its controller.
        labels: the pod's.
        started: when the pod was made or started, Unix seconds; None where nobody knows.
    """
    if kind == "ReplicaSet":
        suffix = "-" + labels.get(TEMPLATE_HASH, "")
        if len(suffix) > 1 and name.endswith(suffix) and name != suffix:
            return "Deployment", name.removesuffix(suffix)
    if kind == "Job" and started is not None and (match := _SCHEDULED.fullmatch(name)):
        scheduled = int(match[2]) * 60
        if -60.0 <= started - scheduled <= LATE_SECONDS:
            return "CronJob", match[1]
    return (kind, name) if kind and name and kind != "Node" else (BARE, pod)
