"""From a View to metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from netacct.export import families
from netacct.export.exposition import encode
from netacct.export.native import Collected, Detail, NetacctCollector, View, label_names, registries
from netacct.model import Count, Direction, Level, Pod, SeriesKey

VIEW = View("0.1.0", "iptables", "default", "abc123")
POD = SeriesKey(Level.POD, ("team-a", "train-0"), Direction.RECEIVE, "internet")
WORKLOAD = SeriesKey(Level.WORKLOAD, ("team-a", "Job", "train"), Direction.TRANSMIT, "pod")
HOST = SeriesKey(Level.HOST, (), Direction.TRANSMIT, "tunnel")
SERIES = [(POD, Count(1500, 2)), (WORKLOAD, Count(40, 1)), (HOST, Count(60, 1))]


def lines(view: View | Callable[[], View], process: Collector | None = None) -> list[str]:
    """The sample lines of a scrape, without those on the scrape itself."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(NetacctCollector(view if callable(view) else lambda: view, process))
    page = encode(registry, "")[0].decode()
    return [line for line in page.splitlines() if not line.startswith(("#", "netacct_scrape"))]


def successes(view: Callable[[], View], process: Collector | None = None) -> dict[str, float]:
    """Collector name -> netacct_scrape_collector_success."""
    metrics = {metric.name: metric for metric in NetacctCollector(view, process).collect()}
    return {s.labels["collector"]: s.value for s in metrics["netacct_scrape_collector_success"].samples}


def broken_view() -> View:
    """A view that cannot be had."""
    raise RuntimeError("secret")


class Broken(Collector):
    """A collector that gives one family and then raises."""

    def collect(self) -> Iterator[Metric]:
        """One family, then an error."""
        yield families.LEASES.metric([((), 1)])
        raise RuntimeError("no /proc")


def test_each_level_has_metrics_of_its_own() -> None:
    """Bytes and packets carry the level's labels; host and unattributed have bytes only."""
    labels = '{namespace="team-a",traffic="pod",workload="train",workload_kind="Job"}'
    assert lines(replace(VIEW, series=SERIES))[:5] == [
        'netacct_pod_receive_bytes_total{namespace="team-a",pod="train-0",traffic="internet"} 1500.0',
        'netacct_pod_receive_packets_total{namespace="team-a",pod="train-0",traffic="internet"} 2.0',
        f"netacct_workload_transmit_bytes_total{labels} 40.0",
        f"netacct_workload_transmit_packets_total{labels} 1.0",
        'netacct_host_transmit_bytes_total{traffic="tunnel"} 60.0',
    ]


@pytest.mark.parametrize(
    ("detail", "missing"),
    [
        (Detail(pods=False), "netacct_pod_"),
        (Detail(workloads=False), "netacct_workload_"),
        (Detail(packets=False), "_packets_total"),
    ],
)
def test_what_is_switched_off_is_left_out(detail: Detail, missing: str) -> None:
    """Each switch removes its families, pod info among the pods', and nothing else."""
    full = replace(VIEW, series=SERIES, pods=[Pod("team-a", "train-0", "u1")])
    expected = [line for line in lines(full) if missing not in line]
    assert len(expected) < len(lines(full))
    assert lines(replace(full, detail=detail)) == expected


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ('quo"te', r"quo\"te"),
        ("back\\slash", r"back\\slash"),
        ("new\nline", r"new\nline"),
        ("naïve-日本-🚀", "naïve-日本-🚀"),
        ("half-\ud83d-pair", "half-?-pair"),
        ('{a="b"} 5', r"{a=\"b\"} 5"),
        ("", ""),
    ],
)
def test_odd_names_are_escaped(name: str, written: str) -> None:
    """Quotes, backslashes, newlines and what has no UTF-8 form never break the page."""
    key = POD._replace(labels=(name, "train-0"))
    assert lines(replace(VIEW, series=[(key, Count(1, 1))]))[0] == (
        f'netacct_pod_receive_bytes_total{{namespace="{written}",pod="train-0",traffic="internet"}} 1.0'
    )


