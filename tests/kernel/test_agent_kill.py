"""kill -9 at any point of an agent's life: nothing is lost, nothing counted twice."""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from agentlab import AgentLab, Stream, agent_lab, datagrams, streams, until
from support import OTHER_POD, PATIENCE, POD, Node

from netacct.kernel.counters import set_names

pytestmark = pytest.mark.kernel

WAYS = (("pod", "internet"), ("other", "storage"), ("internet", "pod"), ("node", "internet"))


def sent(running: list[Stream], source: str) -> int:
    """The bytes of all streams from a place."""
    return sum(one.sent for one in running if one.source == source)


def summed(totals: dict[tuple[str, str], int]) -> Counter[str]:
    """Totals by name, all classes together."""
    sums: Counter[str] = Counter()
    for (name, _), octets in totals.items():
        sums[name] += octets
    return sums


def test_kills_at_random_moments_lose_nothing(node: Node, tmp_path: Path) -> None:
    """After nine kills in the first second and a half of an agent's life, under traffic, every series is exact."""
    chance = random.Random()
    with agent_lab(node, tmp_path) as lab:
        lab.start()
        with streams(node, *WAYS) as running:
            for _ in range(9):
                lab.kill()
                lab.start(wait=False)
                time.sleep(chance.uniform(0, 1.5))
            lab.kill()
        lab.start()
        driven = {("a-0", "internet"): sent(running, "pod"), ("b-0", "storage"): sent(running, "other")}
        until(lambda: lab.totals() == driven)
        assert lab.totals("pod", "receive") == {("a-0", "internet"): sent(running, "internet")}
        assert lab.totals("host")["", "internet"] == sent(running, "node")
        assert lab.totals("unattributed") == lab.totals("unattributed", "receive") == {}
        assert lab.metric("netacct_unexplained_resets_total") == 0


def test_kills_while_pods_and_classes_change_lose_nothing(node: Node, tmp_path: Path) -> None:
    """Killed while a class retires or returns, and while pods come that need larger sets, each pod's sum is exact."""
    chance = random.Random()
    with agent_lab(node, tmp_path) as lab:
        lab.start()
        with streams(node, *WAYS[:3]) as running:
            for number in range(9):
                _change(lab, number, chance)
                time.sleep(chance.uniform(0, 0.25))
                lab.kill()
                lab.start(wait=chance.random() < 0.7)
            lab.kill()
        lab.start()
        driven = {"a-0": sent(running, "pod"), "b-0": sent(running, "other")}
        until(lambda: summed(lab.totals()) == driven)
        assert summed(lab.totals("pod", "receive")) == {"a-0": sent(running, "internet")}
        assert lab.totals("unattributed") == lab.totals("unattributed", "receive") == {}
        assert lab.metric("netacct_unexplained_resets_total") == 0


def _change(lab: AgentLab, number: int, chance: random.Random) -> None:
    """Change pods, policy or both, and tell the agent."""
    visitors = {f"team-c/c-{number}": [f"192.0.2.{10 + number}", f"2001:db8:77::{number}"]} if number % 3 else {}
    lab.pods({"team-a/a-0": [*POD.values()], "team-b/b-0": [*OTHER_POD.values()], **visitors})
    if number % 2:
        lab.policy(storage=chance.random() < 0.5)
        lab.hang_up()


def test_kills_while_rules_are_removed_and_applied_lose_nothing(node: Node, tmp_path: Path) -> None:
    """Whoever is killed in `rules remove` or `rules apply`, with an agent or without, what was counted stays booked."""
    chance = random.Random()
    driven = 0
    with agent_lab(node, tmp_path) as lab:
        for number in range(6):
            if number % 2:
                lab.start()
            else:
                assert lab.command("rules", "apply").returncode == 0
            driven += datagrams(node, "pod", "internet")
            command = lab.spawn("rules", "remove")
            time.sleep(chance.uniform(0.1, 0.8))
            lab.kill()
            command.kill()
            command.wait(PATIENCE)
        lab.start()
        driven += datagrams(node, "pod", "internet")
        until(lambda: lab.totals() == {("a-0", "internet"): driven})
        assert lab.command("rules", "remove").returncode == 0
        assert set_names() == []
        assert lab.totals() == {("a-0", "internet"): driven}
