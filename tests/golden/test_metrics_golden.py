"""A whole page of metrics, as users and dashboards see it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_text

from netacct.export import families
from netacct.export.exposition import encode
from netacct.export.native import Collected, NetacctCollector, View
from netacct.model import Count, Direction, Level, Pod, SeriesKey

OPENMETRICS = "application/openmetrics-text;version=1.0.0"
TOOLS = Path(__file__).parents[2] / ".tools/usr/bin"


def page_view() -> View:
    """A node with two pods of two teams, an address nobody owned, and every metric that there is."""
    owners = {
        Level.POD: (("team-a", "train-0"), ("team-b", "web-7d4b9-x2x4q")),
        Level.WORKLOAD: (("team-a", "Job", "train"), ("team-b", "Deployment", "web")),
        Level.LABEL: (("team-a", 'scaling "laws"\\2\nnaïve'), ("team-b", "")),
        Level.NAMESPACE: (("team-a",), ("team-b",)),
        Level.HOST: ((),),
        Level.UNATTRIBUTED: ((),),
    }
    traffic = {Level.HOST: ("node", "tunnel"), Level.UNATTRIBUTED: ("internet",)}
    keys = [
        SeriesKey(level, labels, direction, kind)
        for level, all_labels in owners.items()
        for labels in all_labels
        for direction in Direction
        for kind in traffic.get(level, ("pod", "internet"))
    ]
    return View(
        version="0.1.0",
        datapath="iptables",
        policy_name="default",
        policy_hash="5f2b7c1e",
        series=[(key, Count(1500 * 3**number, 3**number)) for number, key in enumerate(keys)],
        pods=[
            Pod("team-a", "train-0", "3f0c-1", "Job", "train", (("experiment", 'scaling "laws"\\2\nnaïve'),)),
            Pod("team-b", "web-7d4b9-x2x4q", "3f0c-2", "Deployment", "web"),
        ],
        pod_labels=("experiment",),
        by_label="experiment",
        blind_spots={"bridge_flood": False, "shadowed": True},
        coverage_ratio=0.9987,
        rules_in_sync=True,
        rule_repairs=1,
        counter_resets=0,
        ambiguous_bytes=1200,
        marks_enabled=False,
        marks_reason="an ip rule selects by 0x1",
        sources_up={"file": True, "kubelet": True},
        sources_age={"kubelet": 12.5},
        leases=3,
        series_capped=0,
        accounting_start=1767225600.25,
        reading_age_seconds=0.004,
        config_last_reload_successful=True,
        collectors={"kernel": Collected(ok=True, seconds=0.0013)},
    )


def ports() -> list[tuple[str, str, Direction, int]]:
    """One RDMA adapter with one port."""
    return [("mlx5_0", "1", Direction.RECEIVE, 40_000_000), ("mlx5_0", "1", Direction.TRANSMIT, 12_000)]


def page(accept: str) -> bytes:
    """The page of `page_view`, on a clock that stands still."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NetacctCollector(page_view, clock=lambda: 0.0, ports=ports))
    return encode(registry, accept)[0]


def promtool() -> str:
    """The path of promtool; skips the test where there is none."""
    found = shutil.which("promtool") or shutil.which("promtool", path=str(TOOLS))
    if found is None:
        pytest.skip("promtool is neither on PATH nor in .tools/usr/bin (Debian package prometheus)")
    return found


def test_the_text_page_is_the_golden_one(golden: Callable[[str, bytes], None]) -> None:
    """Names, labels, order and HELP texts in the text format change on purpose only."""
    golden("metrics.txt", page(""))


def test_the_openmetrics_page_is_the_golden_one(golden: Callable[[str, bytes], None]) -> None:
    """Names, units, order and HELP texts in OpenMetrics change on purpose only."""
    golden("metrics.openmetrics.txt", page(OPENMETRICS))


def test_the_page_shows_every_family() -> None:
    """The golden View has a value for every family, so that no metric escapes the golden files and promtool."""
    shown = {family.name for family in parse_text(page("").decode())}
    assert shown == {family.name.removesuffix("_total") for family in families.ALL}


def test_both_formats_say_the_same() -> None:
    """Each sample of the text page is in the OpenMetrics page with the same labels and value."""
    plain = parse_text(page("").decode())
    strict = text_string_to_metric_families(page(OPENMETRICS).decode())  # type: ignore[no-untyped-call]  # unannotated
    assert [s for family in plain for s in family.samples] == [s for family in strict for s in family.samples]


@pytest.mark.prometheus
def test_promtool_has_no_complaint() -> None:
    """`promtool check metrics` finds nothing on the page, the process metrics of a live agent included."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NetacctCollector(page_view, ProcessCollector(registry=None), ports=ports))
    checked = subprocess.run(
        [promtool(), "check", "metrics"], input=encode(registry, "")[0], capture_output=True, timeout=60, check=False
    )
    assert (checked.stdout + checked.stderr).decode() == ""
