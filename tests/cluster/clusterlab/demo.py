"""The demo: a cluster, an experiment, and what was sent beside what was counted per namespace, workload and pod."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from clusterlab.cluster import Cluster
from clusterlab.experiment import NAMESPACES, Experiment
from clusterlab.truth import Count
from netacct.cli.output import table
from netacct.demo import exposition

_NOTHING = Count(0, 0)
_LEVELS = ("namespace", "workload", "pod")
_HEADER = ("NAMESPACE", "WORKLOAD", "POD", "DIRECTION", "TRAFFIC", "SENT", "COUNTED", "DIFFERENCE")


class Key(NamedTuple):
    """One series of the whole cluster; `name` is a pod, KIND/WORKLOAD, or nothing."""

    level: str
    namespace: str
    name: str
    direction: str
    traffic: str


Sums = dict[Key, Count]


def run(cluster: Cluster, *, keep: bool) -> bool:
    """Run an experiment in a cluster that is up, and print the outcome; returns whether every series is exact.

    Args:
        cluster: with agents, not started.
        keep: leave servers and agents running.
    """
    for agent in cluster.agents:
        agent.start()
    began = time.monotonic()
    experiment = Experiment(cluster)
    experiment.begin()
    experiment.run("demo")
    print(f"sent for {time.monotonic() - began:.0f} s; waiting until pods are quiet", flush=True)
    rows = compare(cluster)
    if not keep:
        experiment.__exit__()
    print(table(_HEADER, [_cells(*row) for row in rows], frozenset({5, 6, 7})), end="")
    wrong = sum(sent != counted for _, sent, counted in rows)
    sums = ", ".join(f"{sum(key.level == level for key, _, _ in rows)} of {level}s" for level in _LEVELS)
    verdict = "every one exact, bytes and packets" if rows and not wrong else f"{wrong} of them differ"
    print(f"{len(rows)} series ({sums}) on {len(cluster.nodes)} nodes: {verdict}")
    return bool(rows) and not wrong


def compare(cluster: Cluster) -> list[tuple[Key, Count, Count]]:
    """Every series of the experiment's namespaces, all nodes together: what pods sent, and what agents counted."""
    sent = _sent(cluster)
    counted = _counted(agent.page() for agent in cluster.agents)
    keys = sorted({*sent, *counted}, key=lambda key: (_LEVELS.index(key.level), key))
    return [(key, sent.get(key, _NOTHING), counted.get(key, _NOTHING)) for key in keys]


def _sent(cluster: Cluster) -> Sums:
    owners = _owners(cluster)
    sums: Sums = {}
    for totals in cluster.measure().sent.values():
        for series, count in totals.items():
            workload = owners.get((series.namespace, series.pod), "unknown")
            for level, name in (("namespace", ""), ("workload", workload), ("pod", series.pod)):
                key = Key(level, series.namespace, name, series.direction, series.traffic)
                sums[key] = sums.get(key, _NOTHING).plus(count)
    return {key: count for key, count in sums.items() if key.namespace in NAMESPACES}


def _counted(pages: Iterable[str]) -> Sums:
    sums: Sums = {}
    for page in pages:
        for series, count in exposition.totals(page).items():
            if series.level in _LEVELS and series.namespace in NAMESPACES:
                key = Key(series.level, series.namespace, series.name, series.direction, series.traffic)
                sums[key] = sums.get(key, _NOTHING).plus(Count(count.bytes, count.packets))
    return sums


def _owners(cluster: Cluster) -> dict[tuple[str, str], str]:
    """KIND/NAME of the workload of each pod, as the API server tells it."""
    sets = {(one["metadata"]["namespace"], one["metadata"]["name"]): one for one in cluster.get("replicasets")}
    found = {}
    for pod in cluster.get("pods"):
        namespace = pod["metadata"]["namespace"]
        (owner,) = pod["metadata"].get("ownerReferences") or [{"kind": "Pod", "name": pod["metadata"]["name"]}]
        if owner["kind"] == "ReplicaSet":
            (owner,) = sets[namespace, owner["name"]]["metadata"]["ownerReferences"]
        found[namespace, pod["metadata"]["name"]] = f"{owner['kind']}/{owner['name']}"
    return found


def _cells(key: Key, sent: Count, counted: Count) -> tuple[str, ...]:
    workload = key.name if key.level == "workload" else "-"
    pod = key.name if key.level == "pod" else "-"
    numbers = (sent.bytes, counted.bytes, counted.bytes - sent.bytes)
    return (key.namespace, workload, pod, key.direction, key.traffic, *(f"{number:,}" for number in numbers))