def test_pod_info_has_one_sample_for_each_name() -> None:
    """Of two pods with one namespace and name the later one counts, so that a join finds exactly one."""
    pods = [Pod("a", "db-0", "old", "StatefulSet", "db"), Pod("a", "db-0", "new", "StatefulSet", "db")]
    assert [line for line in lines(replace(VIEW, pods=pods)) if "pod_info" in line] == [
        'netacct_pod_info{namespace="a",pod="db-0",uid="new",workload="db",workload_kind="StatefulSet"} 1.0'
    ]


def test_pod_info_carries_the_allowed_labels_only() -> None:
    """A label that is not allowed is not shown, and one that a pod lacks is empty."""
    pods = [Pod("a", "x", "1", labels=(("app.kubernetes.io/name", "llm"), ("secret", "s"))), Pod("a", "y", "2")]
    shown = lines(replace(VIEW, pods=pods, pod_labels=("app.kubernetes.io/name",)))
    found = [line for line in shown if line.startswith("netacct_pod_info")]
    assert [line.split(",")[0] for line in found] == [
        'netacct_pod_info{label_app_kubernetes_io_name="llm"',
        'netacct_pod_info{label_app_kubernetes_io_name=""',
    ]
    assert "secret" not in "".join(found)


def test_label_series_have_the_name_of_the_label() -> None:
    """What is summed by a label carries it under the name that it has on pod info; without the label it is empty."""
    keys = [SeriesKey(Level.LABEL, ("a", value), Direction.RECEIVE, "pod") for value in ("llm", "")]
    view = replace(VIEW, series=[(key, Count(7, 1)) for key in keys], by_label="app.kubernetes.io/name")
    assert [line for line in lines(view) if line.startswith("netacct_label")] == [
        'netacct_label_receive_bytes_total{label_app_kubernetes_io_name="llm",namespace="a",traffic="pod"} 7.0',
        'netacct_label_receive_bytes_total{label_app_kubernetes_io_name="",namespace="a",traffic="pod"} 7.0',
        'netacct_label_receive_packets_total{label_app_kubernetes_io_name="llm",namespace="a",traffic="pod"} 1.0',
        'netacct_label_receive_packets_total{label_app_kubernetes_io_name="",namespace="a",traffic="pod"} 1.0',
    ]


def test_label_series_can_be_joined_with_pod_info() -> None:
    """Where the label's name collides with another one's on pod info, its series have the name that it got there."""
    key = SeriesKey(Level.LABEL, ("a", "llm"), Direction.RECEIVE, "pod")
    view = replace(VIEW, series=[(key, Count(7, 1))], by_label="a/b", pod_labels=("a.b", "a/b"))
    assert lines(view)[0].startswith('netacct_label_receive_bytes_total{label_a_b_conflict2="llm",')


def test_label_names_that_become_the_same_are_told_apart() -> None:
    """Label names keep their order, and the second of two that collide ends in _conflict2."""
    assert label_names(["a.b", "a/b", "a-b", "c"]) == (
        "label_a_b",
        "label_a_b_conflict2",
        "label_a_b_conflict3",
        "label_c",
    )
    assert label_names(["a_b_conflict2", "a.b", "a_b"]) == (
        "label_a_b_conflict2",
        "label_a_b",
        "label_a_b_conflict3",
    )


def test_only_what_has_a_value_is_exported() -> None:
    """A View with nothing but its identity gives the two info metrics and no number that nobody measured."""
    assert lines(VIEW) == [
        'netacct_build_info{datapath="iptables",version="0.1.0"} 1.0',
        'netacct_policy_info{hash="abc123",name="default"} 1.0',
    ]


