"""By which name Kubernetes knows this node."""

from __future__ import annotations

import os
from collections.abc import Mapping

AUTO = "auto"

NODE_NAME = "NODE_NAME"
"""The environment variable in which a DaemonSet tells it (downward API, `fieldRef: spec.nodeName`)."""


def node_name(configured: str = AUTO, environ: Mapping[str, str] = os.environ) -> str:
    """The configured name; for `auto` what NODE_NAME says, else the host name, as the kubelet itself makes one of it.

    That is in lower case (kubernetes, pkg/util/node/node.go, GetHostname). Clouds may name nodes otherwise.
    """
    if configured != AUTO:
        return configured
    return environ.get(NODE_NAME, "").strip() or os.uname().nodename.strip().lower()
