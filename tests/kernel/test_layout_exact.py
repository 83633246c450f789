"""The rendered layout on the real kernel, applied by the real tools: each packet is counted where it belongs.

Nothing here uses the datapath's own code: the tools make the sets and chains, and `ipset save` is what is compared.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from flows import (
    FLOWS,
    HEADERS,
    MARKS,
    OWN,
    POLICY,
    PORT,
    REPLY,
    REQUEST,
    REQUESTS,
    VXLAN,
    Flow,
    dnat,
    listener,
    nat,
    talk,
)
from lab import ADDRESSES, PODS, Lab, counters, topology

from netacct.kernel import layout as xt
from netacct.kernel import render
from netacct.kernel.plan import Plan, build
from netacct.model import Family, pack
from netacct.policy import MarkTable, Prefix, TrafficClass

TOOLS = (
    "ip",
    "ipset",
    "iptables-legacy",
    "iptables-legacy-restore",
    "ip6tables-legacy-restore",
    "iptables-legacy-save",
)

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"),
]

EPOCH = 4711


def _plan(*local: str, marks: MarkTable | None = None, capacity: int = 16384) -> Plan:
    ranges = [ipaddress.ip_network(cidr) for cidr in local or PODS.values()]
    return build(POLICY, ranges, OWN, marks, dynamic_capacity=capacity)


def _apply(lab: Lab, plan: Plan) -> None:
    """Give the rendered plan to the real tools, with sentinels, and the epoch in each catch-all's name."""
    for layout, part in zip(xt.build(plan), plan.families, strict=True):
        names = {spec.name: f"{spec.name}-epoch1" for spec in layout.sets if spec.catch_all}
        epochs = {spec.name: EPOCH for spec in layout.sets}
        lab.run("node", "ipset", "restore", text=render.ipset_text(layout, part.prefilled, epochs, names))
        tool = "iptables" if layout.family == 4 else "ip6tables"
        lab.run("node", f"{tool}-legacy-restore", "--noflush", text=render.iptables_text(layout, names))


@pytest.fixture(scope="module")
def lab_world() -> Iterator[Lab]:
    """The topology, once for all tests of this file."""
    with topology("nacl") as lab:
        yield lab


@pytest.fixture
def lab_node(lab_world: Lab) -> Iterator[Lab]:
    """The topology with a node that has no rules, no sets and no connections."""
    yield lab_world
    for tool in ("iptables-legacy", "ip6tables-legacy"):
        for table in ("mangle", "nat"):
            for option in ("-F", "-X"):
                lab_world.run("node", tool, "-t", table, option)
    lab_world.run("node", "ipset", "destroy")


def _expect(family: Family, flow: Flow) -> dict[str, dict[str, tuple[int, int]]]:
    total: Counter[tuple[str, str]] = Counter()
    outer: Counter[tuple[str, str]] = Counter()
    for places, size in ((flow.request, REQUEST), (flow.reply, REPLY)):
        for place in places:
            total[_counter(family, place)] += size + HEADERS[family]
    if flow.tunnelled:
        outer["nacc4-ho-tunnel-epoch1", "*"] = REQUEST + HEADERS[family] + VXLAN
        outer["nacc4-hi-tunnel-epoch1", "*"] = REPLY + HEADERS[family] + VXLAN
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for (name, element), size in (total + outer).items():
        found.setdefault(name, {})[element] = (REQUESTS, size * REQUESTS)
    return found


def _counter(family: Family, place: str) -> tuple[str, str]:
    kind, _, pod = place.partition(" ")
    return (f"nacc{family}-{kind}", ADDRESSES[family][pod]) if pod else (f"nacc{family}-{kind}-epoch1", "*")


