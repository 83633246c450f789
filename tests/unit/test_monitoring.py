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


def every_expression() -> list[str]:
    """What dashboards and rules ask Prometheus for."""
    return [e for path in DASHBOARDS for e in expressions(path)] + [r["expr"] for path in RULES for r in rules(path)]


def test_there_is_something_to_look_at() -> None:
    """The folders hold the dashboard and the rules that this file checks."""
    assert DASHBOARDS
    assert RULES


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
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


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_explains_itself(path: Path) -> None:
    """Each panel has title, description, unit and a place of its own."""
    places = set()
    for panel in panels(path):
        assert panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        places.add((panel["gridPos"]["x"], panel["gridPos"]["y"]))

    assert len(places) == len(panels(path))
    assert len({panel["id"] for panel in dashboard(path)["panels"]}) == len(dashboard(path)["panels"])


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
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
