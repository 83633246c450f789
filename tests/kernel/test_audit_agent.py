"""The self-audit on the real kernel: traffic that passes by netfilter is found, booked once, and nothing else is."""

from __future__ import annotations

import ctypes
import fcntl
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import AgentLab, agent_lab, datagrams
from conformance import BACKENDS, DATAPATHS
from support import OTHER_POD, PATIENCE, POD, Node, eventually, sh

from netacct import clock, config, desired, policy_file
from netacct.accounting.store import Store
from netacct.agent import Agent
from netacct.audit import BRIDGE, BYPASS, REASONS
from netacct.books import Books
from netacct.export.native import View
from netacct.identity.source import Replace
from netacct.kernel.interfaces import Interfaces
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.nftables import NftablesDatapath
from netacct.model import UNCLASSIFIED, Direction, Level

pytestmark = pytest.mark.kernel

PODS = {"team-a/a-0": [*POD.values()], "team-b/b-0": [*OTHER_POD.values()]}
STRANGER = "10.244.1.12"
PACKETS, SIZE = 2000, 1200
TCP_BYTES = 24 << 20

Totals = dict[tuple[str, str, str], int]
"""Bytes by (pod, direction, traffic)."""


class Life:
    """An agent in this process, which looks when the test says so."""

    def __init__(self, lab: AgentLab, name: str) -> None:
        self.lab, self.name = lab, name
        self._datapath: IptablesDatapath | NftablesDatapath | None = None
        self.begin()

    def begin(self) -> None:
        """A new agent, from the files and the store; an earlier one ends where it stands, as by SIGKILL."""
        self.end()
        self._datapath, self._links = DATAPATHS[self.name](), Interfaces()
        settings = config.load(str(self.lab.folder / "netacct.yaml"))
        self.books = Books(Store(Path(settings.state_dir)), settings, settings.identity.sources)
        policy = policy_file.load(settings.policy)
        self.agent = Agent(settings, policy, self._datapath, self.books, links=self._links)
        self.agent.start(frozenset(), [self._seen()])

    def end(self) -> None:
        """Close what the agent had open."""
        if self._datapath is not None:
            self._datapath.close()
            self._links.close()

    def pods(self, owners: dict[str, list[str]]) -> None:
        """The pods file changes, and the agent takes it in."""
        self.lab.pods(owners)
        self.agent.observe([self._seen()])

    def look(self, times: int = 1) -> None:
        """What `tick` does when a comparison is due."""
        for _ in range(times):
            self.agent._auditing.due = 0.0
            self.agent.tick()

    def view(self) -> View:
        """What a scrape shows, with the true values of new series."""
        self.agent.view()
        return self.agent.view()

    def totals(self) -> Totals:
        """What pods have, without zeros."""
        return {
            (key.labels[1], key.direction.value, key.traffic): count.bytes
            for key, count in self.view().series
            if key.level is Level.POD and count.bytes
        }

    def _seen(self) -> Replace:
        seen = desired.observations(config.load(str(self.lab.folder / "netacct.yaml")))
        return Replace("file", seen, clock.now())


@pytest.fixture(params=DATAPATHS)
def life(request: pytest.FixtureRequest, node: Node, tmp_path: Path) -> Iterator[Life]:
    """An agent with each datapath on the node, which has seen the interfaces of both pods."""
    with agent_lab(node, tmp_path) as lab:
        made: list[Life] = []
        lab.configure(datapath=request.param)
        node.netns.run(lambda: made.append(Life(lab, request.param)))
        for space in (node.netns, node.pod, node.other_pod):
            space.sh("sysctl -qw net.ipv6.conf.all.disable_ipv6=1")  # the kernels' reports of groups would count
        node.netns.run(made[0].look)
        yield made[0]
        made[0].end()


def bridge(node: Node, *, filtered: bool) -> None:
    """Make both pods ports of one bridge, which shows their frames to netfilter or does not, and next hops of none."""
    value = int(filtered)
    sh(
        f"sysctl -qw net.bridge.bridge-nf-call-iptables={value} net.bridge.bridge-nf-call-ip6tables={value}",
        "ip link add br0 address 02:00:00:00:00:0f type bridge mcast_snooping 0",
        "ip link set br0 up",
        "ip link set v0 master br0",
        "ip link set v1 master br0",
    )
    neighbours(node)


