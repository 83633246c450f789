"""Beside other programs: marks, bridges, foreign rules, and a node that is left as it was. For every datapath."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from conformance import BACKENDS, DATAPATHS, Subject, at, deliver, expected, plan
from flows import FLOWS, HEADERS, MARKS, PORT, REQUEST, REQUESTS, Flow, dnat, listener, nat, talk
from lab import ADDRESSES, Lab, namespace, topology

from netacct.model import Family

TOOLS = ("ip", "ipset", "nft", "bridge", "iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft")

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"),
]

both_families = pytest.mark.parametrize("family", [4, 6])

TO_INTERNET = next(flow for flow in FLOWS if flow.name == "pod to internet")
HOST_TO_INTERNET = next(flow for flow in FLOWS if flow.name == "host to internet")


@pytest.fixture(scope="module", autouse=True)
def _lock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables.lock"))
        yield


@pytest.fixture(scope="module")
def labs() -> Iterator[dict[str, Lab]]:
    """A topology for each datapath, once for all tests of this file."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(topology(f"naco{name[:3]}")) for name in DATAPATHS}


@pytest.fixture(params=list(DATAPATHS))
def node(request: pytest.FixtureRequest, labs: dict[str, Lab]) -> Iterator[Subject]:
    """Each datapath, with nothing installed."""
    subject = Subject(request.param, labs[request.param])
    yield subject
    subject.clean()
    subject.datapath.close()


def _tool(node: Subject, family: Family) -> str:
    return f"{'iptables' if family == 4 else 'ip6tables'}-{BACKENDS[node.name]}"


def _mangle(node: Subject, family: Family, *rules: str) -> None:
    for rule in rules:
        node.lab.run("node", _tool(node, family), "-t", "mangle", *rule.split())


def _marked(node: Subject, family: Family) -> list[int]:
    """The packets that each rule on marks in POSTROUTING saw."""
    listed = node.lab.run("node", _tool(node, family), "-t", "mangle", "-nvxL", "POSTROUTING").splitlines()
    return [int(line.split()[0]) for line in listed if "mark match" in line]


@both_families
def test_marks_carry_the_class_and_spare_foreign_bits(node: Subject, family: Family) -> None:
    """After our chains a packet has its class's value in our bits, and every other bit as somebody else set it."""
    node.install(plan(marks=MARKS))
    pod = ADDRESSES[family]["poda"]
    values = {"internet": 5, "private": 4, "remotepod": 1, "othernode": 2}
    _mangle(
        node,
        family,
        f"-A PREROUTING -s {pod} -j MARK --set-xmark 0xabcd0800/0xffffffe0",
        *(
            f"-A POSTROUTING -s {pod} -d {ADDRESSES[family][place]} -m mark --mark {0xABCD0800 | value:#x}"
            for place, value in values.items()
        ),
    )
    for place in values:
        talk(node.lab, family, Flow(place, ("poda", "poda"), ("far", place), (), ()))
    assert _marked(node, family) == [REQUESTS] * len(values)


@both_families
def test_bits_of_ours_that_are_set_stay_as_they_are(node: Subject, family: Family) -> None:
    """A packet whose bits inside our mask are set already keeps them: somebody else said something with them."""
    node.install(plan(marks=MARKS))
    pod = ADDRESSES[family]["poda"]
    _mangle(
        node,
        family,
        f"-A PREROUTING -s {pod} -j MARK --set-xmark 0x10/0x1f",
        f"-A POSTROUTING -s {pod} -m mark --mark 0x10/0x1f",
    )
    talk(node.lab, family, TO_INTERNET)
    assert _marked(node, family) == [REQUESTS]


@both_families
def test_kube_proxys_masquerade_mark_survives(node: Subject, family: Family) -> None:
    """With marks on, a service's 0x4000 still masquerades (a mark written without a mask broke NodePorts)."""
    node.install(plan(marks=MARKS))
    backend, service = BACKENDS[node.name], ADDRESSES[family]["service"]
    nat(node.lab, family, f"-A PREROUTING -d {service} -j MARK --set-xmark 0x4000/0x4000", backend=backend)
    dnat(node.lab, family, "internet", backend)
    nat(node.lab, family, "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE", backend=backend)
    flow = Flow("service", ("poda", "poda"), ("far", "internet"), (), (), to="service")
    assert talk(node.lab, family, flow) == {ADDRESSES[family]["node"]}


