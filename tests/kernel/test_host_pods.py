"""What the kernel attributes to a hostNetwork pod, packet by packet, and that all the rest stays with the host."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import nftlab
import pytest
import support
from agentlab import AgentLab, agent_lab, until
from cgrouplab import LEVEL, Cgroups, Worker, cgroups
from support import HEADERS, NODE, PATIENCE, PEER, Netns, Node, eventually, key

from netacct.errors import MissingFeatureError
from netacct.identity.host_pods import tree_root
from netacct.kernel import nft_layout, nft_render
from netacct.kernel import plan as plans
from netacct.kernel.nftables import NftablesDatapath
from netacct.kernel.plan import Plan
from netacct.model import WHOLE, Address, CounterKey, Direction, Family, Scope, Snapshot, pack, unpack

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for cgroups and network namespaces"),
    pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft"),
    pytest.mark.skipif(not tree_root(), reason="needs a cgroup v2 tree"),
]

FAMILIES: tuple[Family, ...] = (4, 6)
both_families = pytest.mark.parametrize("family", FAMILIES)
INETS = {4: "socket.AF_INET", 6: "socket.AF_INET6"}
UID, OTHER_UID = "3f0c0000-aaaa", "7e110000-bbbb"
TCP_HEADERS = {4: 52, 6: 72}
SYN_HEADERS = {4: 60, 6: 80}
RECEIVE, TRANSMIT = Direction.RECEIVE, Direction.TRANSMIT


def host_plan(*levels: int) -> Plan:
    """The node's plan, with hostNetwork pods told apart at these levels."""
    ours = [pack(NODE[4]), pack(NODE[6])]
    return plans.build(support.policy(), [], ours, None, host_pods=levels)


