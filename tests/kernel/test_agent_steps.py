"""The agent's steps one by one on the real kernel: broken off at each point, under a held lock, with visitors."""

from __future__ import annotations

import fcntl
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agentlab import AgentLab, agent_lab, datagrams
from support import OTHER_POD, POD, Node, sh

from netacct import agent as agents
from netacct import clock, config, desired, policy_file
from netacct.accounting.store import Store
from netacct.agent import Agent
from netacct.books import Books
from netacct.identity.source import Replace
from netacct.kernel.ipset import Sets
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.lock import lock_path
from netacct.kernel.mangle import MangleTable
from netacct.model import Level

pytestmark = pytest.mark.kernel

PODS = {"team-a/a-0": [*POD.values()], "team-b/b-0": [*OTHER_POD.values()]}
VISITOR = {"team-c/c-0": ["192.0.2.77", "2001:db8:77::1"]}


class KilledError(BaseException):
    """Stands for SIGKILL: nothing that was to change kernel or store after it does."""


class Fate:
    """Numbers the moments before and after each operation that changes kernel or store, and kills at one of them."""

    operations = ((Sets, "swap"), (Sets, "destroy"), (MangleTable, "commit"), (Store, "save"))

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None = None) -> None:
        self.moments: list[str] = []
        self._at = at
        for owner, name in self.operations:
            monkeypatch.setattr(owner, name, self._mortal(getattr(owner, name), name))

    def _mortal(self, operation: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self._pass(f"before {name}")
            result = operation(*arguments)
            self._pass(f"after {name}")
            return result

        return run

    def _pass(self, moment: str) -> None:
        if self._at is not None and len(self.moments) >= self._at:
            raise KilledError
        self.moments.append(moment)


class Life:
    """An agent in this process, and what was sent in its presence."""

    def __init__(self, lab: AgentLab) -> None:
        self.lab, self.driven = lab, 0
        self._datapath: IptablesDatapath | None = None

    def begin(self) -> None:
        """A new agent, from the files and the store."""
        self.end()
        self._datapath = IptablesDatapath(patience=0.1)
        settings = config.load(str(self.lab.folder / "netacct.yaml"))
        self.books = Books(Store(Path(settings.state_dir)), settings, settings.identity.sources)
        policy = policy_file.load(settings.policy)
        self.agent = Agent(settings, policy, self._datapath, self.books)
        self.agent.start(frozenset(), [self._seen()])

    def end(self) -> None:
        """Close what the agent had open."""
        if self._datapath is not None:
            self._datapath.close()

    def pods(self, owners: dict[str, list[str]]) -> None:
        """The pods file changes, and the agent takes it in."""
        self.lab.pods(owners)
        self.agent.observe([self._seen()])

    def retire(self) -> None:
        """The class `storage` goes."""
        self.lab.policy(storage=False)
        settings = config.load(str(self.lab.folder / "netacct.yaml"))
        self.agent.reconfigure(settings, policy_file.load(settings.policy))

    def send(self, to: str = "storage") -> None:
        """Send from a-0."""
        self.driven += datagrams(self.lab.node, "pod", to, packets=3)

    def booked(self) -> int:
        """What all pods sent, by the books."""
        self.agent.view()
        self.agent.stop()
        totals = self.books.ledger.totals.items()
        return sum(count.bytes for key, count in totals if key.level is Level.POD and key.direction == "transmit")

    def _seen(self) -> Replace:
        seen = desired.observations(config.load(str(self.lab.folder / "netacct.yaml")))
        return Replace("file", seen, clock.now())


@pytest.fixture
def life(node: Node, tmp_path: Path) -> Iterator[Life]:
    """A life that has not begun."""
    with agent_lab(node, tmp_path) as lab:
        made = Life(lab)
        yield made
        made.end()


def eventful(life: Life) -> None:
    """Everything that installs, swaps, retires, removes."""
    life.begin()
    life.send()
    life.pods({**PODS, **VISITOR})
    life.send()
    life.retire()
    life.send()
    life.agent.pause()
    life.agent.resume()
    life.send()
    life.agent.stop()


def test_a_life_broken_off_between_any_two_operations_is_continued(node: Node, tmp_path: Path) -> None:
    """Killed before or after any swap, destroy, commit or save, the next life's totals are what was sent, exactly."""
    with pytest.MonkeyPatch.context() as patch:
        fate = Fate(patch)
        one = _in(node, tmp_path / "whole")
        eventful(one)
        moments = fate.moments.copy()
        assert one.booked() == one.driven
        one.agent.pause()
        one.end()
    for at in _telling(moments):
        one = _in(node, tmp_path / str(at))
        with pytest.MonkeyPatch.context() as patch:
            Fate(patch, at)
            with pytest.raises(KilledError):
                eventful(one)
        one.begin()
        one.send()
        assert one.booked() == one.driven, f"killed {moments[at]} ({at} of {len(moments)})"
        assert one.books.ledger.resets == 0
        one.agent.pause()
        one.end()
        assert sh("ipset list -n") == ""


def _in(node: Node, folder: Path) -> Life:
    folder.mkdir()
    lab = AgentLab(node, folder)
    lab.configure()
    lab.policy()
    lab.pods(PODS)
    return Life(lab)


def _telling(moments: list[str]) -> list[int]:
    """Some of the moments: of each row of like operations the first, one inside, and the last; a dozen of those."""
    chosen: set[int] = set()
    for _, row in itertools.groupby(enumerate(moments), lambda item: item[1].split()[1]):
        numbers = [number for number, _ in row]
        chosen |= {numbers[0], numbers[-1], random.choice(numbers)}
    return sorted(random.sample(sorted(chosen), min(12, len(chosen))))


def test_an_installation_that_fails_half_way_doubles_nothing(life: Life) -> None:
    """While the lock is held and new sets wait for their rules, readings go on; when it is free, all is exact."""
    life.begin()
    life.send()
    with lock_path().open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        life.pods({**PODS, **VISITOR})
        assert life.agent.not_ready() != []
        life.send()
        assert life.booked() == life.driven
    life.agent._mend_at = 0.0
    life.agent.tick()
    assert life.agent.not_ready() == []
    life.send()
    assert life.booked() == life.driven
    assert life.books.ledger.resets == 0


def test_a_visitor_is_counted_and_later_forgotten(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address outside of the local ranges joins with its pod, is exact, and goes when it has long been silent."""
    monkeypatch.setattr(agents, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(agents, "SETTLE_SECONDS", 0.0)
    address = "192.0.2.77"
    pods_file = {"path": str(life.lab.folder / "pods.yaml")}
    life.lab.configure(identity={"sources": ["file"], "file": pods_file, "late_binding": "10m"})
    node = life.lab.node
    node.pod.sh(f"ip addr add {address}/32 dev eth0")
    node.netns.sh(f"ip route add {address} dev v0", f"ip neigh replace {address} lladdr 02:00:00:00:01:00 dev v0")
    life.begin()
    life.pods({**PODS, **VISITOR})
    source, peer = (node.pod, address), (node.peer, "203.0.113.10")
    sent = node.send(4, source, peer, 5, 100).bytes
    life.pods(PODS)
    life.agent.tick()
    assert address in sh("ipset save", "iptables-legacy-save -t mangle")
    late = node.send(4, source, peer, 2, 100).bytes
    assert life.booked() == sent  # the late ones wait for a name
    now = time.clock_gettime
    for minutes in (11, 22, 33):
        monkeypatch.setattr(time, "clock_gettime", lambda which, later=60 * minutes: now(which) + later)
        life.agent.tick()
    assert address not in sh("ipset save", "iptables-legacy-save -t mangle")
    unattributed = [count.bytes for key, count in life.books.ledger.totals.items() if key.level is Level.UNATTRIBUTED]
    assert (life.booked(), unattributed) == (sent, [late])
    life.pods({**PODS, **VISITOR})
    again = node.send(4, source, peer, 4, 100).bytes
    assert life.booked() == sent + again
    assert life.books.ledger.resets == 0