@contextlib.contextmanager
def _blackhole_for_marked(node: Subject, family: Family) -> Iterator[None]:
    """An `ip rule` that sends what has the mark of class `internet` nowhere."""
    rule = ("rule", "{}", "fwmark", "5/0x1f", "lookup", "52")
    _ip(node, family, *(word.format("add") for word in rule))
    _ip(node, family, "route", "add", "blackhole", "default", "table", "52")
    try:
        yield
    finally:
        _ip(node, family, *(word.format("del") for word in rule))
        _ip(node, family, "route", "flush", "table", "52")


def _ip(node: Subject, family: Family, *words: str) -> None:
    node.lab.run("node", "ip", f"-{family}", *words)


@both_families
def test_a_mark_moves_no_packet_of_a_pod(node: Subject, family: Family) -> None:
    """A pod's packet is marked after its route is chosen: a rule on our marks does not touch it."""
    node.install(plan(marks=MARKS))
    with _blackhole_for_marked(node, family):
        talk(node.lab, family, TO_INTERNET)
    assert node.read() == expected(family, TO_INTERNET)


def test_a_strict_reverse_path_drops_nothing_that_we_mark(node: Subject) -> None:
    """With rp_filter and src_valid_mark pods reach whom they reached: none of our marks is there at the source check.

    Marks set in PREROUTING made the kernel drop a VPN's packets so. IPv6 has no such check.
    """
    node.install(plan(marks=MARKS))
    strict = ("net.ipv4.conf.all.rp_filter", "net.ipv4.conf.all.src_valid_mark")
    try:
        node.lab.run("node", "sysctl", "-qw", *(f"{key}=1" for key in strict))
        with _blackhole_for_marked(node, 4):
            talk(node.lab, 4, TO_INTERNET)
    finally:
        node.lab.run("node", "sysctl", "-qw", *(f"{key}=0" for key in strict))
    assert node.read() == expected(4, TO_INTERNET)


@both_families
def test_a_mark_routes_the_hosts_own_packets_where_the_operator_asked_for_it(node: Subject, family: Family) -> None:
    """With marks on, an `ip rule` on them decides the host's own packets anew; with marks off nothing is re-routed."""
    node.install(plan())
    with _blackhole_for_marked(node, family):
        talk(node.lab, family, HOST_TO_INTERNET)
        node.install(plan(marks=MARKS))
        with (
            listener(node.lab, family, ("node", "node"), 0) as client,
            pytest.raises(OSError, match=r"Invalid|refused"),
        ):
            client.sendto(b"q", (ADDRESSES[family]["internet"], PORT))


def _everything(node: Subject) -> str:
    """All that other programs can see of netfilter on the node, without figures that traffic moves."""
    backend = BACKENDS[node.name]
    saved = [node.lab.run("node", f"{tool}-{backend}-save", "-c") for tool in ("iptables", "ip6tables")]
    lines = [line for text in saved for line in text.splitlines() if not line.startswith("#")]
    return "\n".join([*lines, node.lab.run("node", "nft", "list", "tables"), node.lab.run("node", "ipset", "list")])


def test_removing_leaves_the_node_as_it_was(node: Subject) -> None:
    """Before an install and after a remove the node has the same rules, sets, tables and foreign counters."""
    for family in (4, 6):
        _mangle(node, family, "-A FORWARD -j ACCEPT")
        nat(node.lab, family, "-A POSTROUTING -o up0 -j MASQUERADE", backend=BACKENDS[node.name])
    talk(node.lab, 4, TO_INTERNET)
    before = _everything(node)
    node.install(plan(marks=MARKS))
    during = _everything(node)
    with node.on_node() as datapath:
        datapath.remove()

    assert _everything(node) == before != during