class Lab:
    """A node on which hostNetwork pods are told apart, two such pods, and the counters since the last look."""

    def __init__(self, node: Node, groups: Cgroups, datapath: NftablesDatapath) -> None:
        self.node, self.groups, self.datapath = node, groups, datapath
        self.pod, self.other = groups.pod(UID), groups.pod(OTHER_UID)
        self.peers = {family: node.peer.socket(family, PEER[family]) for family in FAMILIES}
        datapath.install(host_plan(LEVEL))
        datapath.add([self.pod, self.other])
        self.last: dict[tuple[CounterKey, Address], tuple[int, int]] = {}
        self.news()

    def news(self, until: tuple[str, str] | None = None) -> dict[tuple[str, str], tuple[int, int]]:
        """As `since`, and what is counted from now on is news; waits until `until` has counted."""
        if until:
            eventually(lambda: until in self.since())
        found, self.last = self.since(), _internet(self.datapath.read())
        return found

    def since(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(bytes, packets) since the last look of the class internet, by ("host", "pod" or "other"; direction)."""
        names = {WHOLE: "host", self.pod: "pod", self.other: "other"}
        return {
            (names[ip], one.direction.value): (count[0] - before[0], count[1] - before[1])
            for (one, ip), count in _internet(self.datapath.read()).items()
            if count != (before := self.last.get((one, ip), (0, 0)))
        }


def _internet(snapshot: Snapshot) -> dict[tuple[CounterKey, Address], tuple[int, int]]:
    return {
        (reading.key, ip): (count[0], count[1])
        for reading in snapshot.readings
        for ip, count in reading.counts.items()
        if reading.key.traffic == "internet"
    }


@pytest.fixture
def lab(node: Node) -> Iterator[Lab]:
    """See `Lab`."""
    with cgroups() as groups:
        datapath = node.netns.run(NftablesDatapath)
        made = node.netns.run(lambda: Lab(node, groups, datapath))
        yield made
        datapath.close()
        for peer in made.peers.values():
            peer.close()


def udp(worker: Worker, family: Family, port: int = 5000) -> None:
    """Give a worker a UDP socket `s` at the node's address."""
    worker.do(
        f"s = socket.socket({INETS[family]}, socket.SOCK_DGRAM); s.settimeout({PATIENCE})\n"
        f"s.bind(({NODE[family]!r}, {port}))"
    )


@both_families
def test_datagrams_of_a_pods_sockets_are_the_pods(lab: Lab, family: Family) -> None:
    """What an unconnected and a connected socket of a pod's container send and get is the pod's, to the byte."""
    worker = lab.groups.worker(UID)
    udp(worker, family)
    size = 100 + HEADERS[family]
    peer = lab.peers[family]
    worker.do(f"for _ in range(3): s.sendto(bytes(100), ({PEER[family]!r}, {support.PORT}))")
    peer.sendto(bytes(100), (NODE[family], 5000))
    worker.do("s.recv(200)")
    assert lab.news() == {("pod", "transmit"): (3 * size, 3), ("pod", "receive"): (size, 1)}
    worker.do(f"s.connect(({PEER[family]!r}, {support.PORT})); s.send(bytes(100))")
    peer.sendto(bytes(100), (NODE[family], 5000))
    worker.do("s.recv(200)")
    assert lab.news() == {("pod", "transmit"): (size, 1), ("pod", "receive"): (size, 1)}


@both_families
def test_pods_and_host_do_not_mix(lab: Lab, family: Family) -> None:
    """Two pods and a process of the host have what each of them sent, and nothing is counted twice."""
    size = 100 + HEADERS[family]
    for packets, uid in ((2, UID), (3, OTHER_UID), (4, "")):
        worker = lab.groups.worker(uid)
        udp(worker, family, 5000 + packets)
        worker.do(f"for _ in range({packets}): s.sendto(bytes(100), ({PEER[family]!r}, {support.PORT}))")
    news = {name: count for (name, way), count in lab.news().items() if way == "transmit"}
    assert news == {"pod": (2 * size, 2), "other": (3 * size, 3), "host": (4 * size, 4)}


@both_families
def test_large_datagrams_count_before_they_are_cut(lab: Lab, family: Family) -> None:
    """A sent datagram counts whole; of a received IPv6 one that nobody reassembles earlier, the host has the rest."""
    worker = lab.groups.worker(UID)
    udp(worker, family)
    whole = 5000 + HEADERS[family]
    peer = lab.peers[family]
    worker.do(f"s.sendto(bytes(5000), ({PEER[family]!r}, {support.PORT}))")
    peer.sendto(bytes(5000), (NODE[family], 5000))
    worker.do("s.recv(6000)")
    news = lab.news()
    assert news.pop(("pod", "transmit")) == (whole, 1)
    if family == 4:
        assert news == {("pod", "receive"): (whole, 1)}
    else:  # 4 fragments of a header of 40 and a fragment header of 8 each; the first has 1,448 bytes in it
        assert news == {("pod", "receive"): (1496, 1), ("host", "receive"): (whole - 40 + 4 * 48 - 1496, 3)}


class Witness:
    """Counts TCP in the peer's namespace, with nft(8): what the node sent and got."""

    def __init__(self, peer: Netns) -> None:
        self._peer = peer
        peer.sh(
            "nft add table inet witness",
            *(f"nft add counter inet witness {name}" for name in ("transmit", "receive")),
            *(
                f"nft 'add chain inet witness {hook} {{ type filter hook {hook} priority 0; }}'\n"
                f"nft add rule inet witness {hook} meta l4proto tcp counter name {name}"
                for hook, name in (("input", "transmit"), ("output", "receive"))
            ),
        )

    def count(self) -> dict[str, tuple[int, int]]:
        """(bytes, packets) by direction, seen from the node."""
        found = json.loads(self._peer.sh("nft -j list counters table inet witness"))["nftables"]
        counters = [one["counter"] for one in found if "counter" in one]
        return {one["name"]: (one["bytes"], one["packets"]) for one in counters}


def _summed(lab: Lab, witness: Witness) -> dict[tuple[str, str], tuple[int, int]]:
    """All counters since the lab began, once they sum to what the peer has seen."""

    def agree() -> bool:
        found = lab.since()
        return witness.count() == {
            way: tuple(sum(count[part] for name, count in found.items() if name[1] == way) for part in (0, 1))
            for way in ("transmit", "receive")
        }

    eventually(agree)
    return lab.news()


def _read(connection: socket.socket, octets: int) -> None:
    while octets:
        data = connection.recv(octets)
        assert data
        octets -= len(data)


def _inet(family: Family) -> socket.AddressFamily:
    return socket.AF_INET if family == 4 else socket.AF_INET6


@both_families
def test_a_connection_to_a_pod_is_the_pods_but_for_two_packets(lab: Lab, family: Family) -> None:
    """Until the handshake is over there is no full socket: our SYN-ACK and the ACK to it stay with the host."""
    worker, witness = lab.groups.worker(UID), Witness(lab.node.peer)
    worker.do(
        f"l = socket.socket({INETS[family]}); l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        f"l.bind(({NODE[family]!r}, 5000)); l.listen(); l.settimeout({PATIENCE})"
    )
    peer = lab.node.peer.run(lambda: socket.create_connection((NODE[family], 5000), PATIENCE))
    with peer:
        worker.do(f"s, _ = l.accept(); s.settimeout({PATIENCE}); s.sendall(bytes(300000))")
        peer.sendall(bytes(200000))
        _read(peer, 300000)
        worker.do("n = 0\nwhile n < 200000: n += len(s.recv(200000))")
        peer.shutdown(socket.SHUT_WR)
        worker.do("assert not s.recv(1); s.close()")
        assert not peer.recv(1)
    found = _summed(lab, witness)
    assert found["host", "transmit"] == (SYN_HEADERS[family], 1)
    assert found["host", "receive"] == (TCP_HEADERS[family], 1)
    assert found["pod", "transmit"][0] > 300000
    assert found["pod", "receive"][0] > 200000


@both_families
def test_a_connection_from_a_pod_is_all_the_pods(lab: Lab, family: Family) -> None:
    """A connection that a pod makes and closes in order is the pod's from the SYN to the last ACK."""
    worker, witness = lab.groups.worker(UID), Witness(lab.node.peer)
    with lab.node.peer.run(lambda: socket.create_server((PEER[family], 5001), family=_inet(family))) as server:
        server.settimeout(PATIENCE)
        worker.do(f"s = socket.create_connection(({PEER[family]!r}, 5001), {PATIENCE}); s.sendall(bytes(300000))")
        connection, _ = server.accept()
        with connection:
            connection.settimeout(PATIENCE)
            _read(connection, 300000)
            worker.do("s.shutdown(socket.SHUT_WR)")
            assert not connection.recv(1)
        worker.do("assert not s.recv(1); s.close()")
    found = _summed(lab, witness)
    assert {name for name, _ in found} == {"pod"}
    assert found["pod", "transmit"][0] > 300000


@both_families
def test_what_comes_after_the_socket_is_the_hosts(lab: Lab, family: Family) -> None:
    """Data for a connection that its pod has closed, and the RST that answers it, have no full socket any more."""
    worker = lab.groups.worker(UID)
    with lab.node.peer.run(lambda: socket.create_server((PEER[family], 5001), family=_inet(family))) as server:
        server.settimeout(PATIENCE)
        worker.do(f"s = socket.create_connection(({PEER[family]!r}, 5001), {PATIENCE})")
        connection, _ = server.accept()
        with connection:
            lab.news()
            worker.do("s.close()")
            assert not connection.recv(1)
            lab.news(("pod", "receive"))  # the ACK of its FIN
            connection.send(bytes(40))
            news = lab.news(("host", "transmit"))
    assert news["host", "receive"] == (TCP_HEADERS[family] + 40, 1)
    assert news["host", "transmit"] == (HEADERS[family] + 12, 1)


@both_families
def test_a_datagram_for_nobody_is_the_hosts(lab: Lab, family: Family) -> None:
    """Without a socket, the datagram and the ICMP error that answers it are the host's."""
    peer = lab.peers[family]
    peer.sendto(bytes(100), (NODE[family], 5000))
    size = 100 + HEADERS[family]
    assert lab.news(("host", "transmit")) == {
        ("host", "receive"): (size, 1),
        ("host", "transmit"): (size + HEADERS[family], 1),
    }


@both_families
def test_an_icmp_error_is_of_the_pod_whose_datagram_it_is_about(lab: Lab, family: Family) -> None:
    """The kernel finds the socket of the datagram that an ICMP error quotes."""
    worker = lab.groups.worker(UID)
    udp(worker, family)
    worker.do(f"s.connect(({PEER[family]!r}, 9)); s.send(bytes(100))")
    worker.do("try: s.recv(1)\nexcept ConnectionRefusedError: pass")
    size = 100 + HEADERS[family]
    assert lab.news() == {("pod", "transmit"): (size, 1), ("pod", "receive"): (size + HEADERS[family], 1)}


@both_families
def test_a_ping_is_the_pods_and_its_answer_the_hosts(lab: Lab, family: Family) -> None:
    """An echo request has a socket; the reply belongs to no port, so the kernel has no socket to find."""
    worker = lab.groups.worker(UID)
    kind, protocol = (8, "IPPROTO_ICMP") if family == 4 else (128, "IPPROTO_ICMPV6")
    checksum = 0xFFFF - (kind << 8) - 7 if family == 4 else 0  # that of ICMPv6 the kernel fills in
    worker.do(f"s = socket.socket({INETS[family]}, socket.SOCK_RAW, socket.{protocol}); s.settimeout({PATIENCE})")
    worker.do(f"s.sendto(struct.pack('!BBHHH', {kind}, 0, {checksum}, 7, 0), ({PEER[family]!r}, 0)); s.recv(200)")
    size = HEADERS[family]
    assert lab.news() == {("pod", "transmit"): (size, 1), ("host", "receive"): (size, 1)}


@both_families
def test_a_socket_is_of_the_cgroup_that_made_it(lab: Lab, family: Family) -> None:
    """A process that moves into another pod's cgroup takes its sockets along; they count for the first."""
    worker = lab.groups.worker(UID)
    udp(worker, family)
    worker.do(f"move({lab.groups.container(OTHER_UID)!r})")
    worker.do(f"s.sendto(bytes(100), ({PEER[family]!r}, {support.PORT}))")
    assert lab.news() == {("pod", "transmit"): (100 + HEADERS[family], 1)}
    udp(worker, family, 5001)
    worker.do(f"s.sendto(bytes(100), ({PEER[family]!r}, {support.PORT}))")
    assert lab.news() == {("other", "transmit"): (100 + HEADERS[family], 1)}


@both_families
def test_encapsulation_stays_the_hosts(lab: Lab, family: Family) -> None:
    """What looks like a tunnel is the host's, whichever process made the socket."""
    worker = lab.groups.worker(UID)
    udp(worker, family)
    with lab.node.peer.socket(family, PEER[family], 4789):
        worker.do(f"s.sendto(bytes(100), ({PEER[family]!r}, 4789))")
    assert not lab.news()
    counts = support.counted(lab.datapath.read())
    assert counts[key(family, Scope.HOST, TRANSMIT, "tunnel"), WHOLE] == (100 + HEADERS[family], 1)


@both_families
def test_a_pod_that_is_not_known_yet_is_the_host(lab: Lab, family: Family) -> None:
    """Bytes before the pod is told apart stay with the host; from then on they are the pod's."""
    lab.datapath.discard([lab.pod])
    worker = lab.groups.worker(UID)
    udp(worker, family)
    send = f"s.sendto(bytes(100), ({PEER[family]!r}, {support.PORT}))"
    worker.do(send)
    assert lab.news() == {("host", "transmit"): (100 + HEADERS[family], 1)}
    lab.datapath.add([lab.pod])
    worker.do(send)
    assert lab.news() == {("pod", "transmit"): (100 + HEADERS[family], 1)}


def test_the_last_values_of_a_pod_are_handed_over(lab: Lab) -> None:
    """Dropping a pod's counters, and telling no pods apart any more, both keep what was counted."""
    worker, size = lab.groups.worker(UID), 100 + HEADERS[4]
    udp(worker, 4)
    worker.do(f"s.sendto(bytes(100), ({PEER[4]!r}, {support.PORT}))")
    kept: list[Snapshot] = []
    lab.datapath.discard([lab.pod], kept.append)
    transmitted = key(4, Scope.HOST_POD, TRANSMIT, "internet")
    assert support.counted(kept[0]) == {(transmitted, lab.pod): (size, 1)}
    lab.datapath.add([lab.pod])
    worker.do(f"s.sendto(bytes(100), ({PEER[4]!r}, {support.PORT}))")
    lab.datapath.install(host_plan(), kept.append)
    assert support.counted(kept[1]) == {(transmitted, lab.pod): (size, 1)}
    assert not any(one.key.scope is Scope.HOST_POD for one in lab.datapath.read().readings)
    worker.do(f"s.sendto(bytes(100), ({PEER[4]!r}, {support.PORT}))")
    assert lab.news()["host", "transmit"] == (size, 1)


def test_counters_outlive_what_is_installed_again(lab: Lab) -> None:
    """Another level, a repair, and another agent's datapath keep every pod's counters and their epochs."""
    worker = lab.groups.worker(UID)
    udp(worker, 4)
    worker.do(f"s.sendto(bytes(100), ({PEER[4]!r}, {support.PORT}))")
    before = lab.datapath.read()
    lab.datapath.install(host_plan(2, 3, LEVEL))
    assert (lab.datapath.verify(), support.epochs(lab.datapath.read())) == ([], support.epochs(before))
    lab.datapath.release()
    again = lab.node.netns.run(NftablesDatapath)
    again.install(host_plan(2, 3, LEVEL))
    again.add([lab.pod])
    assert support.counted(again.read()) == support.counted(before)
    nftlab.flush(again, key(4, Scope.HOST_POD, TRANSMIT, "internet"))
    assert "has lost its sentinel" in "".join(again.verify())
    assert again.read().unreadable == (key(4, Scope.HOST_POD, TRANSMIT, "internet"),)
    again.install(host_plan(2, 3, LEVEL))
    assert again.verify() == []
    again.close()


def test_what_we_print_for_nft_lacks_epochs_only(netns: Netns) -> None:
    """nft(8) makes of our text the rules that we install, and lists them; what it cannot write is the sentinels."""
    wanted = host_plan(2, 3)
    for layout in nft_layout.build(wanted):
        text = nft_render.text(layout, ())
        done = subprocess.run(["nft", "-f", "-"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    datapath = NftablesDatapath()
    datapath.adopt(wanted)
    sets = [spec.name for layout in nft_layout.build(wanted) for spec in layout.sets]
    assert len(sets) == 2 * 2 * len(wanted.classes)
    assert [words.split()[2] for words in datapath.verify() if "has lost its sentinel" in words] == sets
    assert len(datapath.verify()) == len(sets)
    datapath.install(wanted)
    assert datapath.verify() == []
    assert "socket cgroupv2 level 3 @pi-internet" in netns.sh("nft list ruleset")
    datapath.close()


@pytest.mark.usefixtures("netns")
def test_a_kernel_that_cannot_is_named() -> None:
    """Where the kernel does not match cgroups as asked, the error names the setting and what is missing."""
    datapath = NftablesDatapath()
    with pytest.raises(MissingFeatureError, match=r"host_pods: cgroup needs .*NFT_SOCKET"):
        datapath.install(host_plan(300))  # deeper than the kernel takes
    datapath.close()


POD_FACTS = {"namespace": "kube-system", "name": "proxy-0", "hostNetwork": True}


@pytest.fixture
def uid() -> str:
    """Of the pod in the agent's tests: like any real one, used once."""
    return str(uuid.uuid4())


@pytest.fixture
def groups() -> Iterator[Cgroups]:
    """A kubelet's part of the tree, without pods."""
    with cgroups() as made:
        yield made


@pytest.fixture
def agent(node: Node, groups: Cgroups, tmp_path: Path, uid: str) -> Iterator[AgentLab]:
    """An agent that tells hostNetwork pods apart, and has heard of one that has no cgroup yet."""
    del groups  # there before the agent looks
    with agent_lab(node, tmp_path) as made, node.peer.socket(4, PEER[4]):
        made.configure(datapath="auto", host_pods="cgroup")
        made.write("pods.yaml", json.dumps({"pods": [{**POD_FACTS, "uid": uid}]}))
        node.netns.run(made.start)
        yield made


@pytest.fixture
def speaker(agent: AgentLab, groups: Cgroups, uid: str) -> Speaker:
    """See `Speaker`."""
    return agent.node.netns.run(lambda: Speaker(agent, groups, uid))


class Speaker:
    """A pod with a cgroup, known to the agent, that sends datagrams to the internet."""

    def __init__(self, agent: AgentLab, groups: Cgroups, uid: str) -> None:
        assert agent.metric("netacct_leases") == 0
        self.key = groups.pod(uid)
        until(lambda: agent.metric("netacct_leases") == 1)
        self._agent, self._worker = agent, groups.worker(uid)
        udp(self._worker, 4)

    def speak(self) -> int:
        """Send; returns the bytes (layer 3)."""
        self._worker.do(f"for _ in range(5): s.sendto(bytes(100), ({PEER[4]!r}, {support.PORT}))")
        return 5 * (100 + HEADERS[4])

    def end(self) -> None:
        """Let its process end."""
        self._worker.end()

    def booked(self, pod: int, host: int) -> None:
        """Wait until so many bytes are booked to the pod, and then these are to the host."""
        until(lambda: self._agent.totals() == {("proxy-0", "internet"): pod})
        assert self._agent.totals("host").get(("", "internet"), 0) == host


def test_an_agent_tells_a_host_pod_apart(agent: AgentLab, speaker: Speaker) -> None:
    """From the pods file and the kubelet's cgroups to metrics and commands, also over a kill of the agent."""
    sent = speaker.speak()
    speaker.booked(sent, 0)
    agent.kill()
    sent += speaker.speak()
    agent.start()
    speaker.booked(sent, 0)
    (line,) = json.loads(agent.command("pods", "-o", "json").stdout)
    assert (line["pod"], line["addresses"], line["sources"]) == ("proxy-0", [unpack(speaker.key)], ["cgroup"])
    assert agent.command("rules", "diff").stdout == ""


def test_it_can_be_switched_while_an_agent_runs(agent: AgentLab, speaker: Speaker) -> None:
    """Switched off, the pod is the host again and its totals stay; switched on, they go on."""
    sent = speaker.speak()
    agent.configure(host_pods="off", datapath="nftables")
    until(lambda: agent.metric("netacct_leases") == 0)
    hosts = speaker.speak()
    until(lambda: agent.totals("host").get(("", "internet")) == hosts)
    speaker.booked(sent, hosts)
    agent.configure(host_pods="cgroup")
    until(lambda: agent.metric("netacct_leases") == 1)
    speaker.booked(sent + speaker.speak(), hosts)


def test_the_end_of_its_cgroup_is_the_end_of_the_pod(
    agent: AgentLab, speaker: Speaker, groups: Cgroups, uid: str
) -> None:
    """When the cgroup is gone the account is closed, with all that the pod sent; iptables can go on from there."""
    sent = speaker.speak()
    speaker.end()
    groups.end(uid)
    until(lambda: agent.metric("netacct_leases") == 0)
    (record,) = json.loads(agent.command("accounts", "-o", "json").stdout)
    assert (record["pod"], record["ip"]) == ("proxy-0", unpack(speaker.key))
    assert record["transmit"] == {"internet": {"bytes": sent, "packets": 5}}
    agent.stop()
    agent.configure(host_pods="off", datapath="iptables")
    agent.start()
    speaker.booked(sent, 0)
