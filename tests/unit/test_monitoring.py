"""Dashboards and recording rules keep the conventions of their field, and name only series that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "monitoring" / "dashboards").glob("*.json"))
RULES = sorted((ROOT / "monitoring" / "rules").glob("*.rules.yaml"))
DOCUMENTED = set(re.findall(r"`(netacct_[a-z_]+)", (ROOT / "docs" / "metrics.md").read_text()))
RECORDED = re.compile(r"\b[a-z_]+:netacct_[a-z_]+:[a-z0-9_]+")
METRIC = re.compile(r"\bnetacct_[a-z_]+")
SELECTOR = re.compile(r"[a-z_:0-9]+\{[^}]*\}")
BOARD = pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)


def dashboard(path: Path) -> dict[str, Any]:
    """A dashboard as a dictionary."""
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def panels(path: Path) -> list[dict[str, Any]]:
    """The panels of a dashboard that show something."""
    return [panel for panel in dashboard(path)["panels"] if panel["type"] != "row"]


def expressions(path: Path) -> list[str]:
    """Every PromQL expression of a dashboard's panels."""
    return [target["expr"] for panel in panels(path) for target in panel["targets"]]


def rules(path: Path) -> list[dict[str, str]]:
    """Every rule of a rule file."""
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def grouping(expression: str) -> list[str]:
    """The labels by which an expression sums."""
    found = re.match(r"sum by \(([^)]*)\)", expression)
    return re.split(r",\s*", found[1]) if found else []


def every_expression() -> list[str]:
    """What dashboards and rules ask Prometheus for."""
    return [e for path in DASHBOARDS for e in expressions(path)] + [r["expr"] for path in RULES for r in rules(path)]


def test_there_is_something_to_look_at() -> None:
    """The folders hold the dashboard and the rules that this file checks."""
    assert DASHBOARDS
    assert RULES


@BOARD
def test_a_dashboard_works_with_any_data_source(path: Path) -> None:
    """There is one data source variable and every panel and target uses it."""
    variables = {v["name"]: v for v in dashboard(path)["templating"]["list"]}

    assert [v["label"] for v in variables.values() if v["type"] == "datasource"] == ["Data source"]
    for panel in panels(path):
        for part in [panel, *panel["targets"]]:
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
    for name in ("job", "instance"):
        assert variables[name]["multi"]
        assert variables[name]["allValue"] == ".+"
        assert variables[name]["refresh"] == 2


@BOARD
def test_a_dashboard_can_be_provisioned(path: Path) -> None:
    """It has a stable short uid, its tag, the schema of Grafana 11, and cannot be edited in place."""
    found = dashboard(path)

    assert re.fullmatch(r"netacct-[a-z-]{1,32}", found["uid"])
    assert found["title"].startswith("Netacct / ")
    assert found["tags"] == ["netacct"]
    assert found["schemaVersion"] == 39
    assert found["editable"] is False
    assert "id" not in found


@BOARD
def test_every_panel_explains_itself(path: Path) -> None:
    """Each panel has an id, title, description and unit."""
    for panel in panels(path):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in ("Bps", "decbytes", "percentunit", "s", "none"), panel[
            "title"
        ]
        assert panel["targets"], panel["title"]

    assert len({panel["id"] for panel in dashboard(path)["panels"]}) == len(dashboard(path)["panels"])


