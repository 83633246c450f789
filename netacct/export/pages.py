"""The page at `/`."""

from __future__ import annotations

from html import escape

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><title>netacct</title></head>
<body>
<h1>netacct {version}</h1>
<p>Counts the network traffic of every pod on this node, by direction and kind of peer, and books it to namespaces,
workloads and pods.</p>
<ul>
<li><a href="{metrics}">Metrics</a>, for Prometheus</li>
<li><a href="/livez">Liveness</a>: whether the agent runs</li>
<li><a href="/readyz">Readiness</a>: whether its numbers can be trusted, and if not, why</li>
</ul>
</body>
</html>
"""


def landing(version: str, telemetry_path: str = "/metrics") -> str:
    """A plain page that says what this is and where the metrics are."""
    return _PAGE.format(version=escape(version), metrics=escape(telemetry_path))
