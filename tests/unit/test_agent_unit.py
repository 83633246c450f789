"""The agent's order of operations, and what it does when a part of it fails: on a datapath in memory."""

from __future__ import annotations

import errno
import socket
import threading
import time
from pathlib import Path

import pytest
import structlog
from agentnode import INTERNET, A, Node, pods

from netacct import choosing, clock, config, marking, policy_file
from netacct.agent import Agent
from netacct.config import Config
from netacct.control import Command
from netacct.errors import DatapathError, NetacctError
from netacct.kernel.detect import Choice, Facts
from netacct.kernel.fake import FakeDatapath, FakeKernel
from netacct.model import pack
from netacct.service import Scrape, Service


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node without an agent."""
    return Node(tmp_path)


def test_a_handover_reads_before_it_changes_leases_and_saves_after(node: Node) -> None:
    """When an address changes hands: one reading, booked to the old holder, then the new lease, then the store."""
    agent = node.begin({A: "a"})
    node.count(A, 100)
    agent.observe([pods({A: "b"})])
    node.count(A, 7)
    agent.stop()
    assert node.calls[:3] == ["read", "add", "save"]
    assert node.sent() == {"a": 100, "b": 7}


def test_leases_stay_while_counters_cannot_be_read(node: Node) -> None:
    """A handover waits for a reading that works, so that no byte goes to the wrong pod."""
    agent = node.begin({A: "a"})
    node.datapath.broken = {"read"}
    agent.observe([pods({A: "b"})])
    node.count(A, 100)
    node.datapath.broken = set()
    agent._settle_at = 0.0
    agent.tick()
    node.count(A, 7)
    agent.stop()
    assert node.sent() == {"a": 100, "b": 7}


@pytest.mark.parametrize("is_running", [True, False])
def test_a_class_that_goes_after_its_sets_were_lost_holds_nothing_up(node: Node, is_running: bool) -> None:
    """Counters that somebody destroyed, and that the next policy does not bring back, delay no account of a pod."""
    policy = Path(node.config.policy)
    policy.write_text(policy.read_text().replace("pod: {}", "pod: {}, storage: {cidrs: [198.51.100.0/24]}"))
    node.policy = policy_file.load(str(policy))
    agent = node.begin({A: "a"})
    agent.view()
    for key in [key for key in node.kernel.sets if key.traffic == "storage"]:
        del node.kernel.sets[key]
    node.configure()
    if is_running:
        agent.reconfigure(node.config, node.policy)
    else:
        agent.stop()
        agent = node.begin({A: "a"})
    node.count(A, 100)
    agent.observe([pods({A: "b"})])
    assert node.accounts() == [("a", 100)]


@pytest.mark.parametrize("broken", ["read", "install"])
def test_trouble_does_not_keep_the_agent_busy(node: Node, broken: str) -> None:
    """After a failed reading or repair the next is due in seconds, not at once."""
    agent = node.begin()
    node.datapath.broken = {broken}
    del node.kernel.sets[INTERNET]
    agent._check_at = agent._settle_at = 0.0
    agent.tick()
    assert broken in node.calls
    assert agent.due() > clock.now() + 4
    assert agent.not_ready() != []
    node.datapath.broken = set()
    agent._mend_at = agent._settle_at = 0.0
    agent.tick()
    assert agent.not_ready() == []


def test_a_failing_store_does_not_keep_the_agent_busy(node: Node) -> None:
    """After a checkpoint that failed the next is due in seconds; the log has it once."""
    agent = node.begin()
    node.store.broken = True
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            node.books.save_at = 0.0
            agent.tick()
            assert agent.due() > clock.now() + 4
    assert [line["event"] for line in logs] == ["cannot store the totals, trying again"]


def test_at_rest_nothing_is_logged(node: Node) -> None:
    """Dozens of scrapes, checks, readings and checkpoints log nothing above debug."""
    agent = node.begin()
    with structlog.testing.capture_logs() as logs:
        for _ in range(60):
            node.count(A, 1)
            agent._check_at = agent._settle_at = agent._marking.due = node.books.save_at = 0.0
            agent.tick()
            agent.view()
    assert [line for line in logs if line["log_level"] != "debug"] == []


def test_a_lasting_trouble_is_logged_once(node: Node) -> None:
    """What fails again and again fills no log."""
    agent = node.begin()
    node.datapath.broken = {"read", "install"}
    del node.kernel.sets[INTERNET]
    with structlog.testing.capture_logs() as logs:
        for _ in range(50):
            agent._check_at = agent._settle_at = agent._mend_at = 0.0
            agent.tick()
            agent.view()
    assert len(logs) <= 4


def test_totals_remember_when_they_began(node: Node) -> None:
    """The start of accounting survives restarts, and is new when the totals are."""
    began = node.begin().view().accounting_start
    assert node.begin().view().accounting_start == began
    (node.folder / "state" / "netacct.db").unlink()
    anew = node.begin().view().accounting_start
    assert began is not None
    assert anew is not None
    assert began < anew <= time.time()


def test_books_ahead_of_the_kernel_are_not_resumed(node: Node) -> None:
    """Where counters are lower than stored, totals begin anew, with the pods that the sources name."""
    agent = node.begin({A: "a"})
    node.count(A, 1000)
    agent.stop()
    node.kernel.sets[INTERNET].counts[A] = node.kernel.sets[INTERNET].counts[A]._replace(bytes=10)
    agent = node.begin({A: "a"})
    node.count(A, 5)
    agent.stop()
    assert node.sent() == {"a": 5}


def test_rules_that_somebody_removed_stay_removed_over_a_reload(node: Node) -> None:
    """After `rules remove`, a reload leaves the agent paused; switching `enabled` off and on again does not."""
    agent = node.begin()
    agent.pause()
    agent.reconfigure(node.configure(metrics={"pods": False}), node.policy)
    assert (agent.paused, node.kernel.sets) == (True, {})
    agent.reconfigure(node.configure(enabled=False), node.policy)
    with pytest.raises(NetacctError, match="enabled is false"):
        agent.apply()
    agent.reconfigure(node.configure(), node.policy)
    assert not agent.paused
    assert INTERNET in node.kernel.sets


def test_a_removal_that_fails_is_tried_again(node: Node) -> None:
    """`enabled: false` while the kernel refuses: rules are removed later, with their last bytes booked."""
    agent = node.begin({A: "a"})
    node.datapath.broken = {"remove"}
    agent.reconfigure(node.configure(enabled=False), node.policy)
    node.count(A, 100)
    assert INTERNET in node.kernel.sets
    node.datapath.broken = set()
    agent._mend_at = 0.0
    agent.tick()
    assert node.kernel.sets == {}
    assert node.sent() == {"a": 100}
    assert agent.due() > clock.now() + 4


def test_the_log_says_why_accounting_is_paused(node: Node) -> None:
    """A pause names its reason: the command, or the configuration, also where that was so from the start."""
    with structlog.testing.capture_logs() as logs:
        node.begin().pause()
        node.configure(enabled=False)
        node.begin()
    assert [line["because"] for line in logs if line["event"] == "rules removed, accounting is paused"] == [
        "netacct rules remove",
        "enabled is false in the configuration",
    ]


def test_bytes_after_a_pause_are_not_those_of_pods_that_ended_in_it(node: Node) -> None:
    """What is counted after a pause belongs to who holds the address then, without ambiguity."""
    agent = node.begin({A: "a"})
    agent.pause()
    agent.observe([pods({A: "b"})])
    agent.resume()
    node.count(A, 9)
    agent.stop()
    assert node.sent() == {"b": 9}
    assert node.books.ledger.ambiguous_bytes == 0


def test_a_scrape_sees_the_difference_and_the_next_tick_mends(node: Node) -> None:
    """A scrape never repairs, because that may wait for a lock; it says that rules are out of sync."""
    agent = node.begin()
    node.kernel.flush(INTERNET)
    agent._check_at = 0.0
    assert agent.view().rules_in_sync is False
    assert "install" not in node.calls
    agent.tick()
    view = agent.view()
    assert (view.rules_in_sync, view.rule_repairs) == (True, 1)


def test_a_reload_that_cannot_set_marks_changes_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where marks are asked for and somebody else has the bits, the configuration of before stays whole."""
    agent = node.begin()

    def refuse(*_: object) -> None:
        raise DatapathError("marks.mode is on, but a rule sets bits of the mask")

    monkeypatch.setattr(marking, "decide", refuse)
    before = agent._config
    with pytest.raises(DatapathError):
        agent.reconfigure(node.configure(local_ranges=["10.9.0.0/28"]), node.policy)
    assert agent._config is before