@BOARD
def test_panels_fill_the_board(path: Path) -> None:
    """No two panels share a place, none sticks out of Grafana's 24 columns, and none has an empty place beside it."""
    places = [
        (x, y)
        for at in (panel["gridPos"] for panel in dashboard(path)["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    height = max(y for _, y in places) + 1

    assert sorted(places) == sorted((x, y) for x in range(24) for y in range(height))


@BOARD
def test_units_say_what_an_expression_gives(path: Path) -> None:
    """Rates are bytes per second, increases are bytes."""
    for panel in panels(path):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            is_rate = "rate(" in target["expr"] or re.search(r"_bytes:rate", target["expr"]) is not None

            assert (unit == "Bps") == is_rate, panel["title"]
            assert (unit == "decbytes") == ("increase(" in target["expr"]), panel["title"]


@BOARD
def test_graphs_are_drawn_over_time_and_all_else_is_of_now(path: Path) -> None:
    """Graphs ask for ranges, stats and tables for one moment; only the latter may use the board's whole range."""
    for panel in panels(path):
        over_time = panel["type"] == "timeseries"
        for target in panel["targets"]:
            assert (target["range"], target["instant"]) == (over_time, not over_time), panel["title"]
            assert not (over_time and "$__range" in target["expr"]), panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@BOARD
def test_legends_name_every_line(path: Path) -> None:
    """A graph's legend has the labels by which it sums, and a panel's targets have different legends."""
    for panel in panels(path):
        legends = [target["legendFormat"] for target in panel["targets"]]
        if panel["type"] == "table":
            continue

        assert all(legends), panel["title"]
        assert len(set(legends)) == len(legends), panel["title"]
        for target in panel["targets"]:
            assert re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]) == grouping(target["expr"]), panel["title"]


@BOARD
def test_tables_name_every_column(path: Path) -> None:
    """A table merges its queries by their labels; each value has a name and a place, and the time is left out."""
    for panel in (panel for panel in panels(path) if panel["type"] == "table"):
        merge, organize = panel["transformations"]
        options = organize["options"]
        values = [f"Value #{target['refId']}" for target in panel["targets"]]
        [labels] = {tuple(grouping(target["expr"])) for target in panel["targets"]}

        assert (merge["id"], organize["id"]) == ("merge", "organize")
        assert {target["format"] for target in panel["targets"]} == {"table"}
        assert options["excludeByName"] == {"Time": True}
        assert set(values) <= set(options["renameByName"]) <= {*values, *labels}
        assert len(set(options["renameByName"].values())) == len(options["renameByName"])
        assert sorted(options["indexByName"], key=options["indexByName"].get)[: len(labels)] == list(labels)
        assert set(options["indexByName"]) == {*labels, *values}
        assert panel["options"]["sortBy"][0]["displayName"] in options["renameByName"].values()
        for target in panel["targets"]:
            name = options["renameByName"][f"Value #{target['refId']}"]
            direction = re.search(r"_(receive|transmit)_", target["expr"])
            traffic = re.search(r'traffic="(\w+)"', target["expr"])
            kind = {"internet": "internet", "pod": "pod to pod"}[traffic[1]] if traffic else "all"

            assert direction
            assert name == f"{kind} {direction[1]}"


@BOARD
def test_stats_show_a_row_for_each_value(path: Path) -> None:
    """A stat with several values stacks them, each with its name, and shows 0 where there is nothing."""
    for panel in (panel for panel in panels(path) if panel["type"] == "stat"):
        options = panel["options"]

        assert options["orientation"] == "horizontal"
        assert options["reduceOptions"] == {"calcs": ["lastNotNull"], "fields": "", "values": False}
        assert options["textMode"] == ("value_and_name" if len(panel["targets"]) > 1 else "value")
        if len(panel["targets"]) > 1:
            assert all(target["expr"].endswith(" or vector(0)") for target in panel["targets"]), panel["title"]


@BOARD
def test_every_selector_follows_the_variables(path: Path) -> None:
    """Each selector is of the chosen job, and of the chosen namespace, workload, pod where the metric has the label."""
    for expression in expressions(path):
        selectors = SELECTOR.findall(expression)

        assert selectors
        for selector in selectors:
            assert 'job=~"$job"' in selector
            if re.match(r"(\w+:)?netacct_(namespace|workload|pod)_", selector):
                assert 'namespace="$namespace"' in selector
            assert ("netacct_workload_" in selector) == ('workload=~"$workload"' in selector)
            assert ("netacct_pod_" in selector) == ('pod=~"$pod"' in selector)


@BOARD
def test_variables_of_a_dashboard_exist(path: Path) -> None:
    """Every $variable in an expression is defined, or is one of Grafana's own."""
    known = {v["name"] for v in dashboard(path)["templating"]["list"]} | {"__range", "__rate_interval"}
    used = {name for e in expressions(path) for name in re.findall(r"\$\{?(\w+)", e)}

    assert used <= known


def test_counters_are_never_shown_raw() -> None:
    """A counter appears only inside rate() or increase()."""
    for expression in every_expression():
        for counter in re.finditer(r"\bnetacct_\w+_total\b", expression):
            assert re.search(r"(rate|increase)\($", expression[: counter.start()]), expression


def test_only_documented_metrics_are_asked_for() -> None:
    """Each metric name in a dashboard or rule is in docs/metrics.md."""
    for expression in every_expression():
        names = set(METRIC.findall(RECORDED.sub("", expression)))

        assert names <= DOCUMENTED, expression


def test_recorded_series_exist() -> None:
    """Each recorded name that a dashboard reads is made by a recording rule, and each rule is read."""
    recorded = {rule["record"] for path in RULES for rule in rules(path)}
    read = {name for path in DASHBOARDS for e in expressions(path) for name in RECORDED.findall(e)}

    assert read == recorded
