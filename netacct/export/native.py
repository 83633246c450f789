"""Our own metrics: what one scrape shows, and the collector that turns it into prometheus_client families.

The agent builds a `View`; nothing here reads a counter or decides what is exported. A part that raises is left out and
reported as `netacct_scrape_collector_success{collector} 0`: it never fails the scrape.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ParamSpec, TypeAlias, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from netacct.export import families
from netacct.export.families import Family
from netacct.export.quiet import Log, Sparingly, no_log
from netacct.model import Count, Direction, Level, Pod, SeriesKey

P = ParamSpec("P")
T = TypeVar("T")

Ports: TypeAlias = Callable[[], Sequence[tuple[str, str, Direction, int]]]
"""Gives what RDMA adapters count: device, port, direction, bytes."""


@dataclass(frozen=True, slots=True)
class Detail:
    """Which of the big families are exported (`metrics.pods`, `metrics.workloads`, `metrics.packets`)."""

    pods: bool = True
    workloads: bool = True
    packets: bool = True


@dataclass(frozen=True, slots=True)
class Collected:
    """How one part of the scrape went, and how many seconds it took."""

    ok: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class View:
    """Everything that one scrape shows. A value of None, or an empty mapping, is a metric that is not exported.

    Args:
        version: of netacct.
        datapath: `iptables` or `nftables`.
        policy_name: the policy in force.
        policy_hash: of its content.
        series: totals, already filtered, capped and with zero-first applied; no key twice.
        pods: the pods that have series. Of two with one namespace and name (a pod made anew), the later one counts.
        by_label: the pod label, by Kubernetes name, whose values level LABEL sums over.
        pod_labels: the pod labels, by Kubernetes name, that `netacct_pod_info` carries as `label_NAME`.
        detail: which big families are exported.
        blind_spots: reason -> whether it holds now.
        coverage_ratio: 0 to 1.
        rules_in_sync: whether the last verification found no difference.
        rule_repairs: count since the agent started.
        counter_resets: count since accounting started.
        ambiguous_bytes: bytes since accounting started.
        marks_enabled: whether packets are marked.
        marks_reason: why not; "" when they are.
        sources_up: identity source -> whether it works.
        sources_age: identity source that asks -> seconds since its last answer.
        leases: open leases.
        series_capped: count since accounting started.
        accounting_start: unix seconds.
        reading_age_seconds: of the reading that `series` rests on.
        config_last_reload_successful: whether the last load succeeded.
        collectors: the parts that the agent ran for this scrape (`kernel`, `ledger` ...), and how they went.
    """

    version: str
    datapath: str
    policy_name: str
    policy_hash: str
    series: Sequence[tuple[SeriesKey, Count]] = ()
    pods: Sequence[Pod] = ()
    pod_labels: tuple[str, ...] = ()
    by_label: str = ""
    detail: Detail = Detail()
    blind_spots: Mapping[str, bool] = field(default_factory=dict)
    coverage_ratio: float | None = None
    rules_in_sync: bool | None = None
    rule_repairs: int | None = None
    counter_resets: int | None = None
    ambiguous_bytes: int | None = None
    marks_enabled: bool | None = None
    marks_reason: str = ""
    sources_up: Mapping[str, bool] = field(default_factory=dict)
    sources_age: Mapping[str, float] = field(default_factory=dict)
    leases: int | None = None
    series_capped: int | None = None
    accounting_start: float | None = None
    reading_age_seconds: float | None = None
    config_last_reload_successful: bool | None = None
    collectors: Mapping[str, Collected] = field(default_factory=dict)


class NetacctCollector(Collector):
    """A custom collector for one scrape: it asks for the View when it is collected.

    Args:
        view: gives what is to be shown; may raise.
        process: gives the process_* metrics of this process.
        log: called with an event and fields when a part fails.
        clock: seconds, for the duration of each part.
        ports: gives the RDMA counters; asked at each scrape.
    """

    def __init__(
        self,
        view: Callable[[], View],
        process: Collector | None = None,
        log: Log = no_log,
        clock: Callable[[], float] = time.perf_counter,
        ports: Ports | None = None,
    ) -> None:
        self._view = view
        self._process = process
        self._log = log
        self._clock = clock
        self._ports = ports

    def describe(self) -> Iterable[Metric]:
        """Every family; the registry needs their names for `name[]` and to find duplicates."""
        found = [] if self._process is None else self._part({}, "process", _materialised, self._process)
        return [*(family.metric() for family in families.ALL), *(found or ())]

    def collect(self) -> Iterator[Metric]:
        """The families that have samples. Never raises; `netacct_scrape_collector_success` is always there."""
        done: dict[str, Collected] = {}
        view = self._part(done, "accounting", self._view)
        if view is not None:
            yield from self._part(done, "traffic", traffic_metrics, view) or ()
            yield from self._part(done, "pods", pod_metrics, view) or ()
            yield from self._part(done, "agent", agent_metrics, view) or ()
            done = {**view.collectors, **done}
        if self._ports is not None:
            yield from self._part(done, "rdma", rdma_metrics, self._ports) or ()
        if self._process is not None:
            yield from self._part(done, "process", _materialised, self._process) or ()
        yield families.COLLECTOR_SUCCESS.metric(((name,), float(part.ok)) for name, part in done.items())
        yield families.COLLECTOR_DURATION.metric(((name,), part.seconds) for name, part in done.items())

    def _part(
        self, done: dict[str, Collected], name: str, call: Callable[P, T], *args: P.args, **kw: P.kwargs
    ) -> T | None:
        """The result of one part, or None where it raised; how it went is entered in `done`."""
        start = self._clock()
        try:
            result = call(*args, **kw)
        except Exception as error:  # noqa: BLE001 - whatever broke in one part must not cost the others
            self._log(f"the {name} part of the scrape failed", error=repr(error))
            result = None
        done[name] = Collected(result is not None, self._clock() - start)
        return result


def registries(
    view: Callable[[float], View], log: Log = no_log, ports: Ports | None = None
) -> Callable[[float], CollectorRegistry]:
    """What the server asks at each scrape: a registry of its own, whose View must be there within so many seconds.

    One registry for each scrape, because prometheus_client has no other way to hand a deadline to a collector.
    """
    process = ProcessCollector(registry=None)
    sparing = Sparingly(log, time.monotonic)

    def registry(seconds: float) -> CollectorRegistry:
        made = CollectorRegistry(auto_describe=False)
        made.register(NetacctCollector(lambda: view(seconds), process, sparing, ports=ports))
        return made

    return registry


def traffic_metrics(view: View) -> Sequence[Metric]:
    """The accounting families that have series, in the order of `families.TRAFFIC`."""
    hidden = set() if view.detail.pods else {Level.POD}
    hidden |= set() if view.detail.workloads else {Level.WORKLOAD}
    groups: dict[tuple[Level, Direction], list[tuple[tuple[str, ...], Count]]] = {}
    for key, count in view.series:
        if key.level not in hidden:
            values = (*map(_text, key.labels), key.traffic)
            groups.setdefault((key.level, key.direction), []).append((values, count))
    metrics = []
    for (level, direction, quantity), family in families.TRAFFIC.items():
        group = groups.get((level, direction))
        if not group or (quantity == "packets" and not view.detail.packets):
            continue
        labels = ("namespace", _label_name(view), "traffic") if level is Level.LABEL else family.labels
        index = Count._fields.index(quantity)
        named = family._replace(labels=labels)
        metrics.append(named.metric((values, count[index]) for values, count in group))
    return metrics


def rdma_metrics(ports: Ports) -> Sequence[Metric]:
    """What RDMA adapters count; nothing where there are none."""
    rows: dict[Direction, list[tuple[tuple[str, ...], float]]] = {}
    for device, port, direction, count in ports():
        rows.setdefault(direction, []).append(((_text(device), _text(port)), count))
    return [family.metric(rows[direction]) for direction, family in families.RDMA.items() if direction in rows]


def pod_metrics(view: View) -> Sequence[Metric]:
    """`netacct_pod_info`, one sample for each (namespace, name), so that joins on it stay one-to-one."""
    if not view.detail.pods or not view.pods:
        return []
    latest = {(pod.namespace, pod.name): pod for pod in view.pods}
    family = families.POD_INFO._replace(labels=families.POD_INFO.labels + label_names(view.pod_labels))
    return [family.metric((_pod_values(pod, view.pod_labels), 1.0) for pod in latest.values())]


def _pod_values(pod: Pod, allowed: tuple[str, ...]) -> tuple[str, ...]:
    labels = dict(pod.labels)
    own = (pod.namespace, pod.name, pod.uid, pod.workload_kind, pod.workload)
    return tuple(map(_text, (*own, *(labels.get(name, "") for name in allowed))))


def label_names(allowed: Sequence[str]) -> tuple[str, ...]:
    """Prometheus label names for Kubernetes label names, as kube-state-metrics forms them.

    `app.kubernetes.io/name` becomes `label_app_kubernetes_io_name`; of names that become the same, the second and later
    ones end in `_conflict2` and so on.
    """
    names: list[str] = []
    for original in allowed:
        name = "label_" + re.sub(r"[^a-zA-Z0-9_]", "_", original)
        others = (f"{name}_conflict{number}" for number in itertools.count(2))
        names.append(next(each for each in itertools.chain([name], others) if each not in names))
    return tuple(names)


def _label_name(view: View) -> str:
    """The name of the label that level LABEL sums by: the one that it has on `netacct_pod_info`, where it is there."""
    shown = view.pod_labels if view.by_label in view.pod_labels else (view.by_label,)
    return dict(zip(shown, label_names(shown), strict=True))[view.by_label]


def agent_metrics(view: View) -> Sequence[Metric]:
    """What the agent says of itself; only what the View has a value for."""
    info = [
        families.BUILD_INFO.metric([((view.version, view.datapath), 1.0)]),
        families.POLICY_INFO.metric([((_text(view.policy_name), view.policy_hash), 1.0)]),
    ]
    marks = None if view.marks_enabled is None else {view.marks_reason: view.marks_enabled}
    by_label: list[tuple[Family, Mapping[str, float] | None]] = [
        (families.BLIND_SPOT, view.blind_spots),
        (families.MARKS_ENABLED, marks),
        (families.IDENTITY_SOURCE_UP, view.sources_up),
        (families.IDENTITY_SOURCE_AGE, view.sources_age),
    ]
    single: list[tuple[Family, float | None]] = [
        (families.COVERAGE_RATIO, view.coverage_ratio),
        (families.RULES_IN_SYNC, view.rules_in_sync),
        (families.RULE_REPAIRS, view.rule_repairs),
        (families.COUNTER_RESETS, view.counter_resets),
        (families.AMBIGUOUS_BYTES, view.ambiguous_bytes),
        (families.LEASES, view.leases),
        (families.SERIES_CAPPED, view.series_capped),
        (families.ACCOUNTING_START, view.accounting_start),
        (families.READING_AGE, view.reading_age_seconds),
        (families.CONFIG_RELOAD, view.config_last_reload_successful),
    ]
    return [
        *info,
        *(
            family.metric(((_text(name),), float(on)) for name, on in values.items())
            for family, values in by_label
            if values
        ),
        *(family.metric([((), float(value))]) for family, value in single if value is not None),
    ]


def _materialised(collector: Collector) -> Sequence[Metric]:
    return list(collector.collect())


def _text(value: str) -> str:
    """The value as it can be sent: half a surrogate pair, which JSON can spell, has no UTF-8 form."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
