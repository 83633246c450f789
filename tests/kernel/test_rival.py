"""The agent beside a program that wants to be first as well: it fights a little, gives way, and comes back."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from agentlab import AgentLab, agent_lab
from inside import Inside, hook, rules
from structlog.testing import capture_logs
from support import Node, sh

from netacct import config, policy_file
from netacct.kernel.position import MOVES, Position

pytestmark = pytest.mark.kernel

BACKOFF = 0.3

RIVAL = """
rule="-p tcp -m tcp --dport 9 -j {}"
for i in $(seq 5000); do
    if [ "$(iptables-legacy -w 10 -t mangle -S FORWARD 1)" != "-A FORWARD $rule" ]; then
        iptables-legacy -w 10 -t mangle -D FORWARD $rule 2>/dev/null
        iptables-legacy -w 10 -t mangle -I FORWARD 1 $rule
        echo moved
    fi
    sleep 0.05
done
"""
"""A program that looks every 50 ms, for some minutes, and puts its rule on top where it finds another one there."""

ACCEPT = "-A FORWARD -p tcp -m tcp --dport 9 -j ACCEPT"


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[AgentLab]:
    """A node without an agent."""
    with agent_lab(node, tmp_path) as made:
        yield made


class Rival:
    """Runs RIVAL in this thread's namespace."""

    def __init__(self, folder: Path, target: str) -> None:
        assert support.in_private_namespace()
        self._out = folder / "rival.out"
        with self._out.open("wb") as out:
            self._process = subprocess.Popen(["sh", "-c", RIVAL.format(target)], stdout=out)

    @property
    def moves(self) -> int:
        """How often it moved its rule."""
        return self._out.read_text().count("moved")

    def stop(self) -> None:
        """End it; its rule stays."""
        self._process.kill()
        self._process.wait(support.PATIENCE)


@contextlib.contextmanager
def rival(folder: Path, target: str = "ACCEPT") -> Iterator[Rival]:
    """A rival for the length of a `with` block."""
    made = Rival(folder, target)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def window() -> float:
    """Seconds in which the agent moves three times at most: longer than a test."""
    return 300.0


@pytest.fixture
def inside(lab: AgentLab, monkeypatch: pytest.MonkeyPatch, window: float) -> Iterator[Inside]:
    """An agent that waits for less than usual."""
    made = lab.node.netns.run(lambda: Inside(lab, monkeypatch, Position(BACKOFF, window)))
    yield made
    made.close()


def shadowed(inside: Inside) -> bool:
    """What a scrape says of it."""
    return inside.scrape().blind_spots["shadowed"]


def until_yielded(inside: Inside) -> None:
    """Step until the agent has moved as often as it may, and is behind the rival for good."""
    inside.until(lambda view: (view.rule_repairs or 0) >= MOVES and view.blind_spots["shadowed"])


def test_the_agent_yields_after_three_moves_and_names_the_rival(inside: Inside, tmp_path: Path) -> None:
    """Against a rival that is always on top the agent moves three times, then both rest, and log and metric say so."""
    assert not shadowed(inside)
    with rival(tmp_path) as other, capture_logs() as logs:
        until_yielded(inside)
        support.eventually(lambda: other.moves == MOVES + 1)
        before = rules()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            view = inside.scrape()
            time.sleep(0.05)
        assert other.moves == MOVES + 1

    assert rules() == before
    assert hook()[0] == ACCEPT
    assert view.rule_repairs == MOVES
    assert (view.blind_spots["shadowed"], view.rules_in_sync) == (True, True)
    assert inside.agent.not_ready() == []
    assert inside.agent.status().endswith("rules in sync, behind others")
    told = [line for line in logs if line["event"].startswith("yielding")]
    assert [(line["log_level"], line["hook"], line["rule"]) for line in told] == [("warning", "FORWARD", "1 -j ACCEPT")]
    words = "IPv4: hook FORWARD: our rules are behind rule 1 (-j ACCEPT), which can end traversal"
    assert inside.agent.differences() == [words]
    inside.send()
    inside.scrape()
    assert inside.booked() == {"internet": inside.sent}, "what the rival lets pass is counted"


def test_a_new_plan_does_not_move_rules_that_gave_way(inside: Inside, tmp_path: Path) -> None:
    """While it yields, the agent installs other classes and mends what is broken, and stays behind the rival."""
    with rival(tmp_path) as other:
        until_yielded(inside)
        support.eventually(lambda: other.moves == MOVES + 1)
        inside.lab.policy(storage=False)
        settings = config.load(str(inside.lab.folder / "netacct.yaml"))
        inside.agent.reconfigure(settings, policy_file.load(settings.policy))
        assert not any("storage" in line for line in sh("iptables-legacy-save -t mangle").splitlines())
        sh(*(f"iptables-legacy -w 10 -t mangle -D FORWARD {line[11:]}" for line in hook() if "NETACCT" in line))
        inside.mended()
        assert [("NETACCT" in line) for line in hook()] == [False, True]
        assert other.moves == MOVES + 1
    assert shadowed(inside)


@pytest.mark.parametrize("window", [8.0])
def test_the_agent_comes_back_when_the_rival_rests(inside: Inside, tmp_path: Path) -> None:
    """When the rival has ended and left its rule, the agent is first again after the window; the blind spot ends."""
    with rival(tmp_path):
        until_yielded(inside)
        moves = inside.agent._repairs  # more than three, where those took longer than the window
    inside.until(lambda view: view.rules_in_sync and not view.blind_spots["shadowed"])
    assert "NETACCT" in hook()[0]
    assert ACCEPT in hook()
    assert inside.scrape().rule_repairs == moves + 1


def test_a_rival_that_goes_is_forgiven_at_once(inside: Inside, tmp_path: Path) -> None:
    """When somebody deletes the rival's rule the blind spot ends, and the next one like it is overtaken at once."""
    with rival(tmp_path):
        until_yielded(inside)
    sh(f"iptables-legacy -w 10 -t mangle -D {ACCEPT[3:]}")
    inside.until(lambda view: not view.blind_spots["shadowed"])
    sh(f"iptables-legacy -w 10 -t mangle -I {ACCEPT[3:]}")
    inside.mended()
    assert "NETACCT" in hook()[0]


def test_an_order_to_apply_moves_the_rules(inside: Inside, tmp_path: Path) -> None:
    """`rules apply` puts rules that gave way in the first place, because somebody asked for it."""
    with rival(tmp_path):
        until_yielded(inside)
    assert len(inside.agent.apply()) == 1
    assert "NETACCT" in hook()[0]
    assert not shadowed(inside)


def test_a_rival_that_ends_nothing_is_left_alone(inside: Inside, tmp_path: Path) -> None:
    """A program that keeps a rule on top that lets packets go on is no rival: nobody moves, nothing is hidden."""
    with rival(tmp_path, "MARK --set-xmark 0x100/0x100") as other:
        support.eventually(lambda: other.moves == 1)
        end = time.monotonic() + 1
        while time.monotonic() < end:
            view = inside.scrape()
            time.sleep(0.05)
        assert other.moves == 1
    assert (view.rule_repairs, view.blind_spots["shadowed"], view.rules_in_sync) == (0, False, True)
