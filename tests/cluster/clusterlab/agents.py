"""`netacct run` on a node of the cluster, as its operator would start it: default paths, every source `auto`."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterlab import plan
from clusterlab.classes import Series, Totals
from clusterlab.hosts import Host, HostError, until
from clusterlab.truth import Count
from netacct.demo import exposition

PORT = 19112
SERVICE = "netacct"
UNATTRIBUTED = "unattributed"
"""The pod of a series that is booked to nobody; its namespace is empty."""

_SHARED = 2.0
"""Seconds, and one more than a reading is shared for."""

CONFIG: dict[str, Any] = {"policy": "/etc/netacct/policy.yaml", "metrics": {"zero_first": "0s", "retention": "1h"}}
"""Not the default: the cluster's CIDRs; series that begin with their true value, and outlive their pods by an hour."""


class Agent:
    """The agent of one node."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def start(self, *, wait: bool = True, program: Sequence[str] = (), **settings: Any) -> None:
        """Start it with CONFIG and these keys of netacct.yaml; as a rule, wait until it is ready.

        `program` is a command in the place of `netacct`.
        """
        assert not self.runs, f"{self._host.name}: the agent runs already"
        self.configure(**settings)
        self._host.serve(SERVICE, [*(program or _netacct()), "run"])
        if wait:
            self.wait()

    def configure(self, **settings: Any) -> None:
        """Write netacct.yaml and the policy."""
        self._host.write("/etc/netacct/policy.yaml", json.dumps(plan.POLICY))
        self._host.write("/etc/netacct/netacct.yaml", json.dumps({**CONFIG, **settings}))

    def wait(self, patience: float = 90.0) -> None:
        """Wait until /readyz says so."""
        until(self._is_ready, patience, lambda: f"{self._host.name}: the agent is not ready: {self.log}")

    def stop(self) -> None:
        """End it as a service manager does; rules and counters stay or go as the agent decides."""
        self._host.stop(SERVICE)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._host.stop(SERVICE, signal.SIGKILL)

    @property
    def runs(self) -> bool:
        """Whether it runs."""
        return self._host.runs(SERVICE)

    @property
    def log(self) -> str:
        """The end of its log."""
        return self._host.read_log(SERVICE, 10_000)

    def get(self, path: str, timeout: float = 60.0) -> tuple[int, str]:
        """Status and body of a page. Raises OSError where nobody answers."""
        with self._host.entered():
            end = socket.create_connection(("127.0.0.1", PORT), timeout)
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=timeout)
        connection.sock = end
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def page(self) -> str:
        """/metrics, as the second of two scrapes: the first shows new series as 0.

        A worker that has no time for scrapes shows what it showed last; then it is asked again, some times.
        """
        for _ in range(10):
            self.get("/metrics")
            status, body = self.get("/metrics")
            age = re.search(r"^netacct_reading_age_seconds (\S+)$", body, re.MULTILINE)
            if status == http.client.OK and (age is None or float(age[1]) < _SHARED):
                break
        if status != http.client.OK:
            raise HostError(f"{self._host.name}: /metrics: {status}")
        return body

    def totals(self) -> Totals:
        """Bytes and packets of all pods' series, and of what is booked to nobody; without zeros."""
        found: Totals = {}
        for series, count in exposition.totals(self.page()).items():
            if series.level in ("pod", UNATTRIBUTED):
                pod = series.name if series.level == "pod" else UNATTRIBUTED
                key = Series(series.namespace, pod, series.direction, series.traffic)
                found[key] = Count(count.bytes, count.packets)
        return found

    def command(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run `netacct ARGUMENTS` on the node."""
        return self._host.run([*_netacct(), *arguments], check=check)

    def pods(self) -> Any:
        """`netacct pods -o json`."""
        return json.loads(self.command("pods", "-o", "json").stdout)

    def _is_ready(self) -> bool:
        if not self.runs:
            raise HostError(f"{self._host.name}: the agent has ended: {self.log}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/readyz")[0] == http.client.OK
        return False


def _netacct() -> list[str]:
    program = Path(sys.executable).with_name("netacct")
    return [str(program)] if program.exists() else [sys.executable, "-m", "netacct"]
