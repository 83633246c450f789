"""Pod counters in bitmaps: their sentinel, and the change between bitmaps and hashes without losing a byte."""

from __future__ import annotations

import ipaddress
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from support import LOCAL, PEER, POD, Netns, Node, counted, epochs, key, plan, policy, rx, sh, table, tx

from netacct.kernel import plan as plans
from netacct.kernel.iptables import IptablesDatapath
from netacct.model import WHOLE, Direction, Scope, Snapshot, pack
from netacct.policy import Prefix

pytestmark = pytest.mark.kernel

NEAR = (LOCAL[4], LOCAL[6])
FAR = (*NEAR, "10.250.0.0/28")  # too far away for one bitmap
WIDER = ("10.244.1.0/24", LOCAL[6])
END = "10.244.1.16"
CHANGES = [(NEAR, FAR), (FAR, NEAR), (NEAR, WIDER), (WIDER, NEAR)]
IDS = ["bitmap to hash", "hash to bitmap", "growing", "shrinking"]


@pytest.fixture
def datapath(netns: Netns) -> Iterator[IptablesDatapath]:
    """A datapath in the test's namespace."""
    with closing(netns.run(IptablesDatapath)) as made:
        yield made


def kind() -> str:
    """The type of the pod counter sets for IPv4."""
    return sh("ipset list -t nacc4-tx-internet").split("Type: ")[1].split()[0]


def test_the_kind_of_set_follows_from_the_local_ranges(datapath: IptablesDatapath) -> None:
    """Bitmaps count where one holds all local addresses, hashes elsewhere, and both verify."""
    found = []
    for local in (NEAR, FAR, NEAR):
        datapath.install(plan(local=local))
        found.append(kind())
        assert datapath.verify() == []
        assert not [name for name in sh("ipset list -n").split() if "+" in name]

    assert found == ["bitmap:ip", "hash:ip", "bitmap:ip"]


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=IDS)
def test_a_change_of_set_hands_the_old_values_over(
    node: Node, datapath: IptablesDatapath, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    """What a set of the old kind counted is kept under its epoch; the new one counts on, from zero, under another."""
    datapath.install(plan(local=before))
    sent = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 3, 100)
    old = epochs(datapath.read())
    kept: list[Snapshot] = []
    returned = datapath.install(plan(local=after), kept.append)
    later = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 2, 100)

    assert [snapshot.readings for snapshot in kept] == [returned.readings]
    assert counted(returned) == {(tx(4, "internet"), pack(POD[4])): sent}
    assert epochs(returned)[tx(4, "internet")] == old[tx(4, "internet")]
    assert counted(datapath.read()) == {(tx(4, "internet"), pack(POD[4])): later}
    assert epochs(datapath.read())[tx(4, "internet")] != old[tx(4, "internet")]
    assert epochs(datapath.read())[tx(6, "internet")] == old[tx(6, "internet")]


def test_changes_under_traffic_lose_and_double_nothing(node: Node, datapath: IptablesDatapath) -> None:
    """While pods send, sets change kind again and again; kept and last values add up to what was sent."""
    total: Counter[object] = Counter()

    def book(snapshot: Snapshot) -> None:
        for what, count in counted(snapshot).items():
            total[what, "bytes"] += count[0]
            total[what, "packets"] += count[1]

    datapath.install(plan())
    sent = []
    sender = threading.Thread(
        target=lambda: sent.append(node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 6000, 100))
    )
    sender.start()
    changes = 0
    while sender.is_alive() or changes < 4:
        datapath.install(plan(local=(NEAR, FAR, WIDER)[changes % 3]), book)
        changes += 1
    sender.join()
    book(datapath.read())

    what = (tx(4, "internet"), pack(POD[4]))
    assert total == {(what, "bytes"): sent[0].bytes, (what, "packets"): sent[0].packets}


