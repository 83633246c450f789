"""Reads the Prometheus text format, as far as the demo needs it (prometheus.io, "Exposition formats")."""

from __future__ import annotations

import re
from collections.abc import Iterator

from netacct.demo.expect import Series, Totals
from netacct.demo.peers import NOTHING, Count

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_TOTAL = re.compile(r"^netacct_(pod|workload|namespace|host|unattributed)_(receive|transmit)_(bytes|packets)_total$")


def samples(page: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Every sample: name, labels, value."""
    for line in page.splitlines():
        if found := _SAMPLE.match(line):
            name, labels, value = found.groups()
            yield name, {key: _unescape(text) for key, text in _LABEL.findall(labels or "")}, float(value)


def totals(page: str) -> Totals:
    """All totals of traffic on the page. Series that are 0 are left out."""
    found: Totals = {}
    for name, labels, value in samples(page):
        if match := _TOTAL.match(name):
            level, direction, unit = match.groups()
            series = Series(level, labels.get("namespace", ""), _name(level, labels), direction, labels["traffic"])
            part = Count(int(value), 0) if unit == "bytes" else Count(0, int(value))
            found[series] = found.get(series, NOTHING).plus(part)
    return {series: count for series, count in found.items() if count != NOTHING}


def pods(page: str) -> set[tuple[str, str]]:
    """Name and workload of all pods that the page knows, with traffic or without."""
    return {
        (labels["pod"], labels.get("workload", "")) for name, labels, _ in samples(page) if name == "netacct_pod_info"
    }


def datapath(page: str) -> str:
    """What the page says that counts; "" where it does not say."""
    return next((labels["datapath"] for name, labels, _ in samples(page) if name == "netacct_build_info"), "")


def _name(level: str, labels: dict[str, str]) -> str:
    if level == "workload":
        return f"{labels['workload_kind']}/{labels['workload']}"
    return labels["pod"] if level == "pod" else ""


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)
