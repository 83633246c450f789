"""The iptables datapath counts real packets to the byte, and keeps its counters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import support
from support import NODE, OTHER_POD, PEER, POD, STORAGE, Netns, Node, counted, epochs, key, plan, rx, sh, table, tx

from netacct.kernel.iptables import IptablesDatapath
from netacct.model import WHOLE, Direction, Family, Scope, Snapshot, pack
from netacct.policy import MarkTable

pytestmark = pytest.mark.kernel

FAMILIES: tuple[Family, ...] = (4, 6)


@pytest.fixture
def datapath(netns: Netns) -> Iterator[IptablesDatapath]:
    """A datapath in the test's namespace."""
    with closing(netns.run(IptablesDatapath)) as made:
        yield made


@pytest.mark.parametrize("family", FAMILIES)
def test_every_packet_is_counted_at_its_address_and_class(
    node: Node, datapath: IptablesDatapath, family: Family
) -> None:
    """Pod to internet and back, pod to pod, pod to node: each end counts every byte and nothing else counts."""
    datapath.install(plan())
    pod, other, peer = (node.pod, POD[family]), (node.other_pod, OTHER_POD[family]), (node.peer, PEER[family])
    out = node.send(family, pod, peer, 7, 100)
    back = node.send(family, peer, pod, 5, 1000)
    across = node.send(family, pod, other, 3, 333)
    to_node = node.send(family, other, (node.netns, NODE[family]), 2, 50)

    assert counted(datapath.read()) == {
        (tx(family, "internet"), pack(POD[family])): out,
        (rx(family, "internet"), pack(POD[family])): back,
        (tx(family, "pod"), pack(POD[family])): across,
        (rx(family, "pod"), pack(OTHER_POD[family])): across,
        (tx(family, "node"), pack(OTHER_POD[family])): to_node,
        (key(family, Scope.HOST, Direction.RECEIVE, "pod"), WHOLE): to_node,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_dynamic_ranges_count_from_the_first_packet(node: Node, datapath: IptablesDatapath, family: Family) -> None:
    """An address of a range too large to prefill is counted whole without anybody naming it, and keeps its count."""
    wide = ("10.244.0.0/16", "fd00:10:244:1::/64")
    datapath.install(plan(local=wide))
    pod, peer = (node.pod, POD[family]), (node.peer, PEER[family])
    first = node.send(family, pod, peer, 4, 100)
    datapath.add([pack(POD[family]), pack(OTHER_POD[family])])
    second = node.send(family, pod, peer, 4, 100)

    assert counted(datapath.read()) == {(tx(family, "internet"), pack(POD[family])): first.plus(second)}


def test_a_full_set_counts_as_rest(node: Node, datapath: IptablesDatapath) -> None:
    """An address that finds no room is not refused, and its bytes land in the rest counter of their class."""
    datapath.install(plan(local=("10.244.0.0/16",), capacity=1))
    datapath.add([pack("10.244.7.7"), pack("10.244.7.8")])
    sent = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 3, 100)

    assert counted(datapath.read()) == {(key(4, Scope.REST, Direction.TRANSMIT, "internet"), WHOLE): sent}
    assert datapath.verify() == []


def test_installing_again_changes_nothing(node: Node, datapath: IptablesDatapath) -> None:
    """A second install, also by a new agent, keeps counts and epochs, and commits nothing."""
    datapath.install(plan())
    sent = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 3, 100)
    rules, before = table(4), datapath.read()
    again = datapath.install(plan())
    with closing(IptablesDatapath()) as restarted:
        adopted = restarted.install(plan())
        after = restarted.read()

    assert again.readings == adopted.readings == ()
    assert table(4) == rules  # rule counters too: a rewritten chain would begin at zero
    assert epochs(after) == epochs(before)
    assert counted(after) == {(tx(4, "internet"), pack(POD[4])): sent}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_retired_class_hands_its_last_values_over(node: Node, datapath: IptablesDatapath, family: Family) -> None:
    """The counters of a class that a new plan lacks are kept before they are destroyed; all others go on."""
    datapath.install(plan())
    stored = node.send(family, (node.pod, POD[family]), (node.peer, STORAGE[family]), 3, 200)
    before = datapath.read()
    kept: list[Snapshot] = []
    present: list[str] = []

    def keep(snapshot: Snapshot) -> None:
        kept.append(snapshot)
        present.extend(name for name in sh("ipset list -n").split() if "storage" in name)

    returned = datapath.install(plan(storage=False), keep)
    later = node.send(family, (node.pod, POD[family]), (node.peer, STORAGE[family]), 2, 200)

    retired = tx(family, "storage")
    assert kept == [returned]
    assert counted(returned) == {(retired, pack(POD[family])): stored}
    assert epochs(returned)[retired] == epochs(before)[retired]
    assert f"nacc{family}-tx-storage" in present
    assert "storage" not in sh("ipset list -n") + table(family)
    assert counted(datapath.read()) == {(tx(family, "internet"), pack(POD[family])): later}
    assert datapath.verify() == []


