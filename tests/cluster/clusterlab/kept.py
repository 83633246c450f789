"""A cluster that outlived the program which made it: where it is, how to get into its hosts, how it is taken down."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from clusterlab import cgroups
from clusterlab.cluster import Cluster
from clusterlab.hosts import until
from clusterlab.prerequisites import ROOT

WORK = Path(tempfile.gettempdir()) / "netacct-demo-cluster"
"""The folder of the one cluster that may be kept."""

PREFIX = "netacct-demo"


class NoClusterError(Exception):
    """No cluster was kept."""


def save(cluster: Cluster) -> None:
    """Remember a cluster that was made with `keep` in WORK."""
    pids = {host.name: (host.pid, _started(host.pid)) for host in cluster.hosts}
    state = {"pids": pids, "cgroups": [node.cgroup for node in cluster.nodes], "programs": str(cluster.programs)}
    WORK.joinpath("kept.json").write_text(json.dumps(state), encoding="ascii")


def exists() -> bool:
    """Whether there is one, whole or not."""
    return WORK.exists()


def enter(host: str, argv: list[str]) -> None:
    """Become a command inside a host; a shell by default. Raises NoClusterError."""
    pid, started = _load()["pids"].get(host, (0, 0))
    if not pid or _started(pid) != started:
        raise NoClusterError(f"no host {host}: there are {', '.join(_load()['pids'])}")
    path = os.pathsep.join([str(ROOT / ".venv/bin"), _load()["programs"], "/usr/sbin:/usr/bin:/sbin:/bin"])
    command = ["nsenter", "-t", str(pid), "-n", "-m", "-p", "--wd=/", "--", "env", f"PATH={path}", *(argv or ["bash"])]
    os.execvp(command[0], command)  # noqa: S606 -- no shell is wanted


def kubectl(argv: list[str]) -> None:
    """Become kubectl as cluster administrator. Raises NoClusterError."""
    enter("cp", ["kubectl", f"--kubeconfig={WORK / 'pki/admin.kubeconfig'}", *argv])


def down() -> None:
    """End every host, and remove what was made. Raises NoClusterError where there is none."""
    state = _load()
    hosts: list[list[int]] = list(state["pids"].values())
    alive = [pid for pid, started in hosts if _started(pid) == started]  # else somebody else has got the number
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not any(map(_started, alive)), 60, "hosts do not end")
    for name in state["cgroups"]:
        cgroups.remove(name)
    shutil.rmtree(WORK)


def _load() -> Any:
    try:
        return json.loads(WORK.joinpath("kept.json").read_text(encoding="ascii"))
    except FileNotFoundError:
        raise NoClusterError("no cluster is kept here (make demo-cluster KEEP=1)") from None


def _started(pid: int) -> int:
    """When a process was started, in ticks since boot; 0 where there is none (proc(5), /proc/pid/stat, field 22)."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    return 0