def test_a_newer_agent_reads_what_an_older_one_counts(node: Node, datapath: IptablesDatapath) -> None:
    """A plan that is only adopted reads sets of the other kind, with the epochs that they have."""
    for installed, adopted in ((FAR, NEAR), (NEAR, FAR)):
        datapath.install(plan(local=installed))
        sent = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 3, 100)
        with closing(IptablesDatapath()) as newer:
            newer.adopt(plan(local=adopted))

            assert epochs(newer.read()) == epochs(datapath.read())
            assert counted(newer.read()) == {(tx(4, "internet"), pack(POD[4])): sent}
            assert newer.verify() != []


def test_traffic_of_the_address_past_the_range_leaves_the_epoch_alone(node: Node, datapath: IptablesDatapath) -> None:
    """The address that is the bitmap's sentinel may be somebody's: its packets count nowhere and change no epoch."""
    datapath.install(plan())
    before = epochs(datapath.read())
    node.pod.sh(f"ip addr add {END}/32 dev eth0")
    sh(f"ip route add {END}/32 via 169.254.1.2 dev v0 onlink")
    sh("ip neigh replace 169.254.1.2 lladdr 02:00:00:00:01:00 dev v0 nud permanent")
    node.send(4, (node.pod, END), (node.peer, PEER[4]), 3, 100)
    node.send(4, (node.peer, PEER[4]), (node.pod, END), 3, 100)

    assert sh("ipset list nacc4-tx-internet").count(f"{END} packets 1 ") == 1
    assert counted(datapath.read()) == {}
    assert epochs(datapath.read()) == before


def test_an_address_that_a_bitmap_has_no_room_for_is_not_added(datapath: IptablesDatapath) -> None:
    """Adding addresses outside of the local range, or the node's own, neither fails nor adds a counter."""
    datapath.install(plan())
    datapath.add([pack("10.244.9.9"), pack("192.168.50.1"), pack(END)])

    (reading,) = [reading for reading in datapath.read().readings if reading.key == rx(4, "pod")]
    assert set(reading.counts) == set(plan().families[0].prefilled)
    assert datapath.verify() == []


def test_missing_addresses_of_a_bitmap_come_back(node: Node, datapath: IptablesDatapath) -> None:
    """An address that somebody took out counts as rest until it is reported and repaired, under the same epoch."""
    datapath.install(plan())
    before = epochs(datapath.read())
    sh(f"ipset del nacc4-tx-internet {POD[4]}")
    lost = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 3, 100)
    found = datapath.verify()
    datapath.install(plan())
    sent = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 2, 100)

    assert found == ["set nacc4-tx-internet lacks 1 addresses"]
    assert epochs(datapath.read()) == before
    assert counted(datapath.read()) == {
        (tx(4, "internet"), pack(POD[4])): sent,
        (key(4, Scope.REST, Direction.TRANSMIT, "internet"), WHOLE): lost,
    }


def test_blocks_are_verified_and_repaired(datapath: IptablesDatapath) -> None:
    """A bitmap of /16s that lost or gained one is reported, and made anew by the next install."""
    everywhere = [ipaddress.ip_network(f"{first}.7.{first}.0/24") for first in range(1, 224) if first not in (10, 127)]
    rules = policy()
    more = (*rules.prefixes, *(Prefix(network, "storage", "test") for network in everywhere))
    crowded = plans.build(replace(rules, prefixes=more), [ipaddress.ip_network(LOCAL[4])], [], None)
    datapath.install(crowded)
    assert datapath.verify() == []
    for command in ("del nacc4-b1-storage 9.7.0.0", "add nacc4-b1-storage 9.8.0.0"):
        sh(f"ipset {command}")
        found = datapath.verify()
        datapath.install(crowded)

        assert found == ["set nacc4-b1-storage holds other prefixes than ours"]
        assert datapath.verify() == []
    assert "--match-set nacc4-b1-storage dst -m set --match-set nacc4-c1-storage dst" in table(4)
    datapath.install(plan())
    assert "nacc4-b" not in sh("ipset list -n")