def test_a_set_of_the_wrong_size_is_made_anew_without_loss(node: Node, datapath: IptablesDatapath) -> None:
    """Where the local range grows beyond a set, the new set starts a new epoch and the old values are handed over."""
    datapath.install(plan(local=("10.244.1.8/29",)))
    sent = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 3, 100)
    old = epochs(datapath.read())
    returned = datapath.install(plan(local=("10.244.1.0/24",)))
    after = datapath.read()

    assert counted(returned) == {(tx(4, "internet"), pack(POD[4])): sent}
    assert epochs(returned)[tx(4, "internet")] == old[tx(4, "internet")]
    assert epochs(after)[tx(4, "internet")] != old[tx(4, "internet")]
    assert counted(after) == {}
    assert datapath.verify() == []
    assert not [name for name in sh("ipset list -n").split() if "+" in name]


def test_discarding_returns_last_values_and_spares_prefilled_addresses(node: Node, datapath: IptablesDatapath) -> None:
    """A discarded address of a dynamic range is gone after its last values were kept; prefilled ones stay."""
    datapath.install(plan(local=("10.244.1.0/28", "10.244.128.0/17")))
    dynamic = pack("10.244.200.1")
    node.pod.sh("ip addr add 10.244.200.1/32 dev eth0")
    sent = node.send(4, (node.pod, "10.244.200.1"), (node.peer, PEER[4]), 3, 100)
    node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 3, 100)
    returned = datapath.discard([dynamic, pack(POD[4])])

    assert counted(returned) == {(tx(4, "internet"), dynamic): sent}
    assert set(counted(datapath.read())) == {(tx(4, "internet"), pack(POD[4]))}


def test_marks_are_set_inside_the_mask_only(node: Node, datapath: IptablesDatapath) -> None:
    """A packet gets its class's mark, foreign bits stay, and a packet that already has a mark in the mask keeps it."""
    datapath.install(plan(marks=MarkTable(0x1F, {"internet": 5, "pod": 1})))
    for device, mark in (("v0", "0x100"), ("v1", "0x7")):
        sh(f"iptables-legacy -t mangle -A PREROUTING -i {device} -j MARK --set-mark {mark}")
    for mark in ("0x105", "0x7"):
        sh(f"iptables-legacy -t mangle -A POSTROUTING -m mark --mark {mark} -j RETURN")
    for pod, address in ((node.pod, POD[4]), (node.other_pod, OTHER_POD[4])):
        node.send(4, (pod, address), (node.peer, PEER[4]), 3, 100)

    seen = [line.split()[0] for line in table(4).splitlines() if "-A POSTROUTING -m mark" in line]
    assert seen == ["[3:384]", "[3:384]"]


def test_an_interface_whose_name_resembles_lo_is_counted(netns: Netns, datapath: IptablesDatapath) -> None:
    """`! -o lo` of IPv6 excludes lo alone; python-iptables' own mask would also take an interface called `lm`."""
    peer = Netns()
    with closing(peer):
        mac = "02:00:00:00:01:09"
        sh(f"ip link add xm type veth peer name eth0 address {mac} netns {peer.path}")
        sh("sysctl -qw net.ipv6.conf.xm.addr_gen_mode=1", "ip link set xm up")
        peer.sh("sysctl -qw net.ipv6.conf.eth0.addr_gen_mode=1", "ip link set lo up", "ip link set eth0 up")
        sh("ip addr add 2001:db8:7::1/64 dev xm nodad")
        peer.sh("ip addr add 2001:db8:7::2/64 dev eth0 nodad")
        sh(f"ip neigh replace 2001:db8:7::2 lladdr {mac} dev xm nud permanent")
        datapath.install(plan())
        sender = netns.socket(6, "2001:db8:7::1", 0)
        receiver = peer.socket(6, "2001:db8:7::2")
        with sender, receiver:
            receiver.settimeout(support.PATIENCE)
            sender.sendto(b"x" * 100, ("2001:db8:7::2", support.PORT))
            receiver.recv(200)

    sent = counted(datapath.read())
    assert sent[key(6, Scope.HOST, Direction.TRANSMIT, "internet"), WHOLE] == (148, 1)


def test_no_other_legacy_table_appears(datapath: IptablesDatapath) -> None:
    """Installing, verifying and removing create the mangle table alone."""
    datapath.install(plan())
    datapath.verify()
    datapath.remove()

    for name in ("ip_tables_names", "ip6_tables_names"):
        assert Path(f"/proc/thread-self/net/{name}").read_text().split() == ["mangle"]


def test_verifying_before_anything_is_installed_creates_no_table(datapath: IptablesDatapath) -> None:
    """A plan that is only adopted is verified as missing, and the namespace stays as it was."""
    datapath.adopt(plan())
    found = datapath.verify()

    assert "IPv4: table mangle is missing" in found
    assert "set nacc4-tx-pod is missing" in found
    assert Path("/proc/thread-self/net/ip_tables_names").read_text() == ""
    assert set(datapath.read().unreadable) >= {tx(4, "pod"), rx(6, "internet")}