def test_the_reason_is_on_the_marks_metric() -> None:
    """Marks that are off are 0 with the reason why."""
    view = replace(VIEW, marks_enabled=False, marks_reason="Cilium owns the bits")
    assert 'netacct_marks_enabled{reason="Cilium owns the bits"} 0.0' in lines(view)


def test_a_view_that_fails_does_not_fail_the_scrape() -> None:
    """Where the View cannot be had the page says so, and everything else is there."""
    assert successes(broken_view, NoProcess()) == {"accounting": 0.0, "process": 1.0}


class NoProcess(Collector):
    """A collector that gives nothing."""

    def collect(self) -> Iterable[Metric]:
        """Nothing."""
        return ()


def test_a_part_that_fails_is_left_out_as_a_whole() -> None:
    """A part that raises half-way gives none of its families and success 0; the other parts are untouched."""
    view = replace(VIEW, series=[(POD, Count(1, 1)), (POD._replace(labels=("short",)), Count(1, 1))])
    found = successes(lambda: view, Broken())
    assert found == {"accounting": 1.0, "traffic": 0.0, "pods": 1.0, "agent": 1.0, "process": 0.0}
    shown = lines(view, Broken())
    assert not any(line.startswith(("netacct_pod", "netacct_leases")) for line in shown)
    assert any(line.startswith("netacct_build_info") for line in shown)


def test_the_agents_parts_are_reported_too() -> None:
    """What the agent ran for the scrape appears beside our own parts, with its duration."""
    view = replace(VIEW, collectors={"kernel": Collected(ok=False, seconds=0.25)})
    metrics = {metric.name: metric for metric in NetacctCollector(lambda: view, clock=lambda: 7.0).collect()}
    durations = metrics["netacct_scrape_collector_duration_seconds"].samples
    assert {s.labels["collector"]: s.value for s in durations}["kernel"] == 0.25
    assert successes(lambda: view)["kernel"] == 0.0


def test_a_registry_hands_the_deadline_on_and_logs_a_failure_once() -> None:
    """The View is asked with the seconds of its scrape, and a failure at every scrape is one line a minute."""
    asked: list[float] = []
    logged: list[tuple[str, dict[str, object]]] = []

    def view(seconds: float) -> View:
        asked.append(seconds)
        raise RuntimeError("broken")

    make = registries(view, lambda event, /, **fields: logged.append((event, fields)))
    for seconds in (1.0, 9.5):
        assert b'success{collector="accounting"} 0.0' in encode(make(seconds), "")[0]
    assert asked == [1.0, 9.5]
    assert logged == [("the accounting part of the scrape failed", {"error": "RuntimeError('broken')"})]


def test_a_scrape_can_be_restricted_to_a_metric_of_the_process() -> None:
    """`name[]` finds the process_* metrics, too, which are not ours."""
    registry = registries(lambda _: View("", "", "", ""))(1.0)
    page = encode(registry.restricted_registry(["process_open_fds"]), "")[0].decode()
    assert [line.split()[0] for line in page.splitlines() if not line.startswith("#")] == ["process_open_fds"]


def test_a_scrape_can_be_restricted_to_names() -> None:
    """`name[]` gives the named series only, because the collector describes its families."""
    registry = registries(lambda _: replace(VIEW, series=SERIES))(1.0)
    page = encode(registry.restricted_registry(["netacct_host_transmit_bytes_total"]), "")[0].decode()
    assert [line for line in page.splitlines() if not line.startswith("#")] == [
        'netacct_host_transmit_bytes_total{traffic="tunnel"} 60.0'
    ]


def test_no_family_is_named_twice_and_every_help_is_a_sentence() -> None:
    """Names are unique, counters end in _total, units are suffixes, and HELP is one sentence."""
    names = [family.name for family in families.ALL]
    assert len(names) == len(set(names))
    for family in families.ALL:
        assert family.name.endswith("_total") is (family.kind == "counter")
        assert family.name.removesuffix("_total").endswith(family.unit)
        assert family.help.endswith(".")
        assert ". " not in family.help