def _counted(lab: Lab) -> dict[str, dict[str, tuple[int, int]]]:
    """What is counted: sentinels apart, and the two halves of a catch-all added up as `*`."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, elements in counters(lab).items():
        if name.endswith("-epoch1"):
            found[name] = {"*": tuple(map(sum, zip(*elements.values(), strict=True)))}  # type: ignore[dict-item]  # a pair
            continue
        pods = {ip: count for ip, count in elements.items() if count != (1, EPOCH)}
        assert len(elements) == len(pods) + 1
        if pods:
            found[name] = pods
    return found


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_a_conversation_is_counted_to_the_byte(lab_node: Lab, flow: Flow, family: Family) -> None:
    """Each row of the table of hooks: these counters have exactly these bytes and packets, and no other has any."""
    _apply(lab_node, _plan())
    if flow.dnat:
        dnat(lab_node, family, flow.dnat)
    talk(lab_node, family, flow)
    assert _counted(lab_node) == _expect(family, flow)


@pytest.mark.parametrize("family", [4, 6])
def test_the_battery_is_exact_with_conntrack_and_marks_too(lab_node: Lab, family: Family) -> None:
    """All conversations one after the other, with NAT in place and marks set, add up to the byte."""
    _apply(lab_node, _plan(marks=MARKS))
    nat(
        lab_node, family, f"-A POSTROUTING -s {PODS[family]} -o up0 ! -d {ADDRESSES[family]['remotepod']} -j MASQUERADE"
    )
    total: dict[str, dict[str, tuple[int, int]]] = {}
    for flow in FLOWS:
        # A masqueraded pod still has its own address where we count; a client from outside is not masqueraded.
        if flow.dnat:
            continue
        talk(lab_node, family, flow)
        for name, elements in _expect(family, flow).items():
            for element, (packets, octets) in elements.items():
                before = total.setdefault(name, {}).get(element, (0, 0))
                total[name][element] = (before[0] + packets, before[1] + octets)
    assert _counted(lab_node) == total


@pytest.mark.parametrize("family", [4, 6])
def test_masquerade_hides_no_pod(lab_node: Lab, family: Family) -> None:
    """The internet sees the node's address, the counters the pod's, in both directions."""
    _apply(lab_node, _plan())
    nat(lab_node, family, f"-A POSTROUTING -s {PODS[family]} -o up0 -j MASQUERADE")
    flow = next(flow for flow in FLOWS if flow.name == "pod to internet")
    assert talk(lab_node, family, flow) == {ADDRESSES[family]["node"]}
    assert _counted(lab_node) == _expect(family, flow)


@pytest.mark.parametrize("family", [4, 6])
def test_a_hairpin_is_one_transmit_and_one_receive(lab_node: Lab, family: Family) -> None:
    """A pod that reaches itself by its service transmits and receives each packet once, in class `pod`."""
    _apply(lab_node, _plan())
    dnat(lab_node, family, "poda")
    pod, gateway = ADDRESSES[family]["poda"], ADDRESSES[family]["gateway"]
    nat(lab_node, family, f"-A POSTROUTING -s {pod} -d {pod} -j MASQUERADE")
    flow = Flow("hairpin", ("poda", "poda"), ("poda", "poda"), to="service",
                request=("tx-pod poda", "rx-pod poda"), reply=("tx-pod poda", "rx-pod poda"))  # fmt: skip
    assert talk(lab_node, family, flow) == {gateway}
    both = REQUESTS * (REQUEST + REPLY + 2 * HEADERS[family])
    assert _counted(lab_node) == {f"nacc{family}-{side}-pod": {pod: (2 * REQUESTS, both)} for side in ("tx", "rx")}


def test_a_host_port_on_loopback_is_booked_at_the_pods_end_only(lab_node: Lab) -> None:
    """127.0.0.1:hostPort to a pod: the pod receives from `node`; the host's request left by lo; replies come in."""
    _apply(lab_node, _plan())
    pod = ADDRESSES[4]["poda"]
    nat(
        lab_node,
        4,
        f"-A OUTPUT -d 127.0.0.1 -p udp --dport 8080 -j DNAT --to {pod}:{PORT}",
        f"-A POSTROUTING -s 127.0.0.0/8 -d {pod} -j MASQUERADE",
    )
    flow = Flow("host port", ("node", "loopback"), ("poda", "poda"), ("rx-node poda",), ("tx-node poda", "hi-pod"))
    with lab_node.socket("node", 4, "127.0.0.1") as client, listener(lab_node, 4, flow.server) as server:
        for _ in range(REQUESTS):
            client.sendto(b"q" * REQUEST, ("127.0.0.1", 8080))
            data, sender = server.recvfrom(2048)
            server.sendto(b"r" * REPLY, sender)
            assert (len(data), len(client.recv(2048))) == (REQUEST, REPLY)
    assert _counted(lab_node) == _expect(4, flow)


@pytest.mark.parametrize("family", [4, 6])
def test_a_dynamic_range_counts_from_the_first_packet(lab_node: Lab, family: Family) -> None:
    """Addresses of a range that is too large to prefill are exact, the packet that made their counter included."""
    _apply(lab_node, _plan("10.244.0.0/19", "fd00:10:244:1::/64"))
    flow = FLOWS[0]
    talk(lab_node, family, flow)
    assert _counted(lab_node) == _expect(family, flow)


@pytest.mark.parametrize("family", [4, 6])
def test_what_finds_no_room_is_counted_as_rest(lab_node: Lab, family: Family) -> None:
    """With room for no new address at all, a conversation of pods is complete in the rest counters."""
    _apply(lab_node, _plan("10.244.0.0/19", "fd00:10:244:1::/64", capacity=0))
    talk(lab_node, family, FLOWS[0])
    both = (2 * REQUESTS, REQUESTS * (REQUEST + REPLY + 2 * HEADERS[family]))
    assert _counted(lab_node) == {f"nacc{family}-{side}-pod-epoch1": {"*": both} for side in ("to", "ro")}


