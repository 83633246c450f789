"""What every datapath must count, packet by packet: one suite for all of them, exact in bytes and packets.

The same topology for each datapath, the same traffic, the same figures; the node's own NAT is legacy iptables beside
the one and iptables-nft beside the other, as on the nodes where they run.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import random
import shutil
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from conformance import BACKENDS, DATAPATHS, Counted, Subject, at, deliver, expected, plan, since
from flows import FLOWS, HEADERS, OWN, POLICY, PORT, REPLY, REQUEST, REQUESTS, Flow, dnat, listener, nat, talk
from lab import ADDRESSES, PODS, inside, topology
from support import PATIENCE

from netacct.kernel.plan import Plan, build
from netacct.model import Family, Network, unpack
from netacct.policy import Prefix, TrafficClass

TOOLS = ("ip", "ipset", "nft", "iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft")

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"),
]

both_families = pytest.mark.parametrize("family", [4, 6])


class _World(NamedTuple):
    """A datapath on a topology of its own, and the plan that is installed (None: nothing is)."""

    subject: Subject
    installed: list[Plan]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, _World]]:
    """A topology for each datapath that a test asks for, once for all tests of this file."""
    found: dict[str, _World] = {}
    patched = pytest.MonkeyPatch()
    patched.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables.lock"))
    with contextlib.ExitStack() as stack:
        stack.callback(patched.undo)
        for name in DATAPATHS:
            lab = stack.enter_context(topology(f"nacc{name[:3]}"))
            found[name] = _World(Subject(name, lab), [])
            stack.callback(found[name].subject.datapath.close)
        yield found


@pytest.fixture(params=list(DATAPATHS))
def node(request: pytest.FixtureRequest, worlds: dict[str, _World]) -> Iterator[Subject]:
    """Each datapath, with the node's standard plan installed; without any NAT."""
    subject, installed = worlds[request.param]
    if installed != [plan()]:
        subject.clean()
        subject.install(plan())
        installed[:] = [plan()]
    yield subject
    for family in (4, 6):
        nat(subject.lab, family, "-F", backend=BACKENDS[subject.name])
    subject.dropped.clear()


@pytest.fixture(params=list(DATAPATHS))
def bare(request: pytest.FixtureRequest, worlds: dict[str, _World]) -> Iterator[Subject]:
    """Each datapath, with nothing installed."""
    subject, installed = worlds[request.param]
    subject.clean()
    installed.clear()
    yield subject
    subject.clean()


def _counts(subject: Subject, family: Family, flow: Flow, to: str = "", port: int = PORT) -> Counted:
    before = subject.read()
    talk(subject.lab, family, flow, to, port)
    return since(before, subject.read())


def _flow(name: str) -> Flow:
    return next(flow for flow in FLOWS if flow.name == name)


@both_families
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_each_row_of_the_table_is_exact(node: Subject, flow: Flow, family: Family) -> None:
    """A conversation along each row: these counters get exactly these bytes and packets, and no other gets any."""
    if flow.dnat:
        dnat(node.lab, family, flow.dnat, BACKENDS[node.name])
    assert _counts(node, family, flow) == expected(family, flow)


@both_families
def test_masquerade_hides_no_pod(node: Subject, family: Family) -> None:
    """A masqueraded pod is counted under its own address both ways (tools that look at PREROUTING lose the replies)."""
    nat(node.lab, family, f"-A POSTROUTING -s {PODS[family]} -o up0 -j MASQUERADE", backend=BACKENDS[node.name])
    flow = _flow("pod to internet")
    before = node.read()
    seen = talk(node.lab, family, flow)

    assert seen == {ADDRESSES[family]["node"]}
    assert since(before, node.read()) == expected(family, flow)


@both_families
def test_a_node_port_with_masquerade_shows_the_real_client(node: Subject, family: Family) -> None:
    """On the node that took it, a NodePort's client is `internet`, though the pod sees the node's address."""
    backend, pod, own = BACKENDS[node.name], ADDRESSES[family]["poda"], ADDRESSES[family]["node"]
    target = f"{pod}:{PORT}" if family == 4 else f"[{pod}]:{PORT}"
    nat(
        node.lab,
        family,
        f"-A PREROUTING -d {own} -p udp --dport 30080 -j DNAT --to {target}",
        f"-A POSTROUTING -d {pod} -p udp --dport {PORT} -j MASQUERADE",
        backend=backend,
    )
    flow = Flow("NodePort", ("far", "internet"), ("poda", "poda"), ("rx-internet poda",), ("tx-internet poda",))
    assert _counts(node, family, flow, own, 30080) == expected(family, flow)