def neighbours(node: Node) -> None:
    """Let each pod send to the other one without a next hop."""
    for space, mac, peer in ((node.pod, "02:00:00:00:01:01", OTHER_POD), (node.other_pod, "02:00:00:00:01:00", POD)):
        space.sh(
            f"ip route replace {peer[4]} dev eth0", f"ip neigh replace {peer[4]} lladdr {mac} dev eth0 nud permanent"
        )


def redirect(node: Node) -> None:
    """Hand what one pod sends to the other straight over, as programs at the tc hook do."""
    neighbours(node)
    for here, there, ip in (("v0", "v1", OTHER_POD[4]), ("v1", "v0", POD[4])):
        sh(
            f"tc qdisc add dev {here} clsact",
            f"tc filter add dev {here} ingress protocol ip u32 match ip dst {ip}"
            f" action mirred egress redirect dev {there}",
        )


def bulk(node: Node, source: str = "pod", to: str = "other", packets: int = PACKETS) -> int:
    """Send a few megabytes of UDP; returns the bytes (layer 3)."""
    return datagrams(node, source, to, packets=packets, size=SIZE)


def both(traffic: str, amount: int) -> Totals:
    """What a transfer from a-0 to b-0 makes."""
    return {("a-0", "transmit", traffic): amount, ("b-0", "receive", traffic): amount}


def test_nothing_is_missing_where_all_is_routed(life: Life) -> None:
    """Without a bypass, coverage is whole, there is no blind spot, and nothing is unclassified."""
    assert life.view().coverage_ratio is None
    assert life.view().blind_spots == dict.fromkeys((*REASONS, "shadowed"), False)
    sent = bulk(life.lab.node)
    life.look(3)
    view = life.view()
    assert life.totals() == both("pod", sent)
    assert view.coverage_ratio == 1.0
    assert not any(view.blind_spots.values())
    assert view.collectors["interfaces"].ok


@pytest.mark.parametrize("filtered", [True, False])
def test_a_bridge_without_netfilter_is_a_blind_spot(life: Life, *, filtered: bool) -> None:
    """What pods of one bridge send each other is booked in full: by class where netfilter sees it, else without."""
    bridge(life.lab.node, filtered=filtered)
    sent = bulk(life.lab.node)
    life.look(2)
    view = life.view()
    assert life.totals() == both("pod" if filtered else UNCLASSIFIED, sent)
    assert view.coverage_ratio == (1.0 if filtered else 0.0)
    assert view.blind_spots[BRIDGE] is not filtered
    assert view.blind_spots[BYPASS] is False


def test_a_redirect_by_tc_is_a_blind_spot(life: Life) -> None:
    """What tc hands from one pod to another is booked to both without a class, exactly, on top of what was counted."""
    before = bulk(life.lab.node)
    life.look()
    redirect(life.lab.node)
    sent = bulk(life.lab.node)
    life.look(2)
    assert life.totals() == {**both("pod", before), **both(UNCLASSIFIED, sent)}
    assert life.view().blind_spots[BYPASS]
    assert life.view().coverage_ratio == 0.0


def test_packets_that_are_missing_are_counted_too(life: Life) -> None:
    """Of unsegmented UDP the missing packets are exact, in every level."""
    redirect(life.lab.node)
    sent = bulk(life.lab.node)
    life.look(2)
    found = {
        (key.level, key.direction): tuple(count)
        for key, count in life.view().series
        if key.traffic == UNCLASSIFIED and any(count)
    }
    levels = (Level.POD, Level.WORKLOAD, Level.NAMESPACE)
    assert found == {(level, direction): (sent, PACKETS) for level in levels for direction in Direction}


def test_what_both_ways_carry_is_booked_once(life: Life) -> None:
    """Of a pod that talks past netfilter and through it, only what is missing has no class."""
    redirect(life.lab.node)
    past = bulk(life.lab.node)
    through = bulk(life.lab.node, to="internet")
    life.look(2)
    past += bulk(life.lab.node)
    life.look()
    through += bulk(life.lab.node, to="internet")
    life.look(2)
    assert life.totals() == {**both(UNCLASSIFIED, past), ("a-0", "transmit", "internet"): through}


