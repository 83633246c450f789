"""Which workload a pod belongs to, by the names alone."""

from __future__ import annotations

import pytest

from netacct.identity.workloads import LATE_SECONDS, workload

HASH = {"pod-template-hash": "5d4f8c7b9"}
SCHEDULED = 29_906_640  # minutes since 1970: 2026-11-11 00:00 UTC
NOON = SCHEDULED * 60.0


def test_a_replica_set_named_after_its_template_is_a_deployments() -> None:
    """A ReplicaSet whose name ends in the pod's template hash was made by the Deployment of the name before it."""
    assert workload("web-5d4f8c7b9-x2x", "ReplicaSet", "web-5d4f8c7b9", HASH, None) == ("Deployment", "web")


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("web-5d4f8c7b9", {}),
        ("web-5d4f8c7b9", {"pod-template-hash": ""}),
        ("web-5d4f8c7b9", {"pod-template-hash": "7b9"}),
        ("web-5d4f8c7b9", {"rollouts-pod-template-hash": "5d4f8c7b9"}),
        ("-5d4f8c7b9", HASH),
        ("5d4f8c7b9", HASH),
    ],
)
def test_another_replica_set_stays_one(name: str, labels: dict[str, str]) -> None:
    """A ReplicaSet of nobody, or of Argo Rollouts, or whose name only looks like a Deployment's, stays itself."""
    assert workload("p", "ReplicaSet", name, labels, None) == ("ReplicaSet", name)


@pytest.mark.parametrize("late", [-60.0, 0.0, 3600.0, LATE_SECONDS])
def test_a_job_named_by_the_minute_of_its_start_is_a_cron_jobs(late: float) -> None:
    """A Job whose name ends in minutes since 1970, near the time its pod started, was made by a CronJob."""
    assert workload("p", "Job", f"report-{SCHEDULED}", {}, NOON + late) == ("CronJob", "report")


@pytest.mark.parametrize(
    ("name", "started"),
    [
        (f"report-{SCHEDULED}", None),
        (f"report-{SCHEDULED}", NOON - 61.0),
        (f"report-{SCHEDULED}", NOON + LATE_SECONDS + 1.0),
        ("train-20261111", NOON),
        ("train-2026111", NOON),
        (f"{SCHEDULED}", NOON),
        (f"-{SCHEDULED}", NOON),
        (f"report{SCHEDULED}", NOON),
        ("report-\N{ARABIC-INDIC DIGIT TWO}9906640", NOON),
    ],
)
def test_another_job_stays_one(name: str, started: float | None) -> None:
    """A Job that is named by a date, or by a time at which its pod did not start, stays itself."""
    assert workload("p", "Job", name, {}, started) == ("Job", name)


@pytest.mark.parametrize("kind", ["StatefulSet", "DaemonSet", "ReplicationController", "RayCluster", "PyTorchJob"])
def test_another_controller_is_the_workload(kind: str) -> None:
    """What is made by nobody else is the workload, also of a kind that nobody here has heard of."""
    assert workload("p", kind, f"it-{SCHEDULED}", HASH, NOON) == (kind, f"it-{SCHEDULED}")


@pytest.mark.parametrize("owner", [("", ""), ("Job", ""), ("", "x"), ("Node", "worker-1")])
def test_a_pod_without_a_controller_is_its_own_workload(owner: tuple[str, str]) -> None:
    """A bare pod is the workload itself, as is a static pod, told by its node or by the API server."""
    assert workload("debug", *owner, {}, NOON) == ("Pod", "debug")
