"""Nothing is lost or counted twice while things change: policy, pods, other people's flushes, the agent's own end.

One suite for every datapath. Traffic runs through the topology of `lab.py`, and what was dropped on the way is added
to what is counted at the end: the sum must be what was sent.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest
from conformance import DATAPATHS, DYNAMIC, Counted, Subject, at, counted, expected, place, plan, since
from flows import FLOWS, HEADERS, MARKS, OWN, POLICY, REPLY, REQUEST, REQUESTS, talk
from lab import ADDRESSES, PODS, Lab, topology
from support import eventually

from netacct.kernel.nftables import NftablesDatapath
from netacct.kernel.plan import Plan, build
from netacct.model import Family, Scope, pack
from netacct.policy import Prefix, TrafficClass

TOOLS = ("ip", "ipset", "nft", "iptables-legacy", "ip6tables-legacy", "iptables-nft", "ip6tables-nft")

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root for network namespaces"),
    pytest.mark.skipif(any(shutil.which(tool) is None for tool in TOOLS), reason=f"needs {', '.join(TOOLS)}"),
]

both_families = pytest.mark.parametrize("family", [4, 6])

POD_TO_POD = next(flow for flow in FLOWS if flow.name == "pod to local pod")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One topology for all tests of this file."""
    with pytest.MonkeyPatch.context() as patched, topology("naccc") as made:
        patched.setenv("XTABLES_LOCKFILE", str(tmp_path_factory.mktemp("lock") / "xtables.lock"))
        yield made


@pytest.fixture(params=list(DATAPATHS))
def node(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Subject]:
    """Each datapath, with nothing installed."""
    subject = Subject(request.param, lab)
    yield subject
    subject.clean()
    subject.datapath.close()


def _with_storage() -> Plan:
    """The plan with one class more, into which the internet host falls."""
    prefixes = [("203.0.113.0/24", "storage"), ("2001:db8::/48", "storage")]
    added = tuple(Prefix(ipaddress.ip_network(cidr), traffic, "lab") for cidr, traffic in prefixes)
    policy = replace(POLICY, classes=(*POLICY.classes, TrafficClass("storage")), prefixes=POLICY.prefixes + added)
    ranges = [ipaddress.ip_network(cidr) for cidr in PODS.values()]
    return build(policy, ranges, OWN, None, dynamic_capacity=64)


class _Sender:
    """Sends datagrams from a pod to the internet, in a thread, until told to stop; nobody has to receive them."""

    def __init__(self, lab: Lab, family: Family, pod: str) -> None:
        self.sent = 0
        self._stop = threading.Event()
        self._socket = lab.socket(pod, family, ADDRESSES[family][pod])
        self._target = (ADDRESSES[family]["internet"], 9)
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._socket.sendto(b"s" * 100, self._target)
                self.sent += 1
            except ConnectionRefusedError:  # the port is closed; the error is of an earlier datagram
                continue
            time.sleep(0.0005)


def _of_pod(total: Counted, family: Family, pod: str, leg: str) -> tuple[int, int]:
    """All classes of one address and direction."""
    ip = pack(ADDRESSES[family][pod])
    key = place(family, f"{leg}-pod")[0]
    some = [count for (of, end), count in total.items() if end == ip and of[:3] == key[:3]]
    return sum(count[0] for count in some), sum(count[1] for count in some)


@both_families
def test_policy_changes_under_traffic_lose_nothing(node: Subject, family: Family) -> None:
    """While a class comes and goes, each packet of a stream is in one class (rebuilding a chain reset its counters)."""
    node.install(plan())
    with _Sender(node.lab, family, "poda") as sender:
        for turn in range(10):
            node.install(_with_storage() if turn % 2 == 0 else plan())
            before = sender.sent
            eventually(lambda: sender.sent > before + 5)  # noqa: B023 -- called before the next turn
    total = node.total()
    sent = (sender.sent * (100 + HEADERS[family]), sender.sent)

    assert _of_pod(total, family, "poda", "tx") == sent
    assert {place(family, "tx-internet poda"), place(family, "tx-storage poda")} <= total.keys()
    assert node.verify() == []