@pytest.mark.parametrize("looks", [0, 1, 2, 3])
def test_a_killed_agent_books_what_is_missing_once(life: Life, looks: int) -> None:
    """Whatever an agent saw, doubted or booked before it was killed, the next books the same total."""
    assert life.books.save_at <= clock.now() + 1  # where a comparison begins is stored at once
    life.books.save(clock.now())
    redirect(life.lab.node)
    sent = bulk(life.lab.node)
    life.look(looks)
    shown = life.totals()
    life.begin()
    assert life.totals() == shown
    sent += bulk(life.lab.node)
    life.look(2)
    life.begin()
    life.look(3)
    assert life.totals() == both(UNCLASSIFIED, sent)


def test_less_than_a_tenth_is_no_blind_spot(life: Life) -> None:
    """Where netfilter counted nine tenths or more, nothing is booked: that much may be headers."""
    redirect(life.lab.node)
    bulk(life.lab.node, packets=PACKETS // 20)
    sent = bulk(life.lab.node, to="internet")
    life.look(3)
    assert life.totals() == {("a-0", "transmit", "internet"): sent}
    coverage = life.view().coverage_ratio
    assert coverage is not None
    assert 0.94 < coverage < 0.96


def test_a_pod_that_ends_takes_its_missing_bytes_along(life: Life) -> None:
    """What is missing is booked to a pod before its address goes to the next one, in totals and in its account."""
    redirect(life.lab.node)
    sent = bulk(life.lab.node)
    life.look()
    life.pods({"team-c/c-0": [*POD.values()], "team-b/b-0": [*OTHER_POD.values()]})
    life.look(3)
    assert life.totals() == both(UNCLASSIFIED, sent)
    life.agent.stop()
    lines = (life.lab.folder / "accounts" / "accounts.jsonl").read_text(encoding="utf-8").splitlines()
    account = next(record for record in map(json.loads, lines) if record["ip"] == POD[4])
    assert account["transmit"] == {UNCLASSIFIED: {"bytes": sent, "packets": PACKETS}}


def test_what_passes_while_rules_are_removed_is_nobodys(life: Life) -> None:
    """An agent that was told to pause books nothing of the pause."""
    life.agent.pause()
    bulk(life.lab.node)
    life.agent.resume()
    life.look(3)
    assert life.totals() == {}


def test_what_passes_while_somebody_broke_the_rules_is_unclassified(life: Life) -> None:
    """Bytes that crossed while the rules were flushed are missing in the counters, not in the totals."""
    if isinstance(life._datapath, NftablesDatapath):
        life._datapath.release()  # what an owner has nobody else can flush
        sh("nft flush chain ip netacct forward", "nft flush chain ip netacct postrouting")
    else:
        sh("iptables-legacy -t mangle -F FORWARD", "iptables-legacy -t mangle -F POSTROUTING")
    sent = bulk(life.lab.node)
    life.agent._check()
    life.look(3)
    assert life.agent.differences() == []
    assert life.totals() == both(UNCLASSIFIED, sent)


def test_interfaces_that_cannot_be_read_cost_the_audit_only(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings go on without interfaces, the scrape says that they failed, and the next look makes up for it."""
    redirect(life.lab.node)
    with monkeypatch.context() as patch:
        patch.setattr("netacct.rtnetlink.connect", _refused)
        life._links.close()
        sent = bulk(life.lab.node)
        through = bulk(life.lab.node, source="storage", to="pod")
        life.look(2)
        assert life.totals() == {("a-0", "receive", "storage"): through}
        assert not life.view().collectors["interfaces"].ok
    life.look(2)
    assert life.totals() == {("a-0", "receive", "storage"): through, **both(UNCLASSIFIED, sent)}
    assert life.view().collectors["interfaces"].ok


def _refused(*_: object) -> socket.socket:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("like", [True, False])
def test_segments_are_within_the_bound(life: Life, *, like: bool) -> None:
    """TCP is covered, to the percent with like offloads on both ends, and within the bound with unlike ones."""
    if not like:
        offload("v1", on=False)
    transfer(life.lab.node)
    life.look(3)
    coverage = life.view().coverage_ratio
    assert coverage is not None
    assert coverage >= (0.99 if like else 0.90)
    assert not any(life.view().blind_spots.values())
    assert all(traffic == "pod" for _pod, _direction, traffic in life.totals())


def test_fragments_are_within_the_bound(life: Life) -> None:
    """Fragments that connection tracking puts together are covered but for their headers, and nothing is booked."""
    sh(f"iptables-{BACKENDS[life.name]} -A FORWARD -m conntrack --ctstate INVALID")
    datagrams(life.lab.node, "pod", "other", packets=300, size=8000)
    life.look(3)
    coverage = life.view().coverage_ratio
    assert coverage is not None
    assert 0.98 < coverage < 1.0
    assert all(traffic == "pod" for _pod, _direction, traffic in life.totals())


def test_what_a_bridge_floods_is_booked_where_it_arrives(life: Life) -> None:
    """Frames for a stranger that a bridge floods to a pod cross its interface, and are booked to it, unclassified."""
    bridge(life.lab.node, filtered=True)
    life.lab.node.pod.sh(
        f"ip route add {STRANGER} dev eth0", f"ip neigh add {STRANGER} lladdr 02:00:00:00:01:77 dev eth0"
    )
    with life.lab.node.pod.socket(4, POD[4], 0) as sender:
        for _ in range(PACKETS):
            sender.sendto(bytes(SIZE), (STRANGER, 7000))
    sent = PACKETS * (SIZE + 28)
    eventually(lambda: life.totals().get(("a-0", "transmit", "pod")) == sent)
    life.look(2)
    assert life.totals() == {("a-0", "transmit", "pod"): sent, ("b-0", "receive", UNCLASSIFIED): sent}


def offload(device: str, *, on: bool) -> None:
    """Switch an interface's segmentation offload (ETHTOOL_STSO and ETHTOOL_SGSO, linux/ethtool.h)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        for command in (0x1F, 0x24):
            value = ctypes.create_string_buffer(struct.pack("=II", command, on))
            request = struct.pack("=16sQ16x", device.encode(), ctypes.addressof(value))
            fcntl.ioctl(channel, 0x8946, request)  # SIOCETHTOOL


def transfer(node: Node) -> None:
    """Send some megabytes of TCP from one pod to the other."""
    made: list[socket.socket] = []
    node.other_pod.run(lambda: made.append(socket.create_server((OTHER_POD[4], 7001))))
    node.pod.run(lambda: made.append(socket.socket()))
    server, client = made
    with server, client:
        client.settimeout(PATIENCE)
        server.settimeout(PATIENCE)
        client.connect((OTHER_POD[4], 7001))
        receiver, _ = server.accept()
        thread = threading.Thread(target=_drain, args=(receiver,))
        thread.start()
        client.sendall(bytes(TCP_BYTES))
        client.shutdown(socket.SHUT_WR)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def _drain(receiver: socket.socket) -> None:
    with receiver:
        while receiver.recv(1 << 20):
            pass


def missing(totals: dict[tuple[str, str], int], pod: str, sent: int) -> bool:
    """Whether what was sent past netfilter is booked to the pod as unclassified, and nothing else to anybody.

    With it may be what the sender's kernel sent by itself meanwhile: multicast listener reports.
    """
    return totals.keys() == {(pod, UNCLASSIFIED)} and sent <= totals[pod, UNCLASSIFIED] <= sent + 1000


@pytest.mark.parametrize("datapath", DATAPATHS)
def test_a_running_agent_finds_a_bypass_by_itself(node: Node, tmp_path: Path, datapath: str) -> None:
    """`netacct run` shows blind spot, coverage and missing bytes of its own accord, and once, however often killed."""
    with agent_lab(node, tmp_path) as lab:
        lab.configure(datapath=datapath)
        lab.start()
        eventually(lambda: "netacct_blind_spot" in lab.page())
        lab.pods({**PODS, "team-c/c-0": ["10.244.1.12"]})  # leases that change bring the next look near
        eventually(lambda: lab.metric("netacct_leases") == 5)
        redirect(node)
        sent = bulk(node)
        lab.kill()
        lab.start()
        lab.pods(PODS)
        eventually(lambda: missing(lab.totals(), "a-0", sent))
        assert missing(lab.totals(direction="receive"), "b-0", sent)
        assert lab.metric("netacct_blind_spot", reason=BYPASS) == 1
        assert lab.metric("netacct_blind_spot", reason=BRIDGE) == 0
        assert lab.metric("netacct_coverage_ratio") == 0
        lab.kill()
        lab.start()
        eventually(lambda: lab.metric("netacct_scrape_collector_success", collector="interfaces") == 1)
        lab.pods({**PODS, "team-c/c-0": ["10.244.1.12"]})
        eventually(lambda: lab.metric("netacct_leases") == 5)
        assert missing(lab.totals(), "a-0", sent)
