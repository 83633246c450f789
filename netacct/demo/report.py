"""What is shown in the end: rows for a table, and the JSON document."""

from __future__ import annotations

from collections.abc import Sequence

from netacct.demo.stage import Row

HEADER = (
    "FAMILY",
    "NAMESPACE",
    "POD",
    "DIRECTION",
    "TRAFFIC",
    "SENT",
    "COUNTED",
    "DIFFERENCE",
    "PACKETS",
    "DIFFERENCE",
)
NUMBERS = frozenset({5, 6, 7, 8, 9})
"""The columns that hold numbers: bytes sent, counted, difference; packets sent, difference."""


def exact(rows: Sequence[Row]) -> bool:
    """Whether there is something to compare, and every series agrees to the byte and to the packet."""
    return bool(rows) and all(row.exact for row in rows)


def shown(rows: Sequence[Row]) -> list[Row]:
    """Pods and the host always; sums over pods, and what belongs to nobody, only where they differ."""
    return [row for row in rows if row.series.level in ("pod", "host") or not row.exact]


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table's rows. The host has no namespace and no pod, and no packets are exported for it: dashes."""
    found = []
    for row in shown(rows):
        namespace, pod = _labels(row)
        series = (f"ipv{row.family}", namespace or "-", pod or "-", row.series.direction, row.series.traffic)
        lack = row.counted.minus(row.sent)
        packets = (f"{row.sent.packets:,}", f"{lack.packets:,}") if row.has_packets else ("-", "-")
        numbers = (row.sent.bytes, row.counted.bytes, lack.bytes)
        found.append((*series, *(f"{number:,}" for number in numbers), *packets))
    return found


def verdict(rows: Sequence[Row]) -> str:
    """One line that sums up."""
    wrong = sum(not row.exact for row in rows)
    levels = ", ".join(
        f"{sum(row.series.level == level for row in rows)} of {level}s" for level in ("pod", "workload", "namespace")
    )
    host = sum(row.series.level == "host" for row in rows)
    judged = "every one exact, bytes and packets" if exact(rows) else f"{wrong} of them differ"
    return f"{len(rows)} series ({levels}, {host} of the host): {judged}"


def document(rows: Sequence[Row]) -> dict[str, object]:
    """The JSON form.

    Host series have neither namespace nor pod. A sum over pods is there only when it differs: of a namespace without
    pod, of a workload with KIND/NAME for the pod. What the agent booked to nobody is pod `unattributed` of no
    namespace.
    """
    series = []
    for row in shown(rows):
        namespace, pod = _labels(row)
        series.append(
            {
                "namespace": namespace,
                "pod": pod,
                "direction": row.series.direction,
                "traffic": row.series.traffic,
                "family": f"ipv{row.family}",
                "sent_bytes": row.sent.bytes,
                "counted_bytes": row.counted.bytes,
            }
        )
    return {"exact": exact(rows), "series": series}


def _labels(row: Row) -> tuple[str, str]:
    return row.series.namespace, "unattributed" if row.series.level == "unattributed" else row.series.name