@both_families
def test_a_new_policy_counts_from_the_next_packet(node: Subject, family: Family) -> None:
    """Before the change the internet host is `internet`, after it `storage`; both keep what they counted."""
    flow = next(flow for flow in FLOWS if flow.name == "pod to internet")
    node.install(plan())
    talk(node.lab, family, flow)
    node.install(_with_storage())
    talk(node.lab, family, flow)
    after = replace(flow, request=("tx-storage poda",), reply=("rx-storage poda",))

    assert node.read() == expected(family, flow) | expected(family, after)


@both_families
def test_marks_and_larger_ranges_reset_no_counter(node: Subject, family: Family) -> None:
    """Switching marks on and off, and a range that grows, leave every count as it was, in books and kernel together."""
    node.install(plan())
    talk(node.lab, family, POD_TO_POD)
    before = node.total()
    for wanted in (plan(marks=MARKS), plan(), plan(*DYNAMIC), plan()):
        node.install(wanted)
        assert node.total() == before
    talk(node.lab, family, POD_TO_POD)
    assert since(before, node.total()) == expected(family, POD_TO_POD)


@both_families
def test_pods_that_come_and_go_disturb_no_other(node: Subject, family: Family) -> None:
    """While a hundred addresses get and lose counters, a stream of another pod is counted to the packet."""
    node.install(plan(*DYNAMIC))
    base = int(ipaddress.ip_address(ADDRESSES[family]["poda"]))
    size = 4 if family == 4 else 16
    others = [(base + 256 + index).to_bytes(size, "big") for index in range(50)]
    with _Sender(node.lab, family, "poda") as sender, node.on_node() as datapath:
        eventually(lambda: sender.sent > 0)
        for _ in range(2):
            for start in range(0, 50, 10):
                datapath.add(others[start : start + 10])
            for start in range(0, 50, 10):
                datapath.discard(others[start : start + 10])
    assert node.read()[place(family, "tx-internet poda")] == (sender.sent * (100 + HEADERS[family]), sender.sent)
    assert node.verify() == []


@both_families
def test_a_pod_that_nobody_announced_counts_from_its_first_packet(node: Subject, family: Family) -> None:
    """In a range that is not prefilled, the packet that makes the counter is in it (bytes before a pod was known)."""
    node.install(plan(*DYNAMIC))
    talk(node.lab, family, POD_TO_POD)
    assert node.read() == expected(family, POD_TO_POD)


@both_families
def test_what_finds_no_room_is_complete_in_the_rest(node: Subject, family: Family) -> None:
    """A full set loses nothing: addresses without a counter of their own count in the rest of their class."""
    node.install(plan(*DYNAMIC, capacity=0))
    talk(node.lab, family, POD_TO_POD)
    both = (REQUESTS * (REQUEST + REPLY + 2 * HEADERS[family]), 2 * REQUESTS)
    assert node.read() == at(family, {"to-pod": both, "ro-pod": both})


def test_an_address_that_finds_no_room_can_still_be_added(node: Subject) -> None:
    """Adding more addresses than there is room for is no error, and those that fitted have counters."""
    node.install(plan(*DYNAMIC, capacity=3))
    with node.on_node() as datapath:
        datapath.add([pack(f"10.244.9.{host}") for host in range(1, 6)])
        readings = datapath.read().readings
    sizes = {len(reading.counts) for reading in readings if reading.key[:2] == (4, Scope.POD)}
    assert sizes == {3}


@both_families
def test_what_others_flush_is_repaired_and_nothing_is_counted_twice(node: Subject, family: Family) -> None:
    """After somebody wiped all rules (a firewall's reload), counting goes on where it stopped, by one repair."""
    node.install(plan())
    talk(node.lab, family, POD_TO_POD)
    before = node.read()
    _wipe(node)
    with node.on_node() as datapath:
        found = datapath.verify()
    node.install(plan())
    talk(node.lab, family, POD_TO_POD)

    assert bool(found) == (node.name == "iptables")  # the nftables table is ours alone, and cannot be flushed
    assert node.verify() == []
    assert since(before, node.read()) == expected(family, POD_TO_POD)


