"""A running agent follows its files: lists of clouds, policy and configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import AgentLab, agent_lab, datagrams, until
from support import PATIENCE, Node

pytestmark = pytest.mark.kernel

POLICY = """\
classes:
  s3: {list: {format: aws, file: lists/ip-ranges.json, services: [S3]}}
  private: {builtin: private}
"""


def write_list(lab: AgentLab, *cidrs: str) -> None:
    """Replace the list of AWS by one in which S3 has these CIDRs."""
    rows = [{"ip_prefix": cidr, "region": "eu-1", "service": "S3", "network_border_group": "eu-1"} for cidr in cidrs]
    lab.write("lists/ip-ranges.json", json.dumps({"syncToken": "1", "prefixes": rows, "ipv6_prefixes": []}))


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[AgentLab]:
    """A node whose agent counts what goes to S3, which is where the lab's storage is."""
    with agent_lab(node, tmp_path) as made:
        (tmp_path / "lists").mkdir()
        write_list(made, "198.51.100.0/24", "203.0.113.128/32")
        made.write("policy.yaml", POLICY)
        node.netns.run(made.start)  # fixtures are made outside of it
        yield made


def reloaded(lab: AgentLab) -> float | None:
    """Whether the last load was good, as a metric."""
    return lab.metric("netacct_config_last_reload_successful")


def test_a_new_list_is_taken_by_itself(lab: AgentLab) -> None:
    """When a list changes the agent counts by the new one, without a signal, and keeps what it counted."""
    octets = datagrams(lab.node, to="storage")
    until(lambda: lab.totals() == {("a-0", "s3"): octets})
    write_list(lab, "192.0.2.0/32")
    until(lambda: "reloaded" in lab.log)
    after = datagrams(lab.node, to="storage", packets=3)
    until(lambda: lab.totals() == {("a-0", "s3"): octets, ("a-0", "internet"): after})
    assert reloaded(lab) == 1


def test_a_truncated_list_changes_nothing(lab: AgentLab) -> None:
    """A list cut short leaves the last good one in force, over a restart too, and a metric says so until then."""
    file = lab.folder / "lists/ip-ranges.json"
    good = file.read_text()
    lab.write("lists/ip-ranges.json", good[: len(good) // 2])
    until(lambda: reloaded(lab) == 0)
    octets = datagrams(lab.node, to="storage")
    until(lambda: lab.totals() == {("a-0", "s3"): octets})
    lab.stop()
    lab.start()
    assert reloaded(lab) == 0
    octets += datagrams(lab.node, to="storage")
    until(lambda: lab.totals() == {("a-0", "s3"): octets})
    assert lab.log.count("list refused") == 2
    lab.write("lists/ip-ranges.json", good)
    until(lambda: reloaded(lab) == 1)


def test_commands_know_the_last_good_list_too(lab: AgentLab) -> None:
    """With a list cut short, what explains, shows and compares takes the copy and warns; `check` and `doctor` tell."""
    lab.write("lists/ip-ranges.json", '{"prefixes": [')
    until(lambda: reloaded(lab) == 0)
    lab.stop()
    for arguments in (("explain", "198.51.100.7"), ("show",), ("diff",)):
        done = lab.command("rules", *arguments)
        assert done.returncode == 0
        warning = f"netacct: warning: {lab.folder}/lists/ip-ranges.json:1: is not JSON, or cut short"
        assert done.stderr.startswith(warning)
        assert "its last good copy is taken" in done.stderr
        assert arguments[0] != "explain" or "S3, eu-1" in done.stdout
    assert lab.command("check").returncode == 78
    findings = json.loads(lab.command("doctor", "-o", "json").stdout)
    assert any("is not JSON, or cut short" in item["what"] for item in findings)


def test_without_a_good_list_the_agent_does_not_start(lab: AgentLab) -> None:
    """Where no copy is left, a list cut short ends the start with 78; the error names file and place."""
    lab.stop()
    for copy in (lab.folder / "state/lists").iterdir():
        copy.unlink()
    lab.write("lists/ip-ranges.json", '{"prefixes": [')
    assert lab.start(wait=False).wait(PATIENCE) == 78
    assert f"{lab.folder}/lists/ip-ranges.json:1: is not JSON, or cut short" in lab.log


def test_policy_and_configuration_are_followed(lab: AgentLab) -> None:
    """A policy, and then another one that the configuration names, are taken when they are written."""
    lab.write("policy.yaml", "classes: {}\n")
    until(lambda: policy_in_force(lab, "policy"))
    lab.write("other.yaml", POLICY)
    lab.configure(policy=str(lab.folder / "other.yaml"))
    until(lambda: policy_in_force(lab, "other"))
    octets = datagrams(lab.node, to="storage")
    until(lambda: lab.totals() == {("a-0", "s3"): octets})


def policy_in_force(lab: AgentLab, name: str) -> bool:
    """Whether the agent has the policy of the files, which has this name."""
    policy = json.loads(lab.command("check", "-o", "json").stdout)["policy"]
    return f'netacct_policy_info{{hash="{policy["hash"]}",name="{name}"}} 1.0' in lab.page()


def test_a_list_that_a_policy_waits_for_is_followed(lab: AgentLab) -> None:
    """A policy that names a missing list is refused, and taken as soon as the list is there."""
    lab.write("policy.yaml", POLICY.replace("ip-ranges", "later"))
    until(lambda: reloaded(lab) == 0)
    (lab.folder / "lists/later.json").write_bytes((lab.folder / "lists/ip-ranges.json").read_bytes())
    until(lambda: reloaded(lab) == 1)
