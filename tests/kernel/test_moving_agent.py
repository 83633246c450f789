"""Moving a node from one datapath to the other with `netacct run` and `rules apply`: exact, whoever is killed when."""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import support
from agentlab import AgentLab, agent_lab, datagrams, streams, until
from support import Node, sh, table

from netacct import choosing
from netacct.kernel import detect_look
from netacct.kernel.detect import IPTABLES, NFTABLES, OTHER

pytestmark = pytest.mark.kernel

WAYS = [(IPTABLES, NFTABLES), (NFTABLES, IPTABLES)]
HINT = {
    IPTABLES: ("iptables-legacy -t mangle -N KUBE-KUBELET-CANARY", "iptables-legacy -t mangle -X KUBE-KUBELET-CANARY"),
    NFTABLES: ("iptables-nft -t mangle -N KUBE-KUBELET-CANARY", "iptables-nft -t mangle -X KUBE-KUBELET-CANARY"),
}
STREAMS = (("pod", "internet"), ("other", "storage"), ("internet", "pod"), ("node", "internet"))


@pytest.fixture
def lab(node: Node, tmp_path: Path) -> Iterator[AgentLab]:
    """A node and an agent that does not run yet."""
    with agent_lab(node, tmp_path) as made:
        yield made


def build_info(lab: AgentLab) -> str:
    """The datapath that the running agent says it counts with."""
    (found,) = re.findall(r'netacct_build_info\{[^}]*datapath="(\w+)"', lab.page())
    return str(found)


def installed() -> list[str]:
    """The datapaths that have anything in this namespace."""
    return [name for name in (IPTABLES, NFTABLES) if detect_look.ours(name)]


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_totals_go_on_over_a_move(lab: AgentLab, before: str, after: str) -> None:
    """After a restart with the other datapath each total is exact, also of what was sent in between and after."""
    lab.configure(datapath=before)
    lab.start()
    assert build_info(lab) == before
    octets = datagrams(lab.node) + datagrams(lab.node, family=6)
    lab.stop()
    octets += datagrams(lab.node, packets=3)  # counted by rules that nobody looks after
    lab.configure(datapath=after)
    lab.start()
    assert installed() == [after]
    octets += datagrams(lab.node, packets=7) + datagrams(lab.node, family=6)
    received = datagrams(lab.node, "internet", "pod")
    until(lambda: lab.totals() == {("a-0", "internet"): octets})
    until(lambda: lab.totals("pod", "receive") == {("a-0", "internet"): received})
    assert lab.totals("unattributed") == {}
    assert build_info(lab) == after
    assert lab.metric("netacct_unexplained_resets_total") == 0
    (gap,) = re.findall(r"gap_seconds=([0-9.]+)", lab.log)
    assert float(gap) > 0


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_others_have_stays_as_it_is(lab: AgentLab, before: str, after: str) -> None:
    """A move leaves rules, sets and tables of others, and their counters, untouched in both backends."""
    lab.configure(datapath=before)
    for name in (before, after):
        lab.configure(datapath=name)
        lab.start()
        lab.stop()
    lab.command("rules", "remove")
    sh(
        "iptables-legacy -t mangle -A FORWARD -s 192.0.2.9 -c 1000 90000 -j ACCEPT",
        "ip6tables-legacy -t mangle -N THEIRS",
        "ipset create theirs hash:ip counters",
        "ipset add theirs 192.0.2.9 packets 5 bytes 500",
        "nft add table ip theirs",
        "nft 'add chain ip theirs mine { type filter hook forward priority 10; }'",
        "nft add rule ip theirs mine ip saddr 192.0.2.9 counter packets 7 bytes 700 accept",
        "iptables-nft -t filter -A FORWARD -s 192.0.2.9 -c 3 300 -j ACCEPT",
    )
    seen = _others()
    for name in (before, after):
        lab.configure(datapath=name)
        lab.start()
        datagrams(lab.node)
        lab.stop()
    lab.command("rules", "remove")
    assert installed() == []
    assert _others() == seen


def _others() -> list[str]:
    """Everything in both backends, with counters; of built-in chains, whose policies count every packet, the rules."""
    legacy = [re.sub(r"^(:[A-Z]+ [A-Z]+) .*", r"\1", text, flags=re.MULTILINE) for text in (table(4), table(6))]
    return [
        *legacy,
        sh("ipset save"),
        sh("nft -s list tables"),
        sh("nft list table ip theirs"),
        sh("nft list table ip filter"),
    ]


