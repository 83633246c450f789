"""Manifests of what tests run: short functions that give plain objects, to be changed before they are applied."""

from __future__ import annotations

from typing import Any

from clusterlab import image

Manifest = dict[str, Any]


def container(*argv: str, host_port: int = 0, port: int = 0) -> Manifest:
    """A container of the image `box`; without arguments it does nothing, until it is told to end."""
    made: Manifest = {"name": "main", "image": image.NAME, "imagePullPolicy": "Never"}
    if argv:
        made["command"] = list(argv)
    if port:
        made["ports"] = [{"containerPort": port, **({"hostPort": host_port} if host_port else {})}]
        # who waits for pods wants the server to listen; asked over loopback, which nobody counts
        asked = ["/bin/traffic", "tcp", "127.0.0.1", str(port), "16", "0"]
        made["startupProbe"] = {"exec": {"command": asked}, "periodSeconds": 1, "failureThreshold": 30}
    if host_port:  # one for each protocol
        made["ports"] = [{**made["ports"][0], "protocol": protocol} for protocol in ("TCP", "UDP")]
    return made


def pod_spec(*containers: Manifest, node: str = "", **settings: Any) -> Manifest:
    """A pod's spec; `node` binds it to a node by its label."""
    spec: Manifest = {"containers": list(containers), "terminationGracePeriodSeconds": 2, **settings}
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return spec


def pod(namespace: str, name: str, spec: Manifest, **labels: str) -> Manifest:
    """A pod that nobody owns."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _meta(namespace, name, labels), "spec": spec}


def deployment(namespace: str, name: str, spec: Manifest, replicas: int = 1) -> Manifest:
    """A Deployment; its pods have the label app=NAME."""
    return {"apiVersion": "apps/v1", "kind": "Deployment", **_replicated(namespace, name, spec, replicas)}


def stateful_set(namespace: str, name: str, spec: Manifest, replicas: int = 1) -> Manifest:
    """A StatefulSet whose pods start at once, on different nodes as far as there are; label app=NAME."""
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"app": name}}}
    term = {"weight": 100, "podAffinityTerm": apart}
    spread = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
    made: Manifest = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        **_replicated(namespace, name, {**spec, "affinity": spread}, replicas),
    }
    made["spec"] |= {"serviceName": name, "podManagementPolicy": "Parallel"}
    return made


def daemon_set(namespace: str, name: str, spec: Manifest) -> Manifest:
    """A DaemonSet; label app=NAME."""
    made: Manifest = {"apiVersion": "apps/v1", "kind": "DaemonSet", **_replicated(namespace, name, spec, 0)}
    del made["spec"]["replicas"]
    return made


def job(namespace: str, name: str, spec: Manifest, completions: int = 1) -> Manifest:
    """An indexed Job whose pods run at once and are not retried; label app=NAME."""
    once = {**spec, "restartPolicy": "Never"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _meta(namespace, name, {"app": name}),
        "spec": {
            "completions": completions,
            "parallelism": completions,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {"metadata": {"labels": {"app": name}}, "spec": once},
        },
    }


def cron_job(namespace: str, name: str, spec: Manifest) -> Manifest:
    """A CronJob for each minute, one pod each; label app=NAME."""
    template = job(namespace, name, spec)
    spec = {"schedule": "* * * * *", "jobTemplate": {"spec": template["spec"]}}
    return {"apiVersion": "batch/v1", "kind": "CronJob", "metadata": _meta(namespace, name, {}), "spec": spec}


def service(namespace: str, name: str, port: int) -> Manifest:
    """A ClusterIP of both families, TCP and UDP, before the pods with app=NAME."""
    ports = [{"name": each.lower(), "protocol": each, "port": port} for each in ("TCP", "UDP")]
    spec = {"selector": {"app": name}, "ipFamilyPolicy": "RequireDualStack", "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(namespace, name, {}), "spec": spec}


def _meta(namespace: str, name: str, labels: dict[str, str]) -> Manifest:
    return {"namespace": namespace, "name": name, "labels": labels}


def _replicated(namespace: str, name: str, spec: Manifest, replicas: int) -> Manifest:
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "metadata": _meta(namespace, name, labels),
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template},
    }