@both_families
def test_a_source_that_another_node_masqueraded_looks_like_that_node(node: Subject, family: Family) -> None:
    """What comes with another node's address is `node`, whoever sent it: documented, and never quietly `internet`."""
    flow = Flow("via", ("far", "othernode"), ("poda", "poda"), ("rx-node poda",), ("tx-node poda",))
    assert _counts(node, family, flow) == expected(family, flow)


@both_families
def test_a_hairpin_is_one_transmit_and_one_receive(node: Subject, family: Family) -> None:
    """A pod that reaches itself by its service transmits and receives each packet once, in class `pod`."""
    backend, pod = BACKENDS[node.name], ADDRESSES[family]["poda"]
    dnat(node.lab, family, "poda", backend)
    nat(node.lab, family, f"-A POSTROUTING -s {pod} -d {pod} -j MASQUERADE", backend=backend)
    flow = Flow("hairpin", ("poda", "poda"), ("poda", "poda"), to="service",
                request=("tx-pod poda", "rx-pod poda"), reply=("tx-pod poda", "rx-pod poda"))  # fmt: skip
    assert _counts(node, family, flow) == expected(family, flow)


def test_a_host_port_on_loopback_is_booked_at_the_pods_end_only(node: Subject) -> None:
    """127.0.0.1:hostPort to a pod: the pod receives from `node`; the host's request left by lo; replies come in."""
    pod = ADDRESSES[4]["poda"]
    nat(
        node.lab,
        4,
        f"-A OUTPUT -d 127.0.0.1 -p udp --dport 8080 -j DNAT --to {pod}:{PORT}",
        f"-A POSTROUTING -s 127.0.0.0/8 -d {pod} -j MASQUERADE",
        backend=BACKENDS[node.name],
    )
    flow = Flow("host port", ("node", "loopback"), ("poda", "poda"), ("rx-node poda",), ("tx-node poda", "hi-pod"))
    before = node.read()
    with node.lab.socket("node", 4, "127.0.0.1") as client, listener(node.lab, 4, flow.server) as server:
        for _ in range(REQUESTS):
            client.sendto(b"q" * REQUEST, ("127.0.0.1", 8080))
            data, sender = server.recvfrom(2048)
            server.sendto(b"r" * REPLY, sender)
            assert (len(data), len(client.recv(2048))) == (REQUEST, REPLY)
    assert since(before, node.read()) == expected(4, flow)


# 3,000 bytes of payload and 8 of UDP header; IPv6 fragments carry 8 bytes of header more, IPv4 ones none
_FRAGMENTS: dict[Family, tuple[int, int]] = {4: (3008 + 3 * 20, 3), 6: (3008 + 3 * 48, 3)}
_WHOLE: dict[Family, tuple[int, int]] = {4: (3028, 1), 6: (3048, 1)}


def _send_large(subject: Subject, family: Family) -> Counted:
    before = subject.read()
    ends = (("poda", "poda"), ("podb", "podb"))
    with listener(subject.lab, family, ends[0], 0) as client, listener(subject.lab, family, ends[1]) as server:
        deliver(client, server, (ADDRESSES[family]["podb"], PORT), [3000])
    return since(before, subject.read())


@both_families
def test_reassembled_fragments_are_one_packet(node: Subject, family: Family) -> None:
    """Where the node has conntrack (any NAT), a datagram of three fragments is one packet with one header."""
    nat(
        node.lab, family, f"-A POSTROUTING -d {ADDRESSES[family]['private']} -j MASQUERADE", backend=BACKENDS[node.name]
    )
    whole = _WHOLE[family]
    assert _send_large(node, family) == at(family, {"tx-pod poda": whole, "rx-pod podb": whole})