@pytest.mark.parametrize("family", [4, 6])
def test_large_classes_and_many_ranges_are_exact_by_sets(lab_node: Lab, family: Family) -> None:
    """With hundreds of CIDRs, own addresses and local ranges the sets decide, and every count is the same."""
    spread = [ipaddress.ip_network(f"100.{64 + i // 256}.{i % 256}.0/24") for i in range(0, 600, 2)]
    spread6 = [ipaddress.ip_network(f"2001:db8:{i:x}::/48") for i in range(0, 600, 2)]
    prefixes = tuple(Prefix(network, "storage", "lab") for network in (*spread, *spread6))
    policy = replace(POLICY, classes=(*POLICY.classes, TrafficClass("storage")), prefixes=POLICY.prefixes + prefixes)
    local = [ipaddress.ip_network(f"10.244.1.{host}") for host in range(2, 60)]
    local += [ipaddress.ip_network(f"fd00:10:244:1::{host:x}") for host in range(2, 60)]
    own = [
        *OWN,
        *(pack(f"10.96.7.{host}") for host in range(20)),
        *(pack(f"fd00:10:96::7:{host}") for host in range(20)),
    ]
    plan = build(policy, local, own, None)
    assert {"nacc4-own", "nacc4-local"} <= {spec.name for spec in xt.build(plan)[0].sets}
    _apply(lab_node, plan)
    wanted: dict[str, dict[str, tuple[int, int]]] = {}
    for name in ("pod to gateway in the local range", "pod to internet", "host to private"):
        flow = next(flow for flow in FLOWS if flow.name == name)
        if family == 6 and name == "pod to internet":  # 2001:db8::/48 is storage here
            flow = replace(flow, request=("tx-storage poda",), reply=("rx-storage poda",))
        talk(lab_node, family, flow)
        wanted |= _expect(family, flow)
    assert _counted(lab_node) == wanted


def test_cidrs_everywhere_are_exact_behind_their_blocks(lab_node: Lab) -> None:
    """With CIDRs all over IPv4 a bitmap of /16s is asked first; what is in it and what is not is booked right."""
    everywhere = [ipaddress.ip_network(f"{first}.7.{first}.0/24") for first in range(1, 224)]
    around = [ipaddress.ip_network(cidr) for cidr in ("203.0.112.0/24", "203.0.113.8/31", "172.20.0.0/15")]
    prefixes = tuple(Prefix(network, "storage", "lab") for network in (*everywhere, *around))
    policy = replace(POLICY, classes=(*POLICY.classes, TrafficClass("storage")), prefixes=POLICY.prefixes + prefixes)
    plan = build(policy, [ipaddress.ip_network(PODS[4])], OWN, None)
    kinds = {spec.name: spec.type for spec in xt.build(plan)[0].sets if spec.key is None}
    assert sorted(kinds.values()) == ["bitmap:ip", "hash:net"]
    _apply(lab_node, plan)
    wanted: dict[str, dict[str, tuple[int, int]]] = {}
    for name in ("pod to internet", "host to internet", "pod to private", "host to private"):
        flow = next(flow for flow in FLOWS if flow.name == name)
        talk(lab_node, 4, flow)
        wanted |= {counter.replace("private", "storage"): counts for counter, counts in _expect(4, flow).items()}
    assert _counted(lab_node) == wanted


def test_the_tools_show_what_was_meant(lab_node: Lab) -> None:
    """iptables-save gives back the rendered rules, ours at the head of each hook, before rules that were there."""
    lab_node.run("node", "iptables-legacy", "-t", "mangle", "-A", "FORWARD", "-j", "ACCEPT")
    plan = _plan(marks=MARKS)
    _apply(lab_node, plan)
    layout = xt.build(plan)[0]
    names = {spec.name: f"{spec.name}-epoch1" for spec in layout.sets if spec.catch_all}
    saved = lab_node.run("node", "iptables-legacy-save", "-t", "mangle").splitlines()
    numbers = {"-p ipencap": "-p 4", "-p ipv6": "-p 41", "-p gre": "-p 47", "-p esp": "-p 50"}
    for chain in (*layout.chains, *layout.hooks):
        wanted = [f"-A {chain.name}{render.rule_text(rule, names)}" for rule in chain.rules]
        shown = [line for line in saved if line.split()[:2] == ["-A", chain.name]]
        for word, number in numbers.items():
            shown = [line.replace(word, number) for line in shown]
        assert shown[: len(wanted)] == wanted
        assert shown[len(wanted) :] == (["-A FORWARD -j ACCEPT"] if chain.name == "FORWARD" else [])