@pytest.mark.parametrize("before", [IPTABLES, NFTABLES])
def test_auto_follows_the_kubelet_and_then_stays(lab: AgentLab, before: str) -> None:
    """With `auto` an agent goes where the kubelet's hint is, stays when that goes, and moves when it is elsewhere."""
    after = OTHER[before]
    lab.configure(datapath="auto")
    sh(HINT[before][0])
    lab.start()
    octets = datagrams(lab.node)
    assert (build_info(lab), installed()) == (before, [before])
    assert f'datapath={before} reason="the kubelet keeps KUBE-KUBELET-CANARY' in lab.log
    lab.stop()
    sh(HINT[before][1])
    lab.start()
    assert (build_info(lab), "gap_seconds" in lab.log) == (before, False)
    lab.stop()
    sh(HINT[after][0])
    octets += datagrams(lab.node)
    lab.start()
    octets += datagrams(lab.node)
    assert (build_info(lab), installed()) == (after, [after])
    until(lambda: lab.totals() == {("a-0", "internet"): octets})


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_rules_apply_moves_without_an_agent(lab: AgentLab, before: str, after: str) -> None:
    """`rules diff` tells of the other datapath, `rules apply` books and moves, `rules remove` takes it from either."""
    lab.configure(datapath=before)
    assert lab.command("rules", "apply").returncode == 0
    octets = datagrams(lab.node)
    lab.configure(datapath=after)
    told = lab.command("rules", "diff", "-o", "json")
    assert told.returncode == 1
    assert json.loads(told.stdout)[0] == f"rules and counters of the datapath {before} are left over"
    assert lab.command("rules", "apply").returncode == 0
    assert installed() == [after]
    assert lab.command("rules", "diff").returncode == 0
    octets += datagrams(lab.node)
    lab.configure(datapath=before)
    assert lab.command("rules", "remove").returncode == 0
    assert installed() == []
    lab.start()
    assert lab.totals() == {("a-0", "internet"): octets}


@pytest.mark.parametrize(("mine", "stranger"), WAYS)
def test_rules_apply_says_that_it_took_a_stranger_away(lab: AgentLab, mine: str, stranger: str) -> None:
    """Without an agent, `rules apply` removes what the other datapath left beside ours, and says so."""
    lab.configure(datapath=mine)
    assert lab.command("rules", "apply").stdout == "installed\n"
    _install_beside(stranger)
    assert lab.command("rules", "apply").stdout == f"took away rules and counters of the datapath {stranger}\n"
    assert installed() == [mine]
    assert lab.command("rules", "apply").stdout == "nothing to do\n"


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_running_agent_moves_when_it_is_told(lab: AgentLab, before: str, after: str) -> None:
    """`rules apply` makes a running agent with `auto` follow a new hint, and a reload another setting; all is exact."""
    lab.configure(datapath="auto")
    sh(HINT[before][0])
    lab.start()
    octets = datagrams(lab.node)
    sh(HINT[before][1], HINT[after][0])
    assert build_info(lab) == before
    told = lab.command("rules", "apply", "-o", "json")
    assert json.loads(told.stdout) == [f"moved from {before} to {after}"]
    assert (build_info(lab), installed()) == (after, [after])
    octets += datagrams(lab.node)
    assert lab.command("rules", "apply").stdout == "nothing to do\n"
    lab.configure(datapath=before)
    lab.reload()
    until(lambda: (build_info(lab), installed()) == (before, [before]))
    octets += datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): octets})
    assert lab.log.count("gap_seconds") == 2
    assert lab.metric("netacct_unexplained_resets_total") == 0
    assert lab.metric("netacct_config_last_reload_successful") == 1


def test_a_blind_node_is_refused_when_it_is_switched_on(lab: AgentLab) -> None:
    """An agent that begins with `enabled: false` installs nothing on a blind node when it becomes true."""
    lab.node.netns.sh("ip link add br-int type bridge", "ip link add ovn-k8s-mp0 type bridge")
    lab.configure(datapath="auto", enabled=False)
    lab.start()
    lab.configure(enabled=True)
    until(lambda: "reload refused" in lab.log)
    assert "forwards packets of pods in Open vSwitch" in lab.log.splitlines()[-1]
    assert installed() == []
    lab.configure(datapath=NFTABLES)
    until(lambda: installed() == [NFTABLES])


def test_a_running_agent_moves_where_host_pods_ask_for_it(lab: AgentLab) -> None:
    """With `auto`, a reload with `host_pods: cgroup` moves to nftables against the hint, and one without it back."""
    lab.configure(datapath="auto")
    sh(HINT[IPTABLES][0])
    lab.start()
    octets = datagrams(lab.node)
    for host_pods, counts in (("cgroup", NFTABLES), ("off", IPTABLES)):
        lab.configure(host_pods=host_pods)
        lab.reload()
        until(lambda counts=counts: (build_info(lab), installed()) == (counts, [counts]))  # type: ignore[misc]
        octets += datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): octets})


@pytest.mark.parametrize(("mine", "stranger"), WAYS)
def test_what_a_stranger_counted_is_not_counted_twice(lab: AgentLab, mine: str, stranger: str) -> None:
    """Rules of the other datapath that counted beside the agent's own for another store are removed, unbooked."""
    lab.configure(datapath=mine)
    lab.start()
    lab.stop()
    _install_beside(stranger)
    octets = datagrams(lab.node)
    assert installed() == [IPTABLES, NFTABLES]
    lab.start()
    assert installed() == [mine]
    octets += datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): octets})
    lab.stop()
    _install_beside(stranger)
    octets += datagrams(lab.node)
    lab.configure(datapath=stranger)  # what the books know is the other one now, and ours to be
    lab.start()
    assert installed() == [stranger]
    octets += datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): octets})


