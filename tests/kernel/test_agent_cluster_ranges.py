"""A running agent counts by the cluster's ranges that it finds, as they come, and keeps them when they go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import AgentLab, agent_lab, datagrams, until
from support import Node

pytestmark = pytest.mark.kernel


def write_pools(lab: AgentLab, *pools: str) -> None:
    """Replace Calico's configuration by one with these pools."""
    ipam = {"type": "calico-ipam", "ipv4_pools": list(pools)}
    plugins = [{"type": "calico", "datastore_type": "kubernetes", "ipam": ipam}]
    document = {"name": "k8s-pod-network", "cniVersion": "0.3.1", "plugins": plugins}
    lab.write("net.d/10-calico.conflist", json.dumps(document))


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[AgentLab]:
    """A node whose agent has the default policy, and a folder of CNI configuration of its own."""
    with agent_lab(node, tmp_path) as made:
        (tmp_path / "net.d").mkdir()
        made.configure(
            policy="default",
            ranges={"providers": [], "cni": {"directories": [str(tmp_path / "net.d")]}},
            cluster_ranges={"providers": ["cni"]},
        )
        node.netns.run(made.start)  # fixtures are made outside of it
        yield made


def take(lab: AgentLab, *pools: str) -> None:
    """Write the pools, and wait until the agent counts by them: it answers a command after what it was told before."""
    write_pools(lab, *pools)
    until(lambda: f"{pools[0]} pod" in lab.log)
    assert lab.command("rules", "diff").returncode == 0


def explain(lab: AgentLab, address: str) -> dict[str, str]:
    """What `netacct rules explain` says."""
    done = lab.command("rules", "explain", address, "-o", "json")
    facts: dict[str, str] = json.loads(done.stdout)
    return facts


def test_a_range_that_is_found_later_is_counted_from_then_on(lab: AgentLab) -> None:
    """Bytes to a remote pod are `pod` from when its range is found; what was counted before stays where it was."""
    before = datagrams(lab.node, to="storage")
    until(lambda: lab.totals() == {("a-0", "internet"): before})
    take(lab, "198.51.100.0/24")
    after = datagrams(lab.node, to="storage", packets=3)
    until(lambda: lab.totals() == {("a-0", "internet"): before, ("a-0", "pod"): after})


def test_a_range_whose_file_goes_stays(lab: AgentLab) -> None:
    """With its file gone the range still counts, and the log says that it is held; another pool takes its place."""
    take(lab, "198.51.100.0/24")
    (lab.folder / "net.d/10-calico.conflist").unlink()
    until(lambda: "what was told holds" in lab.log)
    octets = datagrams(lab.node, to="storage")
    until(lambda: lab.totals() == {("a-0", "pod"): octets})
    take(lab, "192.0.2.0/24")
    after = datagrams(lab.node, to="storage", packets=3)
    until(lambda: lab.totals() == {("a-0", "pod"): octets, ("a-0", "internet"): after})


def test_commands_see_what_the_agent_sees(lab: AgentLab) -> None:
    """`explain` names the file, `show` has the range, `diff` finds nothing to do, and the hash is the policy file's."""
    take(lab, "198.51.100.0/24", "10.0.0.0/7")
    facts = explain(lab, "198.51.100.10")
    path = lab.folder / "net.d/10-calico.conflist"
    assert (facts["traffic"], facts["prefix"]) == ("pod", "198.51.100.0/24")
    assert facts["because"] == f"found in {path} (ipv4_pools)"
    assert "line" not in facts
    assert "198.51.100.0/24" in lab.command("rules", "show").stdout
    assert lab.command("rules", "diff").returncode == 0
    checked = json.loads(lab.command("check", "-o", "json").stdout)
    assert [line["network"] for line in checked["cluster_ranges"]] == ["198.51.100.0/24"]
    assert checked["cluster_faults"] == [
        f"10.0.0.0/7 is wider than /8, which says nothing about a cluster (found in {path} (ipv4_pools))"
    ]
    assert f'hash="{checked["policy"]["hash"]}"' in lab.page()