def _wipe(node: Subject) -> None:
    if node.name == "nftables":
        node.lab.run("node", "nft", "flush", "ruleset")
        return
    for tool in ("iptables-legacy", "ip6tables-legacy"):
        node.lab.run("node", f"{tool}-restore", text="*mangle\nCOMMIT\n")


def test_many_small_disturbances_are_seen(node: Subject) -> None:
    """Each way in which our part of the kernel can be hurt is a difference, and installing again mends it."""
    node.install(plan())
    for command in _DISTURBANCES[node.name]:
        _disturb(node, command)
        assert node.verify(), command
        node.install(plan())
        assert node.verify() == [], command


_DISTURBANCES = {
    "iptables": (
        "iptables-legacy -t mangle -F FORWARD",
        "iptables-legacy -t mangle -F NETACCT-TX",
        "ip6tables-legacy -t mangle -I NETACCT-RX -j ACCEPT",
        "iptables-legacy -t mangle -I POSTROUTING -j ACCEPT",
        "ipset flush nacc4-tx-pod",
        "ipset del nacc6-rx-pod fd00:10:244:1::a",
        "ipset del nacc6-rx-node ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    ),
    "nftables": (
        "nft flush chain ip netacct forward",
        "nft flush chain ip netacct tx-pod",
        "nft insert rule ip6 netacct rx accept",
        "nft add rule ip netacct postrouting accept",
        "nft flush set ip netacct tx-pod",
        "nft delete element ip6 netacct rx-pod { fd00:10:244:1::a }",
        "nft delete element ip netacct rx-node { 255.255.255.255 }",
        "nft delete table ip6 netacct",
    ),
}


def _disturb(node: Subject, command: str) -> None:
    """Run a command on the node; a table of nftables lets only its owner do that, so nobody owns it then."""
    if isinstance(node.datapath, NftablesDatapath):
        node.datapath.release()
    node.lab.run("node", *command.split())


_AGENT = """
import sys, time
from conformance import DATAPATHS, DYNAMIC, plan
datapath = DATAPATHS[sys.argv[1]]()
print("begins", flush=True)
for turn in range(int(sys.argv[2])):
    datapath.install(plan(*DYNAMIC) if turn % 2 else plan())
print("installed", flush=True)
time.sleep(600)
"""


def _agent(node: Subject, turns: int) -> subprocess.Popen[str]:
    """An agent in a process of its own, which installs the plan."""
    folder = str(Path(__file__).parent)
    return subprocess.Popen(
        ["ip", "netns", "exec", node.lab.name("node"), sys.executable, "-c", _AGENT, node.name, str(turns)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": folder},
    )


@both_families
def test_counting_goes_on_when_the_agent_is_killed(node: Subject, family: Family) -> None:
    """Packets between a SIGKILL and the next start are counted; the next agent finds them, with the same epochs."""
    with _agent(node, 1) as agent:
        assert agent.stdout is not None
        assert [agent.stdout.readline() for _ in range(2)] == ["begins\n", "installed\n"]
        agent.send_signal(signal.SIGKILL)
    talk(node.lab, family, POD_TO_POD)
    with node.on_node() as datapath:
        datapath.adopt(plan())
        first = datapath.read()
        differences = datapath.verify()
    node.install(plan())
    with node.on_node() as datapath:
        second = datapath.read()

    assert counted([first]) == expected(family, POD_TO_POD)
    assert differences == []
    assert node.dropped == []
    assert second.readings == first.readings


def test_a_kill_at_any_moment_of_an_install_is_mended_by_the_next(node: Subject) -> None:
    """However far an install came before SIGKILL, the next one ends with everything in place and nothing left over."""
    for wait in (0.0, 0.004, 0.02, 0.05, 0.09, 0.2):
        with _agent(node, 1000) as agent:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "begins\n"
            time.sleep(wait)
            agent.send_signal(signal.SIGKILL)
        node.install(plan())
        assert node.verify() == [], wait
        talk(node.lab, 4, POD_TO_POD)
        assert node.read() == expected(4, POD_TO_POD), wait
        with node.on_node() as datapath:
            datapath.remove()