@pytest.mark.parametrize(("mine", "stranger"), WAYS)
def test_a_move_to_where_a_stranger_counts_is_exact(lab: AgentLab, mine: str, stranger: str) -> None:
    """What counted in the other datapath beside a running agent is not booked again when the agent moves there."""
    lab.configure(datapath=mine)
    lab.start()
    _install_beside(stranger)
    octets = datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): octets})
    lab.configure(datapath=stranger)
    lab.reload()
    until(lambda: (build_info(lab), installed()) == (stranger, [stranger]))
    assert lab.log.count("removed rules that did not count for these totals") == 1
    octets += datagrams(lab.node)
    until(lambda: lab.metric("netacct_rules_in_sync") == 1)
    until(lambda: sum(lab.totals().values()) >= octets)
    assert lab.totals() == {("a-0", "internet"): octets}


def test_a_move_to_where_another_process_counts_is_refused(lab: AgentLab) -> None:
    """A running agent goes on where it counts, with all bytes, when the tables that it should move to are another's."""
    lab.configure(datapath=IPTABLES)
    lab.start()
    with contextlib.closing(choosing.open_datapath(NFTABLES)) as other:
        other.install(support.plan())
        lab.configure(datapath=NFTABLES)
        lab.reload()
        assert "table ip netacct belongs to another running process" in lab.log
        octets = datagrams(lab.node)
        until(lambda: lab.totals() == {("a-0", "internet"): octets})
        assert build_info(lab) == IPTABLES
        assert lab.metric("netacct_rules_in_sync") == 1
        assert lab.metric("netacct_config_last_reload_successful") == 0


def _install_beside(name: str) -> None:
    """Install a datapath as an agent would that looks for no other."""
    datapath = choosing.open_datapath(name)
    datapath.install(support.plan())
    datapath.close()


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_new_books_begin_at_zero(lab: AgentLab, before: str, after: str) -> None:
    """Where the store is lost, what the other datapath counted is nobody's, also when the first start is killed."""
    lab.configure(datapath=before)
    lab.start()
    datagrams(lab.node)
    lab.stop()
    for file in (lab.folder / "state").iterdir():
        file.unlink()
    lab.configure(datapath=after)
    lab.start(wait=False)
    time.sleep(random.uniform(0.2, 1.0))
    lab.kill()
    lab.start()
    assert lab.totals() == {}
    octets = datagrams(lab.node)
    until(lambda: lab.totals() == {("a-0", "internet"): octets})


def test_kills_in_the_middle_of_moves_lose_nothing(lab: AgentLab) -> None:
    """After ten starts with one datapath and the other, each killed at some moment, and a last one, all is exact."""
    chance = random.Random()
    driven = dict.fromkeys(("pod", "other", "internet", "node"), 0)
    name = IPTABLES
    for _ in range(10):
        name = OTHER[name]
        lab.configure(datapath=name)
        lab.start(wait=False)
        time.sleep(chance.uniform(0.4, 1.8))
        lab.kill()
        _drive(lab, driven, chance)
    lab.configure(datapath=OTHER[name])
    lab.start()
    assert installed() == [OTHER[name]]
    for source, to in STREAMS:
        driven[source] += datagrams(lab.node, source, to)
    until(lambda: lab.totals() == {("a-0", "internet"): driven["pod"], ("b-0", "storage"): driven["other"]})
    assert lab.totals("pod", "receive") == {("a-0", "internet"): driven["internet"]}
    assert lab.totals("host")["", "internet"] == driven["node"]
    assert lab.totals("unattributed") == lab.totals("unattributed", "receive") == {}
    assert lab.metric("netacct_unexplained_resets_total") == 0


def _drive(lab: AgentLab, driven: dict[str, int], chance: random.Random) -> None:
    """Send, where the killed agent left whole rules; what is sent into the gap of a move is not counted."""
    names = installed()
    lab.configure(datapath=names[0] if names else IPTABLES)
    if len(names) == 1 and lab.command("rules", "diff").returncode == 0:
        for source, to in STREAMS:
            driven[source] += datagrams(lab.node, source, to, packets=chance.randint(1, 5))


def test_only_packets_of_the_gap_are_missing(lab: AgentLab) -> None:
    """Under traffic, moves book no more than was sent, and miss no more than was sent in the gaps they report."""
    lab.configure(datapath=NFTABLES)
    lab.start()
    with streams(lab.node, ("pod", "internet")) as running:
        for name in (IPTABLES, NFTABLES):
            time.sleep(0.3)
            lab.stop()
            lab.configure(datapath=name)
            lab.start()
    sent = sum(one.sent for one in running)
    gaps = [float(gap) for gap in re.findall(r"gap_seconds=([0-9.]+)", lab.log)]
    assert len(gaps) == 2
    most = sum((gap * 250 + 1) * (200 + 220) for gap in gaps)  # two streams, a packet every 4 ms each
    until(lambda: sent - sum(lab.totals().values()) <= most)  # a scrape may share a reading of the last second
    assert sum(lab.totals().values()) <= sent