def test_an_installation_changes_no_rule_of_others(node: Subject) -> None:
    """Rules of other programs, their order and their counters are the same beside ours."""
    for family in (4, 6):
        _mangle(
            node, family, "-A FORWARD -s 192.0.2.1 -j DROP" if family == 4 else "-A FORWARD -s 2001:db8::99 -j DROP"
        )
        _mangle(node, family, "-A FORWARD -j ACCEPT")
    talk(node.lab, 4, TO_INTERNET)

    def others() -> list[str]:
        saved = [node.lab.run("node", f"{tool}-{BACKENDS[node.name]}-save", "-c") for tool in ("iptables", "ip6tables")]
        return [line for text in saved for line in text.splitlines() if line[:1] == "[" and "NETACCT" not in line]

    before = others()
    node.install(plan())
    assert before
    assert others() == before


def test_the_hosts_iptables_stays_readable(node: Subject) -> None:
    """`iptables-nft-save` shows mangle, not "incompatible" (one native object in it made Calico add rules for ever)."""
    node.lab.run("node", "iptables-nft", "-t", "mangle", "-A", "FORWARD", "-s", "192.0.2.9", "-j", "ACCEPT")
    node.install(plan(marks=MARKS))
    try:
        saved = node.lab.run("node", "iptables-nft-save", "-t", "mangle")
    finally:
        node.lab.run("node", "iptables-nft", "-t", "mangle", "-F")
    assert "incompatible" not in saved
    assert "-A FORWARD -s 192.0.2.9/32 -j ACCEPT" in saved


@pytest.mark.parametrize("name", DATAPATHS)
def test_only_what_is_needed_is_made(name: str) -> None:
    """Nftables makes no legacy table, iptables none but mangle (a look at one table once made all five)."""
    with namespace("nacon") as lab:
        subject = Subject(name, lab)
        subject.install(plan())
        with subject.on_node() as datapath:
            assert datapath.verify() == []
            datapath.read()
        made = lab.run("node", "cat", "/proc/net/ip_tables_names").split()
        tables = set(re.findall(r"table (\S+ \S+)", lab.run("node", "nft", "list", "tables")))
        subject.datapath.close()
    wanted = {"iptables": (["mangle"], set()), "nftables": ([], {"ip netacct", "ip6 netacct"})}
    assert (made, tables) == wanted[name]


