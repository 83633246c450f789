"""docs/metrics.md against the metrics that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from netacct.export.exposition import Rows
from netacct.export.native import NetacctCollector, View

PAGE = Path(__file__).parents[2] / "docs/metrics.md"
ROW = re.compile(r"^\| `((?:netacct|process)_\w+)` \| (\w+)[^|]*\|([^|]*)\| (.+) \|$", re.MULTILINE)


class Row(NamedTuple):
    """What the page says of a metric."""

    kind: str
    labels: tuple[str, ...]


def documented() -> dict[str, Row]:
    """Metric name -> its row in the tables; `label_*` stands for labels that the configuration adds."""
    found = ROW.findall(PAGE.read_text())
    rows = {name: Row(kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in found}
    assert len(rows) == len(found), "a metric has two rows"
    return rows


def emitted() -> dict[str, Row]:
    """Metric name -> what the collector describes, and what the process metrics of this process are."""
    own = NetacctCollector(lambda: View("", "", "", "")).describe()
    process = ProcessCollector(registry=None).collect()
    return {
        name_of(metric): Row(metric.type.replace("info", "gauge"), labels_of(metric)) for metric in (*own, *process)
    }


def name_of(metric: Metric) -> str:
    """The name as a query has it."""
    return metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")


def labels_of(metric: Metric) -> tuple[str, ...]:
    """The label names of a family."""
    return metric.labels if isinstance(metric, Rows) else ()


def test_the_page_names_every_metric_and_no_other() -> None:
    """A metric that is emitted is in docs/metrics.md, and the other way round, with its type and its labels."""
    assert documented() == emitted()