def service(node: Node, agent: Agent) -> Service:
    """A service whose worker is this test."""
    made = Service(lambda: node.config)
    made._agent = agent
    return made


def test_a_removal_that_failed_is_not_called_done(node: Node) -> None:
    """`netacct rules remove` says that the kernel refuses for as long as it does, not that there is nothing to do."""
    worker = service(node, node.begin())
    node.datapath.broken = {"remove"}
    for _ in range(2):
        with pytest.raises(DatapathError, match="remove is broken"):
            worker._command(Command("remove", {}))
    assert node.kernel.sets
    node.datapath.broken = set()
    worker._command(Command("remove", {}))
    assert not node.kernel.sets


def test_a_reload_that_the_kernel_refuses_is_shown_as_failed(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is out of descriptors keeps the configuration before, and says so."""
    worker = service(node, node.begin())

    def load() -> Config:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(worker, "_load", load)
    worker._reload(asked=True)
    assert worker._agent.view().config_last_reload_successful is False


def test_a_reload_that_fails_as_nobody_foresaw_ends_for_systemd_too(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The unit does not stay `reloading`, and the reload is shown as failed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        worker = service(node, node.begin())
        monkeypatch.setattr(worker, "_load", lambda: None)
        with pytest.raises(AttributeError):
            worker._reload(asked=True)
        assert [manager.recv(4096).split(b"\n")[0] for _ in range(2)] == [b"RELOADING=1", b"READY=1"]
    assert worker._agent.view().config_last_reload_successful is False


def test_sources_that_cannot_be_started_anew_end_the_process(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without threads a reload would leave a node without sources; what is started in its place has all of them."""
    worker = service(node, node.begin())

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    worker._take(node.config, node.policy, restart=True)
    worker._sources.stop()
    assert worker._stopping
    assert worker._exit_code == 1


def test_a_reload_that_cannot_set_marks_moves_to_no_other_datapath(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that is refused for its marks has not taken away the rules of the datapath of before."""
    agent = node.begin()
    worker = service(node, agent)
    worker._datapath = before = node.datapath  # type: ignore[assignment]  # which has nothing to close
    other = FakeDatapath(FakeKernel())
    other.name = "another"
    other.close = lambda: None  # type: ignore[attr-defined]  # as above

    def refuse(*_: object) -> None:
        raise DatapathError("marks.mode is on, but a rule sets bits of the mask")

    monkeypatch.setattr(marking, "decide", refuse)
    monkeypatch.setattr(choosing, "choose", lambda _: (Choice("another", "it suits", Facts()), other))
    changed = node.configure(datapath="nftables")
    worker._load = lambda: changed
    worker._reload(asked=True)
    assert agent._datapath is before
    assert "remove" not in node.calls
    assert agent.view().config_last_reload_successful is False


@pytest.mark.parametrize("left", ["", "# policy: mine\n"])
def test_a_configuration_that_is_suddenly_empty_is_not_taken_for_the_defaults(node: Node, left: str) -> None:
    """What a full disk leaves of the file must not book bytes by another policy; the one before stays in force."""
    agent = node.begin()
    worker = service(node, agent)
    path = node.folder / "netacct.yaml"
    path.write_text(left)
    worker._load, worker._path = lambda: config.load(str(path)), str(path)
    worker._reload(asked=False)
    assert agent.view().config_last_reload_successful is False
    assert agent._config is node.config


def test_a_scrape_that_nobody_waits_for_is_left_alone(node: Node) -> None:
    """A scrape that was answered from the last reading meanwhile takes no reading, and counts nothing as shown."""
    worker = service(node, node.begin())
    late, timely = Scrape(clock.now() - 1), Scrape(clock.now() + 3600)
    worker._handle(late)
    worker._handle(timely)
    assert late.reply.empty()
    assert timely.reply.get_nowait()


def test_a_busy_worker_costs_a_scrape_its_patience_only(node: Node) -> None:
    """While the worker has no time, a scrape gets the last view, with its age, when its patience ends."""
    agent = node.begin()
    worker = service(node, agent)
    with pytest.raises(NetacctError, match="no earlier reading"):
        worker._view(0.01)
    agent.view()
    stale = worker._view(0.01)
    assert stale.reading_age_seconds is not None
    assert stale.reading_age_seconds >= 0.0


def test_what_nobody_foresaw_is_survived_with_a_pause(node: Node) -> None:
    """A step that raises what it never should is logged once, and the worker leaves its own work alone for seconds."""

    def fail() -> None:
        raise ZeroDivisionError

    worker = service(node, node.begin())
    with structlog.testing.capture_logs() as logs:
        worker._survive("tick", fail)
        worker._survive("tick", fail)
    assert len(logs) == 1
    assert worker._due() > clock.now() + 3


@pytest.mark.parametrize("text", ["255.255.255.255", "224.0.0.1", "127.0.0.1", "fe80::1"])
def test_an_impossible_address_keeps_no_node_from_its_plan(node: Node, text: str) -> None:
    """A lease of an address that can be in no local range changes no plan: not when it comes, nor at the next start."""
    agent = node.begin({A: "a"})
    agent.observe([pods({A: "a", pack(text): "b"})])
    node.count(A, 100)
    agent.stop()
    assert node.sent() == {"a": 100}
    node.begin({A: "a", pack(text): "b"}).stop()
    assert node.sent() == {"a": 100}