def test_the_removal_text_leaves_the_table_as_it_was(lab_node: Lab) -> None:
    """After the removal and the sets' destruction, iptables-save gives the same rules as before, and no set is left."""
    lab_node.run("node", "iptables-legacy", "-t", "mangle", "-A", "FORWARD", "-s", "192.0.2.1", "-j", "ACCEPT")

    def rules() -> list[str]:
        saved = [lab_node.run("node", f"{tool}-legacy-save", "-t", "mangle") for tool in ("iptables", "ip6tables")]
        return [re.sub(r"\[.*", "", line) for text in saved for line in text.splitlines() if line[0] != "#"]

    lab_node.run("node", "ip6tables-legacy", "-t", "mangle", "-L", "-n")
    before, plan = rules(), _plan(marks=MARKS)
    _apply(lab_node, plan)
    assert rules() != before
    for layout in xt.build(plan):
        tool = "iptables" if layout.family == 4 else "ip6tables"
        lab_node.run("node", f"{tool}-legacy-restore", "--noflush", text=render.removal_text(layout))
    lab_node.run("node", "ipset", "destroy")
    assert rules() == before


@pytest.mark.parametrize("family", [4, 6])
def test_marks_carry_the_class_and_spare_foreign_bits(lab_node: Lab, family: Family) -> None:
    """After our chains a packet has its class's value in our bits, and every other bit as somebody else set it."""
    _apply(lab_node, _plan(marks=MARKS))
    tool = "iptables-legacy" if family == 4 else "ip6tables-legacy"
    pod = ADDRESSES[family]["poda"]
    values = {"internet": 5, "private": 4, "remotepod": 1, "othernode": 2}
    for rule in (
        f"-A PREROUTING -s {pod} -j MARK --set-xmark 0xabcd0800/0xffffffe0",
        *(
            f"-A POSTROUTING -s {pod} -d {ADDRESSES[family][place]} -m mark --mark {0xABCD0800 | value:#x}"
            for place, value in values.items()
        ),
    ):
        lab_node.run("node", tool, "-t", "mangle", *rule.split())
    for place in values:
        talk(lab_node, family, Flow(place, ("poda", "poda"), ("far", place), (), ()))
    listed = lab_node.run("node", tool, "-t", "mangle", "-nvxL", "POSTROUTING").splitlines()
    assert [int(line.split()[0]) for line in listed if "mark match" in line] == [REQUESTS] * len(values)


@pytest.mark.parametrize("family", [4, 6])
def test_kube_proxys_masquerade_mark_survives(lab_node: Lab, family: Family) -> None:
    """With marks on, a service's 0x4000 still makes POSTROUTING masquerade: the backend sees the node."""
    _apply(lab_node, _plan(marks=MARKS))
    service = ADDRESSES[family]["service"]
    nat(lab_node, family, f"-A PREROUTING -d {service} -j MARK --set-xmark 0x4000/0x4000")
    dnat(lab_node, family, "internet")
    nat(lab_node, family, "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE")
    flow = Flow("service", ("poda", "poda"), ("far", "internet"), (), (), to="service")
    assert talk(lab_node, family, flow) == {ADDRESSES[family]["node"]}


def test_marked_bits_of_ours_are_left_alone(lab_node: Lab) -> None:
    """A packet whose bits inside our mask are set already keeps them: they are an answer that somebody gave."""
    _apply(lab_node, _plan(marks=MARKS))
    pod = ADDRESSES[4]["poda"]
    for rule in (
        f"-A PREROUTING -s {pod} -j MARK --set-xmark 0x10/0x1f",
        f"-A POSTROUTING -s {pod} -m mark --mark 0x10/0x1f",
    ):
        lab_node.run("node", "iptables-legacy", "-t", "mangle", *rule.split())
    talk(lab_node, 4, next(flow for flow in FLOWS if flow.name == "pod to internet"))
    listed = lab_node.run("node", "iptables-legacy", "-t", "mangle", "-nvxL", "POSTROUTING").splitlines()
    assert [int(line.split()[0]) for line in listed if "mark match" in line] == [REQUESTS]


def test_ranges_that_touch_no_pod_add_no_hook(lab_node: Lab) -> None:
    """On a node without local ranges the pods' traffic is nobody's, and the host's own is complete."""
    _apply(lab_node, build(POLICY, [], OWN, None))
    talk(lab_node, 4, next(flow for flow in FLOWS if flow.name == "pod to internet"))
    host = next(flow for flow in FLOWS if flow.name == "host to internet")
    talk(lab_node, 4, host)
    assert _counted(lab_node) == _expect(4, host)