@pytest.mark.parametrize("name", DATAPATHS)
def test_a_node_without_ipv6_is_counted(name: str) -> None:
    """Where IPv6 is switched off, installing, verifying and counting IPv4 work as ever."""
    with topology("naco6") as lab:
        for place in ("node", "poda", "far"):
            lab.run(place, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
        subject = Subject(name, lab)
        subject.install(plan())
        talk(lab, 4, TO_INTERNET)
        assert subject.verify() == []
        assert subject.read() == expected(4, TO_INTERNET)
        subject.datapath.close()


_BRIDGED: dict[Family, dict[str, str]] = {
    4: {"poda": "10.244.1.10/24", "podb": "10.244.1.11/24", "podc": "10.244.1.12/24"},
    6: {"poda": "fd00:10:244:1::a/120", "podb": "fd00:10:244:1::b/120", "podc": "fd00:10:244:1::c/120"},
}
_BRIDGED_MACS = {"poda": "02:00:00:00:02:0a", "podb": "02:00:00:00:02:0b", "podc": "02:00:00:00:02:0c"}


@contextlib.contextmanager
def _bridge(prefix: str) -> Iterator[Lab]:
    """Three pods on a bridge of the node, as a bridge CNI wires them; every frame is one that a test sends."""
    lab = Lab(f"{prefix}{os.getpid()}")
    try:
        for place in ("node", *_BRIDGED_MACS):
            subprocess.run(["ip", "netns", "add", lab.name(place)], check=True)
            lab.run(place, "sysctl", "-qw", *_QUIET)
            lab.run(place, "ip", "link", "set", "lo", "up")
        lab.run("node", "ip", "link", "add", "cni0", "type", "bridge", "mcast_snooping", "0")
        lab.run("node", "ip", "link", "set", "cni0", "up")
        for pod, mac in _BRIDGED_MACS.items():
            peer = ("peer", "name", "eth0", "address", mac, "netns", lab.name(pod))
            lab.run("node", "ip", "link", "add", f"v{pod}", "type", "veth", *peer)
            lab.run("node", "ip", "link", "set", f"v{pod}", "master", "cni0")
            lab.run("node", "ip", "link", "set", f"v{pod}", "type", "bridge_slave", "learning", "off")
            lab.run("node", "ip", "link", "set", f"v{pod}", "up")
            lab.run(pod, "ip", "link", "set", "eth0", "up")
            for addresses in _BRIDGED.values():
                lab.run(pod, "ip", "addr", "add", addresses[pod], "dev", "eth0")
                for other, other_mac in _BRIDGED_MACS.items():
                    ip = addresses[other].partition("/")[0]
                    lab.run(pod, "ip", "neigh", "add", ip, "lladdr", other_mac, "dev", "eth0", "nud", "permanent")
        yield lab
    finally:
        for place in ("node", *_BRIDGED_MACS):
            subprocess.run(["ip", "netns", "del", lab.name(place)], capture_output=True, check=False)


_QUIET = (
    "net.ipv4.ip_forward=1",
    *(
        f"net.ipv6.conf.{scope}.{key}"
        for scope in ("all", "default")
        for key in ("addr_gen_mode=1", "accept_dad=0", "accept_ra=0", "router_solicitations=0")
    ),
)


@pytest.fixture(params=list(DATAPATHS))
def bridged(request: pytest.FixtureRequest) -> Iterator[Subject]:
    """Each datapath on a node with a bridge, installed; the kernel passes bridged packets to netfilter."""
    with _bridge("nacob") as lab:
        if "bridge-nf" not in " ".join(lab.run("node", "sysctl", "-aN", "-r", "net.bridge").split()):
            pytest.skip("this kernel has no br_netfilter")
        _pass_bridged(lab, 1)
        subject = Subject(request.param, lab)
        subject.install(plan())
        yield subject
        subject.datapath.close()


def _pass_bridged(lab: Lab, value: int) -> None:
    keys = (f"net.bridge.bridge-nf-call-{tables}={value}" for tables in ("iptables", "ip6tables"))
    lab.run("node", "sysctl", "-qw", *keys)


def _know(lab: Lab, *pods: str) -> None:
    """Let the bridge know behind which ports these pods are."""
    for pod in pods:
        lab.run("node", "bridge", "fdb", "replace", _BRIDGED_MACS[pod], "dev", f"v{pod}", "master", "static")


def _send(subject: Subject, family: Family) -> tuple[int, int]:
    """From poda to podb; what is right."""
    target = _BRIDGED[family]["podb"].partition("/")[0]
    source = _BRIDGED[family]["poda"].partition("/")[0]
    with (
        subject.lab.socket("poda", family, source) as client,
        subject.lab.socket("podb", family, target, PORT) as server,
    ):
        deliver(client, server, (target, PORT), [REQUEST] * REQUESTS)
    return REQUESTS * (REQUEST + HEADERS[family]), REQUESTS


@both_families
def test_bridged_pods_count_exactly_once(bridged: Subject, family: Family) -> None:
    """Between two pods on a bridge that knows them, a packet is one transmit and one receive."""
    _know(bridged.lab, "poda", "podb")
    sent = _send(bridged, family)
    assert bridged.read() == at(family, {"tx-pod poda": sent, "rx-pod podb": sent})


@both_families
def test_a_flooded_frame_counts_once_for_each_port(bridged: Subject, family: Family) -> None:
    """A frame for an address that the bridge does not know passes FORWARD once per port: the documented limit."""
    octets, packets = _send(bridged, family)
    twice = (2 * octets, 2 * packets)
    assert bridged.read() == at(family, {"tx-pod poda": twice, "rx-pod podb": twice})


@both_families
def test_bridged_pods_are_invisible_without_br_netfilter(bridged: Subject, family: Family) -> None:
    """With bridge-nf-call-iptables=0 nothing of it is counted, and nothing else instead: a blind spot, not a number."""
    _pass_bridged(bridged.lab, 0)
    _know(bridged.lab, "poda", "podb")
    _send(bridged, family)
    assert bridged.read() == {}
