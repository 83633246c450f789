"""From a CNI file to the lease: how soon an agent on a node of a real cluster (tests/cluster) knows each new pod.

The plugins' result is a file, written before the pod's containers are started; what its pod sends until the lease opens
is bound to it late, and not lost.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench_stats
from bench_stats import Figure

sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))

PODS = 100
STEP = 2
"""So many pods are made at once."""
MILLISECONDS = 50.0
SHARE = 0.99
_RESULTS = "/var/lib/cni/results"


def measure(folder: Path) -> dict[str, list[float]]:
    """Milliseconds from each pod's file to the reading with which its lease opens.

    Raises MissingError where no cluster can be had here.
    """
    from clusterlab import manifests  # noqa: PLC0415 -- after the path is set
    from clusterlab.cluster import Cluster  # noqa: PLC0415 -- as above

    with Cluster(nodes=1, work_dir=folder) as cluster:
        (node,), (agent,) = cluster.nodes, cluster.agents
        agent.start()
        cluster.namespace("bench")
        spec = manifests.pod_spec(manifests.container())
        for replicas in range(STEP, PODS + 1, STEP):
            cluster.apply(manifests.deployment("bench", "web", spec, replicas))
            cluster.wait_pods("bench", replicas, patience=180)
        opened = {address: pod["since"] for pod in agent.pods() for address in pod["addresses"]}
        written = _written(node.path(_RESULTS))
    return {"lease": [1e3 * (opened[address] - time) for address, time in written.items()]}


def figures(samples: dict[str, list[float]]) -> list[Figure]:
    """The rows of the result."""
    several = samples["lease"]
    median = bench_stats.interval(several)
    detail = f"{len(several)} pods, {STEP} at once, the control plane on the same machine; files' times are 4 ms coarse"
    return [
        Figure("cluster", "CNI file to open lease, median", "ms", median, detail),
        Figure(
            "cluster", "CNI file to open lease, p99", "ms", bench_stats.high_quantile(several, SHARE), "", MILLISECONDS
        ),
    ]


def _written(folder: Path) -> dict[str, float]:
    """When the file of each pod was written (Unix seconds), by the pod's IPv4 address. libcni, libcni/api.go."""
    found = {}
    for path in folder.glob("*-eth0"):
        addresses = (each["address"].partition("/")[0] for each in json.loads(path.read_bytes())["result"]["ips"])
        found[next(address for address in addresses if ":" not in address)] = path.stat().st_mtime
    return found
