"""Asking the kubelet's Pods API: decoding a node's pods, and what the library for it costs in memory."""

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
DECODE_MILLISECONDS = 1.0
MEGABYTES = 25.0
DECODINGS = 201
PROCESSES = 9

_WATCH = f"""
import json, os, queue, sys
import netacct.agent, netacct.service  # what an agent has in memory anyway
from netacct import log
from netacct.identity.kubelet_pods_api import KubeletPodsApi

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) * 1024 / 1e6

log.configure("error", "logfmt")
before, threads = resident(), len(os.listdir("/proc/self/task"))
events = queue.Queue()
source = KubeletPodsApi([sys.argv[1]])
source.start(events.put)
assert len(events.get(timeout=30).observations) == 2 * {PODS}
for _ in range({PODS}):
    events.get(timeout=30)
json.dump([resident() - before, len(os.listdir("/proc/self/task")) - threads], sys.stdout)
source.stop()
"""
"""A process that watches a kubelet's pods until each has changed once; prints MB and threads that this added."""


def measure(folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each decoding of all pods of a node; MB and threads that a watch adds to a fresh process."""
    pods = [_pod(number, "10.244.1") for number in range(PODS)]
    changed = [_pod(number, "10.244.2") for number in range(PODS)]
    samples: dict[str, list[float]] = {"bytes": [len(pods[0])], "decode": _decodings(pods), "memory": [], "threads": []}
    for number in range(PROCESSES):
        added, threads = _watched(folder / f"{number}.sock", pods, changed)
        samples["memory"].append(added)
        samples["threads"].append(threads)
    return samples


def figures(samples: dict[str, list[float]]) -> list[Figure]:
    """The rows of the result."""
    rows = [
        Figure(
            "identity",
            f"decode {PODS} pods of the Pods API",
            "ms",
            bench_stats.interval(samples["decode"]),
            f"{samples['bytes'][0]:.0f} bytes each",
            DECODE_MILLISECONDS,
        ),
        Figure(
            "identity",
            f"resident memory that watching {PODS} pods adds",
            "MB",
            bench_stats.interval(samples["memory"]),
            "grpcio and protobuf with it",
            MEGABYTES,
        ),
    ]
    return [*rows, Figure("identity", "threads that it adds", "", bench_stats.interval(samples["threads"]))]


def _decodings(pods: list[bytes]) -> list[float]:
    from netacct.identity import grpc_messages  # noqa: PLC0415 -- after the path is set
    from netacct.identity.kube_proto import from_proto  # noqa: PLC0415 -- as above

    message = grpc_messages.pods_api()["WatchPodsEvent"]
    milliseconds = []
    for _ in range(DECODINGS):
        start = time.perf_counter()
        found = [from_proto(grpc_messages.decode(message, data).pod, ("team",)) for data in pods]
        milliseconds.append((time.perf_counter() - start) * 1e3)
        if not all(pod is not None and len(pod.ips) == 2 for pod in found):
            raise RuntimeError("pods are not decoded")
    return milliseconds


def _watched(path: Path, pods: list[bytes], changed: list[bytes]) -> tuple[float, float]:
    """What a fresh process says that a watch of these pods added."""
    from grpclab import Kubelet  # noqa: PLC0415 -- as above

    path.parent.mkdir(exist_ok=True)
    kubelet = Kubelet(path, pods)
    try:
        with subprocess.Popen([sys.executable, "-c", _WATCH, str(path)], stdout=subprocess.PIPE, text=True) as process:
            while not kubelet.watches and process.poll() is None:
                time.sleep(0.01)
            time.sleep(0.5)
            kubelet.say(*changed)
            answer, _ = process.communicate(timeout=60)
        added: list[float] = json.loads(answer)
        return added[0], added[1]
    finally:
        kubelet.stop()


def _pod(number: int, network: str) -> bytes:
    """An event of a pod as indexed Jobs make them: two containers, their environment, mounts, conditions, history."""
    from grpclab import ADDED, event, field, pod  # noqa: PLC0415 -- as above

    uid = f"3f0c1c5e-0000-4000-8000-{number:012d}"
    labels = {"controller-uid": uid, "job-name": "train", "job-completion-index": str(number)}
    message: Any = pod(
        f"train-{number}-x7k2p",
        f"{network}.{number}",
        f"fd00:{network.replace('.', ':')}::{number:x}",
        uid=uid,
        owner=("Job", "train"),
        labels=labels | {f"batch.kubernetes.io/{key}": value for key, value in labels.items()} | {"team": "research"},
        started=1_790_000_000,
    )
    variables = b"".join(field(7, field(1, f"SETTING_{each}") + field(2, "x" * 60)) for each in range(20))
    mounts = b"".join(field(9, field(1, f"volume-{each}") + field(3, f"/mnt/{each}")) for each in range(5))
    containers = field(2, field(1, "main") + field(2, "registry.example/team/image:1") + variables + mounts) * 2
    conditions = b"".join(field(2, field(1, f"Condition{each}") + field(2, "True")) for each in range(5))
    states = field(8, field(1, "main") + field(6, "registry.example/team/image:1") + field(7, "sha256:" + "0" * 64)) * 2
    annotations = field(12, field(1, "kubernetes.io/config.seen") + field(2, "2026-11-29T12:00:00.000000000Z")) * 3
    history = field(17, field(1, "kubelet") + field(7, field(1, b'{"f:status":{}}' * 60))) * 2
    message.metadata.MergeFromString(annotations + history)
    message.spec.MergeFromString(containers)
    message.status.MergeFromString(conditions + states)
    return event(ADDED, message)