@pytest.mark.parametrize("name", DATAPATHS)
def test_fragments_that_nobody_reassembles_are_packets(name: str) -> None:
    """Without conntrack each fragment counts with its own header, in both families."""
    with topology("naccf") as lab:
        subject = Subject(name, lab)
        subject.install(plan())
        for family in (4, 6):
            each = _FRAGMENTS[family]
            assert _send_large(subject, family) == at(family, {"tx-pod poda": each, "rx-pod podb": each})
        subject.datapath.close()


@both_families
def test_icmp_errors_count_like_everything_else(node: Subject, family: Family) -> None:
    """A port-unreachable is what the pod receives from the peer, with the packet that it quotes."""
    before = node.read()
    with listener(node.lab, family, ("poda", "poda"), 0) as client:
        client.connect((ADDRESSES[family]["internet"], 9))
        client.send(b"q" * REQUEST)
        with pytest.raises(ConnectionRefusedError):
            client.recv(2048)
    sent = REQUEST + HEADERS[family]
    back = sent + (28 if family == 4 else 48)
    assert since(before, node.read()) == at(family, {"tx-internet poda": (sent, 1), "rx-internet poda": (back, 1)})


@both_families
def test_a_refusal_by_the_node_comes_from_the_node(node: Subject, family: Family) -> None:
    """The node's own ICMP error to a pod is host transmit of class `pod`, and pod receive of class `node`."""
    before = node.read()
    with listener(node.lab, family, ("poda", "poda"), 0) as client:
        client.connect((ADDRESSES[family]["node"], 9))
        client.send(b"q" * REQUEST)
        with pytest.raises(ConnectionRefusedError):
            client.recv(2048)
    sent = (REQUEST + HEADERS[family], 1)
    back = (sent[0] + (28 if family == 4 else 48), 1)
    assert since(before, node.read()) == at(
        family, {"tx-node poda": sent, "hi-pod": sent, "ho-pod": back, "rx-node poda": back}
    )


@both_families
def test_what_a_policy_drops_was_transmitted_and_not_received(node: Subject, family: Family) -> None:
    """A drop in filter FORWARD: the sender's transmit counts, the receiver's receive does not (it got nothing)."""
    backend = BACKENDS[node.name]
    tool = f"{'iptables' if family == 4 else 'ip6tables'}-{backend}"
    pod = ADDRESSES[family]["podb"]
    node.lab.run("node", tool, "-A", "FORWARD", "-d", pod, "-j", "DROP")
    before = node.read()
    try:
        with listener(node.lab, family, ("poda", "poda"), 0) as client:
            for _ in range(REQUESTS):
                client.sendto(b"q" * REQUEST, (pod, PORT))
    finally:
        node.lab.run("node", tool, "-D", "FORWARD", "-d", pod, "-j", "DROP")
    sent = (REQUESTS * (REQUEST + HEADERS[family]), REQUESTS)
    assert since(before, node.read()) == at(family, {"tx-pod poda": sent})


@both_families
def test_tcp_counts_what_the_pods_own_stack_counts(node: Subject, family: Family) -> None:
    """Bytes and packets of a bulk transfer equal those that an independent counter in the pod saw, GSO and all."""
    space = "ip" if family == 4 else "ip6"
    peer = ADDRESSES[family]["internet"]
    node.lab.run("poda", "nft", "-f", "-", text=f"""
        table {space} seen {{
            chain out {{ type filter hook postrouting priority 300; {space} daddr {peer} counter; }}
            chain back {{ type filter hook prerouting priority -300; {space} saddr {peer} counter; }}
        }}""")  # fmt: skip
    before = node.read()
    try:
        _transfer(node, family, 1 << 20)
        listed = node.lab.run("poda", "nft", "list", "table", space, "seen").split()
    finally:
        node.lab.run("poda", "nft", "delete", "table", space, "seen")
    figures = [int(word) for name, word in itertools.pairwise(listed) if name in ("packets", "bytes")]
    sent, received = (figures[1], figures[0]), (figures[3], figures[2])
    assert sent[0] > 1 << 20
    assert since(before, node.read()) == at(family, {"tx-internet poda": sent, "rx-internet poda": received})


