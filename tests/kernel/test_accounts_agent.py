"""Accounts of a real agent: pods come and go on real packets, and every sum is what was sent."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from agentlab import AgentLab, agent_lab, datagrams, until
from support import OTHER_POD, POD, Node

from netacct.demo import exposition
from netacct.model import Family

pytestmark = pytest.mark.kernel

FAMILIES: tuple[Family, Family] = (4, 6)

# Who holds the first and the second pod's addresses, one after the other; "" is nobody.
TENANTS = [
    ("team-a/train-0", "team-b/web-0"),
    ("team-a/train-1", "team-b/web-0"),
    ("team-a/train-1", "team-a/eval-0"),
    ("", "team-a/eval-0"),
    ("team-b/web-1", "team-a/eval-0"),
    ("team-a/train-2", ""),
    ("team-a/train-2", "team-b/web-2"),
]

Sums = Counter[tuple[str, str, str]]
"""Bytes by namespace, direction and class."""


def move_in(lab: AgentLab, first: str, second: str) -> None:
    """Give the addresses of the pods to tenants, and wait until the agent knows."""
    owners = {name: ips.values() for name, ips in ((first, POD), (second, OTHER_POD)) if name}
    lab.pods(owners)  # type: ignore[arg-type]  # any order will do
    until(lambda: {f"{pod['namespace']}/{pod['pod']}" for pod in listed(lab, "pods")} == set(owners))


def listed(lab: AgentLab, *arguments: str) -> list[dict[str, Any]]:
    """What a command prints for programs."""
    done = lab.command(*arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def drive(node: Node, first: str, second: str, packets: int) -> Sums:
    """Send from each tenant, and between them; returns what each namespace sent and got."""
    driven: Sums = Counter()
    teams = [name.partition("/")[0] for name in (first, second)]
    for family in FAMILIES:
        if first:
            driven[teams[0], "transmit", "internet"] += datagrams(node, "pod", "internet", packets, family)
            driven[teams[0], "receive", "storage"] += datagrams(node, "storage", "pod", packets + 1, family)
        if second:
            driven[teams[1], "transmit", "storage"] += datagrams(node, "other", "storage", packets + 2, family)
        if first and second:
            between = datagrams(node, "pod", "other", packets + 3, family)
            driven[teams[0], "transmit", "pod"] += between
            driven[teams[1], "receive", "pod"] += between
    return driven


def on_the_page(lab: AgentLab) -> Sums:
    """The totals of namespaces on /metrics."""
    found: Sums = Counter()
    for name, labels, value in exposition.samples(lab.page()):
        for direction in ("receive", "transmit"):
            if name == f"netacct_namespace_{direction}_bytes_total":
                found[labels["namespace"], direction, labels["traffic"]] += int(value)
    return found


def accounted(lab: AgentLab, *arguments: str) -> Sums:
    """The sums of accounts by namespace."""
    found: Sums = Counter()
    for one in listed(lab, "accounts", "--by", "namespace", *arguments):
        for direction in ("receive", "transmit"):
            for traffic, count in one[direction].items():
                found[one["namespace"], direction, traffic] += count["bytes"]
    return found


def test_accounts_are_what_was_sent_and_what_metrics_show(node: Node, tmp_path: Path) -> None:
    """Over tenants, a kill and a stop, closed and open accounts sum to /metrics and to the bytes that were sent."""
    driven: Sums = Counter()
    with agent_lab(node, tmp_path) as lab:
        lab.pods({})
        lab.start()
        for turn, (first, second) in enumerate(TENANTS):
            if turn == 3:
                lab.kill()
                lab.start()
            move_in(lab, first, second)
            driven += drive(node, first, second, 10 * turn + 1)
        until(lambda: on_the_page(lab) == driven)  # a scrape may share a reading of the last second
        lab.stop()
        assert accounted(lab, "--open") == driven
        still = {one["pod"] for one in listed(lab, "accounts", "--open") if one["state"] == "open"}
        assert still == {"train-2", "web-2"}
        lab.start()
        move_in(lab, "", "")
        until(lambda: len(listed(lab, "accounts")) == 14)
        assert accounted(lab) == driven == on_the_page(lab)
        assert {one["state"] for one in listed(lab, "accounts")} == {"closed"}


def test_a_workload_has_its_own_bytes(node: Node, tmp_path: Path) -> None:
    """The account of a finished Job has exactly what its pods sent, in packets too, whoever had the address after."""
    with agent_lab(node, tmp_path) as lab:
        lab.start()
        move_in(lab, "team-a/train-0", "team-a/train-1")
        driven = drive(node, "team-a/train-0", "team-a/train-1", 5)
        move_in(lab, "team-a/next-0", "")
        drive(node, "team-a/next-0", "", 50)
        (found,) = listed(lab, "accounts", "--workload", "Job/train", "--by", "workload", "--since", "1h")
        assert (found["leases"], found["incomplete"]) == (4, 0)
        for direction in ("receive", "transmit"):
            wanted = {traffic: octets for (_, way, traffic), octets in driven.items() if way == direction}
            assert {traffic: count["bytes"] for traffic, count in found[direction].items()} == wanted
        assert found["transmit"]["internet"]["packets"] == 10
        assert listed(lab, "accounts", "--pod", "train-0", "--until", "1h") == []


def test_no_tenant_is_left_out_when_the_state_is_lost(node: Node, tmp_path: Path) -> None:
    """An agent that finds no state makes interrupted accounts of what lasted, and new ones begin at 0."""
    with agent_lab(node, tmp_path) as lab:
        lab.start()
        move_in(lab, "team-a/train-0", "")
        before = drive(node, "team-a/train-0", "", 7)
        lab.stop()
        for path in (tmp_path / "state").glob("netacct.*"):
            path.unlink()
        lab.start()
        (_, _) = interrupted = listed(lab, "accounts", "--pod", "train-0")
        assert {one["state"] for one in interrupted} == {"interrupted"}
        assert accounted(lab, "--pod", "train-0") == before
        after = drive(node, "team-a/train-0", "", 3)
        move_in(lab, "", "")
        until(lambda: len(listed(lab, "accounts", "--pod", "train-0")) == 4)
        assert accounted(lab, "--pod", "train-0") == before + after
