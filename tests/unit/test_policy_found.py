"""Found cluster ranges in policies, case by case, as clusters have them."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path

import pytest

from netacct import explain, policy_file
from netacct.model import pack
from netacct.policy import Policy, Prefix, classify
from netacct.policy_found import Merging, Unused, merge

FLANNEL = "found in /run/flannel/subnet.env (FLANNEL_NETWORK)"
ETH0 = "connected subnet of eth0, which has the default route"


def fact(cidr: str, traffic: str, origin: str = "found in a test") -> Prefix:
    """A fact."""
    return Prefix(ipaddress.ip_network(cidr), traffic, origin)


def policy(folder: Path, text: str) -> Policy:
    """A policy of a file."""
    (folder / "p.yaml").write_text(text)
    return policy_file.load(str(folder / "p.yaml"))


def classes(merged: Policy, *addresses: str) -> Mapping[str, str]:
    """The class of each address."""
    return {address: classify(merged, pack(address)).traffic for address in addresses}


def nets(*cidrs: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    """Networks."""
    return [ipaddress.ip_network(cidr) for cidr in cidrs]


def test_an_unconfigured_node_tells_remote_pods_nodes_and_services() -> None:
    """The shipped default with what a flannel node finds: pods elsewhere, other nodes, Services; else private."""
    found = [fact("10.244.0.0/16", "pod"), fact("192.168.50.0/24", "node"), fact("10.96.0.0/16", "service")]
    merged, unused = merge(policy_file.load("default"), found, nets("10.244.1.0/24"))
    assert unused == ()
    assert classes(merged, "10.244.2.20", "192.168.50.2", "10.96.0.10", "172.20.0.5", "203.0.113.10") == {
        "10.244.2.20": "pod",
        "192.168.50.2": "node",
        "10.96.0.10": "service",
        "172.20.0.5": "private",
        "203.0.113.10": "internet",
    }


def test_the_origin_is_what_explain_prints() -> None:
    """`because` says where the range was found, and no line of the policy is named."""
    merged, unused = merge(policy_file.load("default"), [fact("10.244.0.0/16", "pod", FLANNEL)])
    facts = explain.explain(merged, "10.244.2.20", unused=unused)
    assert facts["because"] == FLANNEL
    assert facts["prefix"] == "10.244.0.0/16"
    assert "line" not in facts
    assert facts["beaten"].startswith("10.0.0.0/8 private (default.yaml:")


def test_a_subnet_that_pods_share_is_cluster() -> None:
    """On Azure's node subnet, where pods are, too, it is `cluster`, and so is kube-proxy's range around it."""
    found = [fact("10.224.0.0/16", "node", ETH0), fact("10.224.0.0/12", "pod")]
    merged, unused = merge(policy_file.load("azure"), found, nets("10.224.0.7/32", "10.224.0.9/32"))
    assert classes(merged, "10.224.3.3", "10.225.0.1", "10.244.0.1") == {
        "10.224.3.3": "cluster",
        "10.225.0.1": "cluster",
        "10.244.0.1": "pod",
    }
    assert unused == ()
    assert explain.explain(merged, "10.225.0.1")["because"] == "found in a test; nodes are in 10.224.0.0/16, too"


def test_a_policy_without_cluster_leaves_a_shared_subnet_private() -> None:
    """The shipped default has no such class: nothing is guessed, and explain says why."""
    found = [fact("10.0.0.0/20", "node", ETH0)]
    merged, unused = merge(policy_file.load("default"), found, nets("10.0.0.7/32"))
    assert classes(merged, "10.0.0.9") == {"10.0.0.9": "private"}
    why = f"10.0.0.0/20 cluster ({ETH0}; pods of this node are in 10.0.0.0/20, too): the policy has no class cluster"
    assert explain.explain(merged, "10.0.0.9", unused=unused)["unused"] == why
    assert "unused" not in explain.explain(merged, "192.0.2.1", unused=unused)


def test_nothing_is_said_of_the_subnet_while_no_pod_is_known() -> None:
    """Before any pod or pod range is known, the nodes' subnet may be the pods', too."""
    found = [fact("10.0.0.0/20", "node", ETH0), fact("fd00::/64", "node", ETH0)]
    _, unused = merge(policy_file.load("default"), found, nets("fd01::/80"))
    assert [one.fact.origin for one in unused] == [f"{ETH0}; whether pods are in 10.0.0.0/20, too, is not known"]


def test_pods_in_their_own_part_of_a_wide_subnet_leave_it_to_nodes() -> None:
    """A pod range inside of the nodes' subnet is pods; the rest of the subnet is nodes."""
    found = [fact("10.0.0.0/8", "node", ETH0), fact("10.244.0.0/16", "pod")]
    merged, _ = merge(policy_file.load("default"), found, nets("10.244.1.0/24"))
    assert classes(merged, "10.1.1.1", "10.244.2.2") == {"10.1.1.1": "node", "10.244.2.2": "pod"}