def _transfer(node: Subject, family: Family, size: int) -> None:
    """Send so many bytes over TCP from poda to the internet, to the end of the connection."""
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    with inside(node.lab.name("far")):
        server = socket.create_server((ADDRESSES[family]["internet"], 0), family=kind)
    with inside(node.lab.name("poda")):
        client = socket.socket(kind, socket.SOCK_STREAM)
    with server, client:
        server.settimeout(PATIENCE)
        client.settimeout(PATIENCE)
        client.connect(server.getsockname()[:2])
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(PATIENCE)
            left, data = size, b"t" * 65536
            while left:
                sent = client.send(data[:left])
                left -= sent
                while sent:
                    sent -= len(accepted.recv(sent))
            client.shutdown(socket.SHUT_WR)
            assert accepted.recv(1) == b""
        assert client.recv(1) == b""


MANY_CIDRS = 3000  # of each family


def _many(family: Family, dice: random.Random) -> list[Network]:
    """Public CIDRs of every length that lists of clouds have, some inside of others."""
    low, high = (8, 32) if family == 4 else (20, 64)
    bits = 32 if family == 4 else 128
    found: list[Network] = []
    while len(found) < MANY_CIDRS:
        number = dice.randrange(32 << 24, 100 << 24) if family == 4 else 1 << 125 | dice.getrandbits(bits) >> 4
        if found and dice.random() < 0.3:  # inside, or around, one that is there
            number = int(dice.choice(found).network_address) | dice.getrandbits(16)
        length = max(low, min(high, round(dice.triangular(low, high + 8, high - 8))))
        kind = ipaddress.IPv4Network if family == 4 else ipaddress.IPv6Network
        found.append(kind((number >> bits - length << bits - length, length)))
    return found


def _class_of(cidrs: dict[Network, str], number: int, bits: int) -> str:
    """The class by longest prefix, of an address that no other CIDR of the policy holds."""
    kind = ipaddress.IPv4Network if bits == 32 else ipaddress.IPv6Network
    networks = (kind((number >> bits - length << bits - length, length)) for length in range(bits, 0, -1))
    return next((cidrs[network] for network in networks if network in cidrs), "internet")


def test_thousands_of_cidrs_decide_by_longest_prefix(bare: Subject) -> None:
    """With thousands of CIDRs that nest, packets to their edges and between them all count in the right class."""
    dice = random.Random(1)
    names = ("storage", "service", "internet")
    cidrs = {network: dice.choice(names) for network in [*_many(4, dice), *_many(6, dice)]}
    prefixes = tuple(Prefix(network, traffic, "lab") for network, traffic in cidrs.items())
    policy = replace(POLICY, classes=(*POLICY.classes, TrafficClass("storage")), prefixes=POLICY.prefixes + prefixes)
    local = [ipaddress.ip_network(cidr) for cidr in PODS.values()]
    bare.install(build(policy, local, OWN, None))
    wanted: Counted = {}
    for family in (4, 6):
        wanted |= _send_everywhere(bare, family, cidrs, dice)

    assert bare.read() == wanted
    assert {key.traffic for key, _ in wanted} == set(names)
    assert bare.verify() == []


def _send_everywhere(subject: Subject, family: Family, cidrs: dict[Network, str], dice: random.Random) -> Counted:
    """A datagram to each edge of some CIDRs and right outside; the world beyond is silent. Returns what is right."""
    mine = [network for network in cidrs if network.version == family]
    bits = mine[0].max_prefixlen
    edges = {
        int(edge) for network in dice.sample(mine, 150) for edge in (network.network_address, network.broadcast_address)
    }
    counts: Counter[str] = Counter()
    subject.lab.run("far", "ip", f"-{family}", "route", "add", "blackhole", "default")
    try:
        with listener(subject.lab, family, ("poda", "poda"), 0) as client:
            for number in sorted({edge + step for edge in edges for step in (-1, 0, 1)}):
                client.sendto(b"q" * REQUEST, (unpack(number.to_bytes(bits // 8, "big")), 9))
                counts[_class_of(cidrs, number, bits)] += 1
    finally:
        subject.lab.run("far", "ip", f"-{family}", "route", "del", "blackhole", "default")
    size = REQUEST + HEADERS[family]
    return at(family, {f"tx-{name} poda": (size * count, count) for name, count in counts.items()})
