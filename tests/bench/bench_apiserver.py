"""Asking an API server or a kubelet by HTTP: reading a node's pods, and what the package for it costs in memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_stats
from bench_stats import Figure

sys.path.append(str(Path(__file__).resolve().parents[1] / "unit"))

PODS = 110
READINGS = 51
PROCESSES = 9
PIECE = 65536
"""Bytes that a connection gives at once, at most."""

_FOLLOW = f"""
import json, queue, sys
import netacct.agent, netacct.service  # what an agent has in memory anyway
from netacct import log
from netacct.identity.apiserver import ApiServerSource

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024 / 1e6

log.configure("error", "logfmt")
before = resident()
events = queue.Queue()
source = ApiServerSource(sys.argv[1], "node1")
source.start(events.put)
assert len(events.get(timeout=30).observations) == 2 * {PODS}
for _ in range({PODS}):
    events.get(timeout=30)
json.dump(resident() - before, sys.stdout)
source.stop()
"""
"""A process that follows an API server's pods until each has changed once; prints the MB that this added."""


def measure(folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each reading of all pods of a node; MB that following them adds to a fresh process."""
    folder.mkdir(exist_ok=True)
    document = json.dumps(_listing("10.244.1")).encode()
    return {
        "bytes": [len(document) / PODS],
        "read": _readings(document),
        "memory": [_followed(folder / "kubeconfig") for _ in range(PROCESSES)],
    }


def figures(samples: dict[str, list[float]]) -> list[Figure]:
    """The rows of the result."""
    return [
        Figure(
            "apiserver",
            f"read {PODS} pods in JSON, as of the kubelet's HTTPS port",
            "ms",
            bench_stats.interval(samples["read"]),
            f"{samples['bytes'][0]:.0f} bytes each",
        ),
        Figure(
            "apiserver",
            f"resident memory that following {PODS} pods at an API server adds",
            "MB",
            bench_stats.interval(samples["memory"]),
            "the kubernetes package with it; only with the source `apiserver`",
        ),
    ]


def _readings(document: bytes) -> list[float]:
    from netacct.identity.json_list import JsonList  # noqa: PLC0415 -- after the path is set
    from netacct.identity.kube_pod import from_json  # noqa: PLC0415 -- as above

    milliseconds = []
    for _ in range(READINGS):
        pieces = (document[at : at + PIECE] for at in range(0, len(document), PIECE))
        start = time.perf_counter()
        found = [from_json(item) for item in JsonList(pieces).items()]
        milliseconds.append((time.perf_counter() - start) * 1e3)
        if len(found) != PODS or not all(pod is not None and len(pod.ips) == 2 for pod in found):
            raise RuntimeError("pods are not read")
    return milliseconds


def _followed(kubeconfig: Path) -> float:
    """What a fresh process says that following these pods added."""
    from tlslab import Reply, Request, Server  # noqa: PLC0415 -- as above
    from tlslab import kubeconfig as write  # noqa: PLC0415 -- as above

    def answer(request: Request, reply: Reply) -> None:
        if "watch" not in request.query:
            reply.json(_listing("10.244.1"))
            return
        reply.begin()
        for changed in _listing("10.244.2")["items"]:
            reply.chunk(json.dumps({"type": "MODIFIED", "object": changed}).encode() + b"\n")
        reply.hold()

    server = Server(answer)
    try:
        argv = [sys.executable, "-c", _FOLLOW, write(kubeconfig, server.url)]
        return float(subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout)
    finally:
        server.close()


def _listing(network: str) -> dict[str, Any]:
    return {
        "kind": "PodList",
        "apiVersion": "v1",
        "metadata": {"resourceVersion": "1"},
        "items": [_pod(number, network) for number in range(PODS)],
    }


def _pod(number: int, network: str) -> dict[str, Any]:
    """A pod as indexed Jobs make them: two containers, their environment, mounts, conditions, history."""
    uid = f"3f0c1c5e-0000-4000-8000-{number:012d}"
    variables = [{"name": f"SETTING_{each}", "value": "x" * 60} for each in range(20)]
    mounts = [{"name": f"volume-{each}", "mountPath": f"/mnt/{each}"} for each in range(5)]
    image = {"name": "main", "image": "registry.example/team/image:1"}
    state = {**image, "imageID": "sha256:" + "0" * 64, "ready": True, "state": {"running": {}}}
    ips = [f"{network}.{number}", f"fd00:{network.replace('.', ':')}::{number:x}"]
    return {
        "metadata": {
            "name": f"train-{number}-x7k2p",
            "namespace": "research",
            "uid": uid,
            "resourceVersion": "1",
            "labels": {"controller-uid": uid, "job-name": "train", "batch.kubernetes.io/job-name": "train"},
            "annotations": {"kubernetes.io/config.seen": "2026-11-29T12:00:00.000000000Z"},
            "ownerReferences": [{"kind": "Job", "name": "train", "controller": True, "uid": uid}],
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {f"f:{n}": {} for n in range(60)}}}] * 2,
        },
        "spec": {"nodeName": "node1", "containers": [{**image, "env": variables, "volumeMounts": mounts}] * 2},
        "status": {
            "phase": "Running",
            "podIP": ips[0],
            "podIPs": [{"ip": ip} for ip in ips],
            "startTime": "2026-11-29T12:00:00Z",
            "conditions": [{"type": f"Condition{each}", "status": "True"} for each in range(5)],
            "containerStatuses": [state] * 2,
        },
    }