def test_a_pod_range_around_the_nodes_loses_to_their_subnet() -> None:
    """Where this node's pods are outside of the subnet, the wide range is pods, and the longer subnet nodes."""
    found = [fact("10.1.0.0/24", "node", ETH0), fact("10.0.0.0/8", "pod")]
    merged, _ = merge(policy_file.load("default"), found, nets("10.200.1.0/24"))
    assert classes(merged, "10.1.0.9", "10.1.1.9", "10.200.7.7") == {
        "10.1.0.9": "node",
        "10.1.1.9": "pod",
        "10.200.7.7": "pod",
    }


def test_a_class_of_the_users_own_keeps_its_range(tmp_path: Path) -> None:
    """What is found inside of a CIDR of the policy's own is not used; that is told where the class differs."""
    mine = policy(tmp_path, "classes: {gpu: {cidrs: [10.244.0.0/18]}, pod: {cidrs: [10.8.0.0/16]}}\n")
    found = [fact("10.244.2.0/24", "pod"), fact("10.8.4.0/24", "pod"), fact("10.244.0.0/16", "pod")]
    merged, unused = merge(mine, found)
    assert classes(merged, "10.244.2.1", "10.244.99.1", "10.8.4.4") == {
        "10.244.2.1": "gpu",
        "10.244.99.1": "pod",
        "10.8.4.4": "pod",
    }
    assert unused == (Unused(found[0], "the policy's own 10.244.0.0/18 is gpu (p.yaml:1)"),)


def test_an_equal_cidr_of_the_policys_own_wins(tmp_path: Path) -> None:
    """The same CIDR found in another class is not used."""
    mine = policy(tmp_path, "classes: {node: {cidrs: [10.1.0.0/16]}}\n")
    merged, unused = merge(mine, [fact("10.1.0.0/16", "pod")])
    assert classes(merged, "10.1.2.3") == {"10.1.2.3": "node"}
    assert [one.why for one in unused] == ["the policy's own 10.1.0.0/16 is node (p.yaml:1)"]


def test_a_built_in_list_yields() -> None:
    """A range found that equals a CIDR of `private` takes it over; nothing else of the list changes."""
    default = policy_file.load("default")
    merged, _ = merge(default, [fact("10.0.0.0/8", "pod")], nets("10.1.0.0/24"))
    assert classes(merged, "10.9.9.9", "172.16.0.1") == {"10.9.9.9": "pod", "172.16.0.1": "private"}
    assert merged.hash == default.hash


def test_of_equal_ranges_the_first_in_rank_wins() -> None:
    """The other one is told as unused, with what beat it."""
    found = [fact("10.9.0.0/16", "service", "a"), fact("10.9.0.0/16", "pod", "b")]
    merged, unused = merge(policy_file.load("default"), found)
    assert classes(merged, "10.9.0.1") == {"10.9.0.1": "pod"}
    assert unused == (Unused(found[0], "10.9.0.0/16 is pod: b"),)


def test_thousands_of_redundant_ranges_leave_one() -> None:
    """Ranges inside of a found one of their own class are left out: rules do not grow with nodes."""
    found = [fact("10.0.0.0/9", "pod"), *(fact(f"10.{n >> 8}.{n & 255}.0/24", "pod") for n in range(7500))]
    merged, unused = merge(policy_file.load("default"), found)
    assert merged.found == frozenset(nets("10.0.0.0/9"))
    assert unused == ()


def test_nothing_found_is_the_policy_itself() -> None:
    """Without facts no new policy is made."""
    default = policy_file.load("default")
    assert merge(default, []).policy is default
    assert Merging()(default, (), []).policy is default


@pytest.mark.parametrize("name", ["azure", "aws"])
def test_policies_of_clouds_have_a_class_for_what_is_shared(name: str) -> None:
    """Where pods and nodes can share a subnet the shipped policy says so, with a mark, and it may stay empty."""
    shipped = policy_file.load(name)
    assert "cluster" in {item.name for item in shipped.classes}
    assert shipped.marks is not None
    assert shipped.marks.values["cluster"] == 6
    vpc = [fact("10.50.0.0/16", "cluster", "VPC, by AWS metadata")]
    assert classes(merge(shipped, vpc).policy, "10.50.1.1") == {"10.50.1.1": "cluster"}
