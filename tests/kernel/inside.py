"""An agent in the test's own process, on the real kernel: the test takes its steps and does not wait ten seconds."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import support
from agentlab import AgentLab, datagrams
from support import PATIENCE, sh

from netacct import agent as agents
from netacct import clock, config, desired, policy_file
from netacct.accounting.store import Store
from netacct.agent import Agent
from netacct.books import Books
from netacct.export.native import View
from netacct.identity.source import Replace
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.position import Position
from netacct.model import Direction, Level

CHECK = 0.1
"""Seconds between two looks of such an agent at its rules."""


class Inside:
    """An agent, and what was sent in its presence. To be made and used in the namespace of a lab's node.

    Args:
        lab: its files.
        patch: shortens the agent's times.
        position: how it moves before rivals; as it does everywhere unless given.
    """

    def __init__(self, lab: AgentLab, patch: pytest.MonkeyPatch, position: Position | None = None) -> None:
        assert support.in_private_namespace()
        patch.setattr(agents, "CHECK_SECONDS", CHECK)
        patch.setattr(agents, "SHARED_SECONDS", 0.0)
        self.lab, self.sent = lab, 0
        self.datapath = IptablesDatapath()
        self.datapath.position = position or self.datapath.position
        settings = config.load(str(lab.folder / "netacct.yaml"))
        self.books = Books(Store(Path(settings.state_dir)), settings, settings.identity.sources)
        self.agent = Agent(settings, policy_file.load(settings.policy), self.datapath, self.books)
        self.agent.start(frozenset(), [Replace("file", desired.observations(settings), clock.now())])
        self.before = rules()

    def close(self) -> None:
        """Close what it has open."""
        self.datapath.close()

    def send(self, packets: int = 5) -> None:
        """Send from the pod a-0, in both families."""
        self.sent += sum(datagrams(self.lab.node, packets=packets, family=family) for family in (4, 6))

    def scrape(self) -> View:
        """What is due, and a scrape."""
        self.agent.tick()
        return self.agent.view()

    def until(self, condition: Callable[[View], object], seconds: float = PATIENCE) -> View:
        """Scrape until a condition holds; totals must not decrease meanwhile."""
        end = time.monotonic() + seconds
        before = self.booked()
        while not condition(view := self.scrape()):
            assert time.monotonic() < end, f"it did not happen in time; {self.agent.differences()}"
            now = self.booked()
            assert all(now[traffic] >= octets for traffic, octets in before.items())
            before = now
            time.sleep(0.02)
        return view

    def mended(self) -> View:
        """Scrape until what somebody broke is found and mended."""
        repairs = self.agent._repairs  # a scrape would mend already
        return self.until(lambda view: (view.rule_repairs or 0) > repairs and view.rules_in_sync)

    def booked(self) -> Counter[str]:
        """Bytes that all pods transmitted, by class, without zeros."""
        sums: Counter[str] = Counter()
        for key, count in self.books.ledger.totals.items():
            if key.level in (Level.POD, Level.UNATTRIBUTED) and key.direction == Direction.TRANSMIT and count.bytes:
                sums[key.traffic] += count.bytes
        return sums


def rules() -> list[str]:
    """Both mangle tables as one would restore them, without counters, comments, and epochs in names of sets."""
    lines = sh("iptables-legacy-save -t mangle", "ip6tables-legacy-save -t mangle").splitlines()
    without = [line.partition(" [")[0] for line in lines if not line.startswith("#")]
    return [re.sub(r"(nacc[46]-\S+)-[a-z0-9]{6}\b", r"\1", line) for line in without]


def hook(name: str = "FORWARD") -> list[str]:
    """The rules of a hook, IPv4."""
    return sh(f"iptables-legacy -w 10 -t mangle -S {name}").splitlines()[1:]
