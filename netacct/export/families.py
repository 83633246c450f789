"""The name, type, labels and HELP text of every metric: the contract with dashboards and alerts.

`docs/metrics.md` says the same for people, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias

from netacct.export.exposition import Row, Rows
from netacct.model import Direction, Level

Quantity: TypeAlias = Literal["bytes", "packets"]


class Family(NamedTuple):
    """One metric family.

    `name` is what a user writes in a query: with `_total` for a counter, with `_info` for an info metric. `unit` is
    the OpenMetrics unit and, as that format wants it, a suffix of the name (before `_total`).
    """

    name: str
    kind: Literal["counter", "gauge", "info"]
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""

    def metric(self, rows: Iterable[Row] = ()) -> Rows:
        """The family, with one sample for each row."""
        return Rows(self.name, self.kind, self.help, self.labels, self.unit, rows)


LEVEL_LABELS: dict[Level, tuple[str, ...]] = {
    Level.POD: ("namespace", "pod"),
    Level.WORKLOAD: ("namespace", "workload_kind", "workload"),
    Level.LABEL: ("namespace",),
    Level.NAMESPACE: ("namespace",),
    Level.HOST: (),
    Level.UNATTRIBUTED: (),
}
"""The labels of each level, in the order of `SeriesKey.labels`; LABEL has one more, named by the configuration.

`traffic` follows them.
"""

_WHOSE = {
    Level.POD: "the pod",
    Level.WORKLOAD: "the workload's pods on this node",
    Level.LABEL: "the namespace's pods on this node that have this value of the label",
    Level.NAMESPACE: "the namespace's pods on this node",
    Level.HOST: "the node itself and its hostNetwork pods",
    Level.UNATTRIBUTED: "local pod addresses that no known pod owned",
}

_WHAT: dict[Quantity, str] = {"bytes": "Layer 3 bytes", "packets": "Packets, as the network stack counts them,"}


def _traffic_family(level: Level, direction: Direction, quantity: Quantity) -> Family:
    verb = "received" if direction is Direction.RECEIVE else "sent"
    text = f"{_WHAT[quantity]} {verb} by {_WHOSE[level]}, by kind of peer."
    labels = (*LEVEL_LABELS[level], "traffic")
    return Family(f"netacct_{level}_{direction}_{quantity}_total", "counter", text, labels, quantity)


def _quantities(level: Level) -> tuple[Quantity, ...]:
    return ("bytes",) if level in (Level.HOST, Level.UNATTRIBUTED) else ("bytes", "packets")


TRAFFIC: dict[tuple[Level, Direction, Quantity], Family] = {
    (level, direction, quantity): _traffic_family(level, direction, quantity)
    for level in Level
    for direction in Direction
    for quantity in _quantities(level)
}
"""The accounting itself. The order is the order on the page."""

RDMA: dict[Direction, Family] = {
    direction: Family(
        f"netacct_rdma_{direction}_bytes_total",
        "counter",
        f"Bytes that an RDMA adapter's port {verb}, by its own count; includes IP over InfiniBand.",
        ("device", "port"),
        "bytes",
    )
    for direction, verb in ((Direction.RECEIVE, "received"), (Direction.TRANSMIT, "sent"))
}

POD_INFO = Family(
    "netacct_pod_info",
    "info",
    "A pod whose traffic is exported, with its workload and the labels that the configuration allows; always 1.",
    ("namespace", "pod", "uid", "workload_kind", "workload"),
)

BUILD_INFO = Family(
    "netacct_build_info",
    "info",
    "The version that runs and the datapath that counts; always 1.",
    ("version", "datapath"),
)
POLICY_INFO = Family(
    "netacct_policy_info",
    "info",
    "The policy whose traffic classes are counted, and the hash of its content; always 1.",
    ("name", "hash"),
)
BLIND_SPOT = Family(
    "netacct_blind_spot", "gauge", "1 while traffic may pass uncounted or unsplit for this reason, else 0.", ("reason",)
)
COVERAGE_RATIO = Family(
    "netacct_coverage_ratio",
    "gauge",
    "Share of the bytes on the pods' own interfaces that the datapath counted, from 0 to 1.",
    unit="ratio",
)
RULES_IN_SYNC = Family(
    "netacct_rules_in_sync", "gauge", "1 if the last check found the kernel's rules as installed, 0 if it did not."
)
RULE_REPAIRS = Family("netacct_rule_repairs_total", "counter", "Repairs of rules or sets that somebody else changed.")
COUNTER_RESETS = Family(
    "netacct_unexplained_resets_total",
    "counter",
    "Kernel counters that went backwards without a new epoch; what they had counted since the last reading is lost.",
)
AMBIGUOUS_BYTES = Family(
    "netacct_ambiguous_bytes_total",
    "counter",
    "Layer 3 bytes booked to the longer tenure where several pods held an address between two readings.",
    unit="bytes",
)
MARKS_ENABLED = Family(
    "netacct_marks_enabled",
    "gauge",
    "1 if packets are marked with their traffic class, 0 if not; reason says why not.",
    ("reason",),
)
IDENTITY_SOURCE_UP = Family(
    "netacct_identity_source_up",
    "gauge",
    "1 if this source of pod identities, or of local ranges, works, else 0.",
    ("source",),
)
IDENTITY_SOURCE_AGE = Family(
    "netacct_identity_source_age_seconds",
    "gauge",
    "Age in seconds of the last answer of a source that asks.",
    ("source",),
    "seconds",
)
LEASES = Family("netacct_leases", "gauge", "Pod addresses that a known pod holds now.")
SERIES_CAPPED = Family(
    "netacct_series_capped_total",
    "counter",
    "Pods, workloads, values of the label or namespaces booked to __other__ because a limit on series was reached.",
)
ACCOUNTING_START = Family(
    "netacct_accounting_start_timestamp_seconds",
    "gauge",
    "Unix time in seconds at which the present totals began at 0.",
    unit="seconds",
)
READING_AGE = Family(
    "netacct_reading_age_seconds",
    "gauge",
    "Age in seconds of the kernel reading that the totals in this scrape rest on.",
    unit="seconds",
)
CONFIG_RELOAD = Family(
    "netacct_config_last_reload_successful",
    "gauge",
    "1 if the last load of the configuration succeeded, 0 if the one before it is still in force.",
)
COLLECTOR_SUCCESS = Family(
    "netacct_scrape_collector_success", "gauge", "1 if this part of the scrape succeeded, else 0.", ("collector",)
)
COLLECTOR_DURATION = Family(
    "netacct_scrape_collector_duration_seconds",
    "gauge",
    "Time in seconds that this part of the scrape took.",
    ("collector",),
    "seconds",
)

ALL: tuple[Family, ...] = (
    *TRAFFIC.values(),
    *RDMA.values(),
    POD_INFO,
    BUILD_INFO,
    POLICY_INFO,
    BLIND_SPOT,
    COVERAGE_RATIO,
    RULES_IN_SYNC,
    RULE_REPAIRS,
    COUNTER_RESETS,
    AMBIGUOUS_BYTES,
    MARKS_ENABLED,
    IDENTITY_SOURCE_UP,
    IDENTITY_SOURCE_AGE,
    LEASES,
    SERIES_CAPPED,
    ACCOUNTING_START,
    READING_AGE,
    CONFIG_RELOAD,
    COLLECTOR_SUCCESS,
    COLLECTOR_DURATION,
)
"""Every family of ours. The process_* metrics are prometheus_client's own."""
