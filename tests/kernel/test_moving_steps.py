"""A move from one datapath to the other, broken off between any two of its operations on kernel and store."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agentlab import AgentLab, datagrams
from support import OTHER_POD, POD, Node, sh

from netacct import choosing, clock, config, desired, policy_file
from netacct.accounting.store import Store
from netacct.agent import Agent
from netacct.books import Books
from netacct.identity.source import Replace
from netacct.kernel import detect_look
from netacct.kernel.detect import IPTABLES, NFTABLES
from netacct.kernel.ipset import Sets
from netacct.kernel.mangle import MangleTable
from netacct.kernel.nft_writer import NftWriter
from netacct.model import Level
from netacct.moving import OpenDatapath

pytestmark = pytest.mark.kernel

OPERATIONS = (
    (Sets, "create_hash"),
    (Sets, "destroy"),
    (MangleTable, "commit"),
    (NftWriter, "commit"),
    (NftWriter, "fill"),
    (Store, "save"),
)


class KilledError(BaseException):
    """Stands for SIGKILL: nothing that was to change kernel or store after it does."""


class Fate:
    """Numbers the moments before and after each operation, and kills at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None = None) -> None:
        self.moments: list[str] = []
        self._at = at
        for owner, name in OPERATIONS:
            words = f"{owner.__name__}.{name}"
            monkeypatch.setattr(owner, name, self._mortal(getattr(owner, name), words))

    def _mortal(self, operation: Callable[..., Any], words: str) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self._pass(f"before {words}")
            result = operation(*arguments, **named)
            self._pass(f"after {words}")
            return result

        return run

    def _pass(self, moment: str) -> None:
        if self._at is not None and len(self.moments) >= self._at:
            raise KilledError
        self.moments.append(moment)


class Life:
    """Agents in this process, one after the other, and what was sent in their presence."""

    def __init__(self, lab: AgentLab) -> None:
        self.lab, self.driven = lab, 0
        self._datapath: OpenDatapath | None = None

    def begin(self, name: str) -> None:
        """A new agent with this datapath, from the files and the store."""
        self.end()
        self._datapath = choosing.open_datapath(name)
        settings = config.load(str(self.lab.folder / "netacct.yaml"))
        self.books = Books(Store(Path(settings.state_dir)), settings, settings.identity.sources)
        policy = policy_file.load(settings.policy)
        self.agent = Agent(settings, policy, self._datapath, self.books, choosing.other_of(name))
        seen = Replace("file", desired.observations(settings), clock.now())
        self.agent.start(frozenset(), [seen])

    def end(self) -> None:
        """Close what the agent had open, as its death would."""
        if self._datapath is not None:
            self._datapath.close()
            self._datapath = None

    def send(self) -> None:
        """Send from a-0, one way that is counted."""
        self.driven += datagrams(self.lab.node, "pod", "storage", packets=3)

    def booked(self) -> int:
        """What all pods sent, by the books."""
        self.agent.view()
        self.agent.stop()
        totals = self.books.ledger.totals.items()
        return sum(count.bytes for key, count in totals if key.level is Level.POD and key.direction == "transmit")


@pytest.mark.parametrize(("before", "after"), [(IPTABLES, NFTABLES), (NFTABLES, IPTABLES)])
def test_a_move_broken_off_anywhere_is_continued(node: Node, tmp_path: Path, before: str, after: str) -> None:
    """Killed at any moment of a move, the next life is exact, whether it goes on with the move or back."""
    life = _life(node, tmp_path)
    moments = _moments_of_a_move(life, before, after)
    for at in _telling(moments):
        for name in (after, before):
            life.begin(before)
            life.send()
            life.agent.stop()
            life.send()
            with pytest.MonkeyPatch.context() as patch:
                Fate(patch, at)
                with pytest.raises(KilledError):
                    life.begin(after)
            life.begin(name)
            life.send()
            where = f"killed {moments[at]} ({at} of {len(moments)}), then {name}"
            assert life.booked() == life.driven, where
            assert life.books.ledger.resets == 0, where
            assert [one for one in (IPTABLES, NFTABLES) if detect_look.ours(one)] == [name], where
    life.agent.pause()
    life.end()
    assert sh("ipset list -n", "nft list tables | grep netacct || true") == ""


def _life(node: Node, folder: Path) -> Life:
    lab = AgentLab(node, folder)
    lab.configure()
    lab.policy()
    lab.pods({"team-a/a-0": [*POD.values()], "team-b/b-0": [*OTHER_POD.values()]})
    return Life(lab)


def _moments_of_a_move(life: Life, before: str, after: str) -> list[str]:
    """All moments of a move that nothing breaks off; with a reserve, because later ones may have fewer."""
    life.begin(before)
    life.send()
    with pytest.MonkeyPatch.context() as patch:
        fate = Fate(patch)
        life.begin(after)
        moments = fate.moments.copy()
    life.send()
    assert life.booked() == life.driven
    return moments


def _telling(moments: list[str]) -> list[int]:
    """Of each row of like operations the first moment, one inside, and the last; seven of those."""
    chosen: set[int] = set()
    for _, row in itertools.groupby(enumerate(moments[:-1]), lambda item: item[1].split()[1]):
        numbers = [number for number, _ in row]
        chosen |= {numbers[0], numbers[-1], random.choice(numbers)}
    return sorted(random.sample(sorted(chosen), min(7, len(chosen))))
