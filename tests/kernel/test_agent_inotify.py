"""A running agent follows all its files with one inotify instance."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import AgentLab, agent_lab, until
from support import OTHER_POD, POD, Node

pytestmark = pytest.mark.kernel

WATCHES = 100
"""Far more than the dozen or two of docs/operations.md."""


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[AgentLab]:
    """A node whose agent has sources of most kinds that follow files."""
    with agent_lab(node, tmp_path) as made:
        for name in ("results", "net.d"):
            (tmp_path / name).mkdir()
        made.configure(
            identity={
                "sources": ["file", "cni", "kubelet-pods-api", "azure-cni", "aws-cni"],
                "file": {"path": str(tmp_path / "pods.yaml")},
                "cni": {"directories": [str(tmp_path / "results")]},
            },
            ranges={"providers": ["cni"], "cni": {"directories": [str(tmp_path / "net.d")]}},
            cluster_ranges={"providers": ["cni", "flannel"]},
        )
        node.netns.run(made.start)  # fixtures are made outside of it
        yield made


def inotify(pid: int) -> list[int]:
    """The descriptors of inotify instances that a process holds."""
    found = Path(f"/proc/{pid}/fd").iterdir()
    return [int(each.name) for each in found if each.is_symlink() and str(each.readlink()) == "anon_inode:inotify"]


def watches(pid: int, instance: int) -> int:
    """How many directories an instance watches (proc(5), fdinfo)."""
    return Path(f"/proc/{pid}/fdinfo/{instance}").read_text(encoding="ascii").count("inotify wd:")


def test_an_agent_holds_one_instance(lab: AgentLab) -> None:
    """However many sources follow files, there is one instance with few watches, before and after all began anew."""
    assert lab.agent is not None
    (before,) = inotify(lab.agent.pid)
    assert 1 < watches(lab.agent.pid, before) < WATCHES
    lab.reload()
    lab.pods({"team-a/a-0": [*POD.values()], "team-c/c-0": [*OTHER_POD.values()]})
    until(lambda: "c-0" in lab.command("pods").stdout)
    (after,) = inotify(lab.agent.pid)
    assert 1 < watches(lab.agent.pid, after) < WATCHES
