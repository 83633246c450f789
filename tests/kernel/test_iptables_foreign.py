"""The iptables datapath among other programs: it leaves theirs alone, notices what they do to ours, and repairs it."""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import support
from support import PEER, POD, Netns, Node, counted, epochs, plan, sh, table, tx

from netacct.errors import DatapathError, LockTimeoutError
from netacct.kernel.iptables import IptablesDatapath
from netacct.model import Count, CounterKey, Direction, Family, Scope, Snapshot, pack

pytestmark = pytest.mark.kernel

FAMILIES: tuple[Family, ...] = (4, 6)
FOREIGN = (
    "-N OTHERS",
    "-A OTHERS -m mark --mark 0x1/0x1 -m comment --comment hello -j RETURN",
    "-A FORWARD -c 11 1100 -p tcp -m multiport --dports 80,443 -m conntrack --ctstate NEW -j OTHERS",
    "-A PREROUTING -c 99999999999 5000000000000000000 -i eth9 -j MARK --set-xmark 0x100/0x100",
    "-A POSTROUTING -c 7 700 -d {} -j ACCEPT",
    "-P INPUT ACCEPT -c 5 500",
)


@pytest.fixture
def datapath(netns: Netns) -> Iterator[IptablesDatapath]:
    """A datapath in the test's namespace."""
    with closing(netns.run(IptablesDatapath)) as made:
        yield made


def iptables(family: Family, *rules: str) -> None:
    """Run iptables-legacy on the mangle table, once for each line."""
    tool = "iptables-legacy" if family == 4 else "ip6tables-legacy"
    sh(*(f"{tool} -w 10 -t mangle {rule}" for rule in rules))


def foreign_lines(family: Family) -> list[str]:
    """The lines of the table that are not ours."""
    return [line for line in table(family).splitlines() if "NETACCT" not in line]


@pytest.mark.parametrize("family", FAMILIES)
def test_removing_leaves_the_table_as_it_was(datapath: IptablesDatapath, family: Family) -> None:
    """Foreign rules, chains, policies and all their counters are the same while we are there and after we went."""
    iptables(family, *(rule.format(PEER[family]) for rule in FOREIGN))
    before = table(family)
    datapath.install(plan())
    during = foreign_lines(family)
    datapath.install(plan(storage=False))
    datapath.remove()

    assert during == before.splitlines()
    assert table(family) == before
    assert sh("ipset list -n") == ""


def test_a_new_object_removes_what_another_installed(node: Node, datapath: IptablesDatapath) -> None:
    """`remove` needs no plan: it finds everything of ours by name, and hands the last values over."""
    datapath.install(plan())
    sent = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 3, 100)
    with closing(IptablesDatapath()) as other:
        removed = other.remove()
        again = other.remove()

    assert counted(removed) == {(tx(4, "internet"), pack(POD[4])): sent}
    assert again.readings == ()
    assert "NETACCT" not in table(4) + table(6)
    assert sh("ipset list -n") == ""


def test_sets_of_others_are_left_alone(datapath: IptablesDatapath) -> None:
    """Sets whose names merely begin like ours survive installing and removing."""
    sh("ipset create nacc hash:ip", "ipset create nacc4-other hash:ip counters", "ipset create naccount hash:net")
    datapath.install(plan())
    datapath.remove()

    assert sh("ipset list -n").split() == ["nacc", "nacc4-other", "naccount"]


DAMAGE: dict[str, tuple[Callable[[Family], None], str]] = {
    "flush": (lambda family: iptables(family, "-F"), "is absent"),
    "flush of a hook": (lambda family: iptables(family, "-F FORWARD"), "hook FORWARD: our rule"),
    "duplicate": (
        lambda family: iptables(family, f"-A FORWARD -s {support.LOCAL[family]} -j NETACCT-TX"),
        "is there 2 times",
    ),
    "another jump": (
        lambda family: iptables(family, "-A OUTPUT -o nowhere -j NETACCT-RX"),
        "a rule that we did not install",
    ),
    "order": (
        lambda family: iptables(family, "-D INPUT ! -i lo -j NETACCT-HI", "-I INPUT 1 ! -i lo -j NETACCT-HI"),
        "hook INPUT: our rules are out of order",
    ),
    "rival": (lambda family: iptables(family, "-I FORWARD 1 -p udp -j ACCEPT"), "are behind rule 1 (-j ACCEPT)"),
    "rival in a chain": (
        lambda family: iptables(family, "-N OTHERS", "-A OTHERS -j DROP", "-I FORWARD 1 -p tcp -j OTHERS"),
        "are behind rule 1 (-j OTHERS)",
    ),
    "rule": (lambda family: iptables(family, "-D NETACCT-TX 1"), "chain NETACCT-TX: rule 1"),
    "extra rule": (lambda family: iptables(family, "-A NETACCT-RX -j DROP"), "(-j DROP) should not be there"),
    "changed rule": (
        lambda family: iptables(family, "-R NETACCT-RX-pod 1 -j RETURN"),
        "chain NETACCT-RX-pod: rule 1 (-j RETURN) is not what we installed",
    ),
    "extra chain": (lambda family: iptables(family, "-N NETACCT-OLD"), "chain NETACCT-OLD is left over"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_repaired(node: Node, datapath: IptablesDatapath, damage: str, family: Family) -> None:
    """Whatever others do to our rules, `verify` says so, `install` repairs it once, and no counter is lost."""
    harm, words = DAMAGE[damage]
    datapath.install(plan())
    one = node.send(family, (node.pod, POD[family]), (node.peer, PEER[family]), 2, 100)
    before = epochs(datapath.read())
    harm(family)
    found = datapath.verify()
    datapath.install(plan())
    repaired = table(family)
    datapath.install(plan())
    two = node.send(family, (node.pod, POD[family]), (node.peer, PEER[family]), 2, 100)

    assert [line for line in found if f"IPv{family}: " in line and words in line], found
    assert datapath.verify() == []
    assert repaired.count("-A FORWARD -s") == 1
    assert counted(datapath.read()) == {(tx(family, "internet"), pack(POD[family])): one.plus(two)}
    assert epochs(datapath.read()) == before


@pytest.mark.parametrize(
    "rule",
    [
        "-I FORWARD 1 -j MARK --set-xmark 0x100/0x100",
        "-I FORWARD 1 -p tcp",
        "-I FORWARD 1 -j HARMLESS",
        "-A FORWARD -j ACCEPT",
    ],
)
def test_harmless_rules_move_nothing(datapath: IptablesDatapath, rule: str) -> None:
    """A foreign rule that comes after ours, or before them and lets every packet go on, is no reason to move."""
    iptables(4, "-N HARMLESS", "-A HARMLESS -p udp -j RETURN", "-A HARMLESS -j TTL --ttl-set 9")
    datapath.install(plan())
    iptables(4, rule)
    before = table(4)
    datapath.install(plan())

    assert datapath.verify() == []
    assert table(4) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_flushed_set_gets_a_new_epoch(node: Node, datapath: IptablesDatapath, family: Family) -> None:
    """A foreign `ipset flush` of everything is named, its counters are unreadable, and new epochs begin at zero."""
    datapath.install(plan())
    pod, peer = (node.pod, POD[family]), (node.peer, PEER[family])
    node.send(family, pod, peer, 3, 100)
    before = epochs(datapath.read())
    sh("ipset flush")
    broken = datapath.read()
    found = datapath.verify()
    datapath.install(plan())
    sent = node.send(family, pod, peer, 2, 100)
    after = datapath.read()

    assert broken.readings == ()
    assert set(broken.unreadable) == set(before)
    assert f"set nacc{family}-tx-pod has lost its sentinel (was it flushed?)" in found
    assert any(f"set nacc{family}-to-pod-" in line and "has lost elements" in line for line in found)
    assert datapath.verify() == []
    assert set(epochs(after)) == set(before)
    assert not set(epochs(after).values()) & set(before.values())
    assert counted(after) == {(tx(family, "internet"), pack(POD[family])): sent}


def test_a_flushed_dynamic_set_gets_its_leases_back(datapath: IptablesDatapath) -> None:
    """Addresses that were added by lease are in a dynamic set again after it was flushed and repaired."""
    datapath.install(plan(local=("10.244.0.0/16",)))
    datapath.add([pack(POD[4])])
    sh("ipset flush nacc4-tx-internet")
    datapath.install(plan(local=("10.244.0.0/16",)))

    (reading,) = [reading for reading in datapath.read().readings if reading.key == tx(4, "internet")]
    assert reading.counts == {pack(POD[4]): (0, 0)}


def test_a_foreign_set_under_our_name_is_replaced(datapath: IptablesDatapath) -> None:
    """A set of another type that somebody made under one of our names does not stop us."""
    sh("ipset create nacc4-tx-pod hash:net", "ipset create nacc6-rx-pod hash:ip family inet6")
    sh("ipset create nacc4-rx-pod hash:ip", "ipset create nacc4-rx-node bitmap:ip range 10.0.0.0-10.0.0.9 counters")
    datapath.install(plan())

    assert datapath.verify() == []
    for name in ("nacc4-tx-pod", "nacc4-rx-pod", "nacc4-rx-node"):
        assert "Type: bitmap:ip\n" in sh(f"ipset list -t {name}")
        assert "range 10.244.1.0-10.244.1.16 counters" in sh(f"ipset list -t {name}")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_others_in_any_encoding_are_no_obstacle(
    datapath: IptablesDatapath, family: Family, tmp_path: Path
) -> None:
    """A foreign chain whose name is Latin-1 or UTF-8 is looked into, named in words, and left as it is."""
    tool, file = "iptables-legacy" if family == 4 else "ip6tables-legacy", tmp_path / "rules"

    def restore(*lines: str) -> None:
        text = "\n".join(["*mangle", *lines, "COMMIT", ""])
        file.write_bytes(text.encode("utf-8").replace(b"LATIN", b"caf\xe9"))
        sh(f"{tool}-restore --noflush {file}")

    restore(":LATIN -", ":café -", "-A LATIN -j MARK --set-mark 5", "-A café -j DROP")
    datapath.install(plan())
    restore("-I FORWARD -j LATIN", "-I FORWARD -j café")
    found = datapath.verify()
    datapath.install(plan())
    repaired = datapath.verify()
    restore("-A LATIN -j DROP", "-I FORWARD -j LATIN")
    datapath.position.forget()
    hidden = datapath.verify()
    datapath.remove()

    where = f"IPv{family}: hook FORWARD: our rules are behind rule 1"
    assert found == [f"{where} (-j café), which can end traversal"]
    assert repaired == []
    assert hidden == [f"{where} (-j caf\\xe9), which can end traversal"]
    assert sh(f"{tool} -t mangle -S | grep -ac caf").strip() == "8"


def test_a_spare_name_that_is_in_use_is_named(datapath: IptablesDatapath) -> None:
    """Where a foreign rule refers to the name that a set needs to be made anew, the error says what is in the way."""
    sh("ipset create nacc4-tx-pod hash:ip", "ipset create nacc4+tx-pod hash:ip")
    iptables(4, "-A FORWARD -m set --match-set nacc4+tx-pod src")
    with pytest.raises(DatapathError, match=r"set nacc4\+tx-pod is in the way: somebody's rules refer to it"):
        datapath.install(plan())
    iptables(4, "-F FORWARD")
    datapath.install(plan())
    assert datapath.verify() == []


@pytest.mark.parametrize("how", ["timeout 300", "forceadd"])
def test_a_set_that_forgets_elements_is_replaced(datapath: IptablesDatapath, how: str) -> None:
    """A set under our name whose elements expire, or make room for others, is not counted in; what it has is kept."""
    wide = plan(local=("10.244.0.0/16",))
    sh(f"ipset create nacc4-tx-internet hash:ip counters hashsize 32768 maxelem 70000 {how}")
    sh(f"ipset add nacc4-tx-internet {POD[4]} packets 2 bytes 256")
    kept = datapath.install(wide)

    assert counted(kept) == {(tx(4, "internet"), pack(POD[4])): Count(256, 2)}
    assert datapath.verify() == []
    assert how.partition(" ")[0] not in sh("ipset list -t nacc4-tx-internet")


def test_a_set_that_packets_filled_after_a_flush_is_handed_over(datapath: IptablesDatapath) -> None:
    """A full set that lost its sentinel stops neither install nor remove; its values are the same at each reading."""
    addresses = ["10.244.1.200", "10.244.1.201", "10.244.1.202"]
    sh("ipset create nacc4-tx-pod hash:ip counters maxelem 3", "ipset create nacc4+rx-pod hash:ip counters maxelem 3")
    for name in ("nacc4-tx-pod", "nacc4+rx-pod"):
        sh(*(f"ipset add {name} {ip} packets 1 bytes {100 + at}" for at, ip in enumerate(addresses)))
    failed: list[Snapshot] = []

    def fail(snapshot: Snapshot) -> None:
        failed.append(snapshot)
        raise OSError

    with pytest.raises(OSError):  # noqa: PT011  # an agent that ends before its books are stored
        datapath.install(plan(), fail)
    kept = datapath.install(plan())
    removed = datapath.remove()

    assert [(found.epoch, found.counts) for found in failed[0].readings] == [
        (found.epoch, found.counts) for found in kept.readings if found.key.direction is Direction.RECEIVE
    ]
    assert sorted(octets for octets, _ in counted(kept).values()) == [100, 100, 101, 101, 102, 102]
    assert removed.readings == ()
    assert sh("ipset list -n") == ""


@pytest.mark.parametrize("name", ["nacc4-to-internet", "nacc6-hi-node", "nacc4-ho", "nacc4-to-my-long-class"])
def test_a_set_with_our_name_but_no_epoch_is_taken_away(datapath: IptablesDatapath, name: str) -> None:
    """What somebody restored from `rules show`, without an epoch, is found left over and goes at once."""
    kind = "bitmap:ip range 0.0.0.0/0 netmask 1" if "4" in name else "hash:net family inet6"
    datapath.install(plan())
    sh(f"ipset create {name} {kind} counters")
    found = datapath.verify()
    datapath.install(plan())
    repaired = datapath.verify()
    sh(f"ipset create {name} {kind} counters")
    datapath.remove()

    assert found == [f"set {name} is left over"]
    assert repaired == []
    assert sh("ipset list -n") == ""


def test_a_chain_that_others_lead_to_stays_empty(datapath: IptablesDatapath) -> None:
    """Where a foreign chain leads into ours, `remove` says so, and the foreign rule stays as it is."""
    datapath.install(plan())
    iptables(4, "-N OTHERS", "-A OTHERS -j NETACCT-TX-storage")
    datapath.install(plan(storage=False))
    leftover = datapath.verify()
    with pytest.raises(DatapathError, match="NETACCT-TX-storage"):
        datapath.remove()

    assert leftover == ["IPv4: chain NETACCT-TX-storage is left over"]
    assert table(4).count("NETACCT") == 2
    assert "-A OTHERS -j NETACCT-TX-storage" in table(4)


def test_a_set_that_others_use_keeps_its_values(node: Node, datapath: IptablesDatapath) -> None:
    """A retired set that a foreign rule refers to is neither destroyed nor handed over, so nothing counts twice."""
    datapath.install(plan())
    node.send(4, (node.pod, POD[4]), (node.peer, support.STORAGE[4]), 3, 100)
    iptables(4, "-A INPUT -m set --match-set nacc4-tx-storage src")
    returned = datapath.install(plan(storage=False))

    assert returned.readings == ()
    assert datapath.verify() == ["set nacc4-tx-storage is left over"]


def test_a_chain_of_others_that_leads_into_ours_is_told(node: Node, datapath: IptablesDatapath) -> None:
    """What counts twice because somebody renamed a chain of ours, or jumps to one, is a difference until they stop."""
    datapath.install(plan())
    iptables(4, "-E NETACCT-TX THEIRS")
    iptables(6, "-N THEIRS", "-A THEIRS -j NETACCT-RX", "-A POSTROUTING -j THEIRS")
    datapath.install(plan())
    sent = node.send(4, (node.pod, POD[4]), (node.peer, PEER[4]), 1, 100)
    counts = counted(datapath.read())
    found = datapath.verify()
    iptables(4, "-D FORWARD -s 10.244.1.0/28 -j THEIRS", "-D INPUT -s 10.244.1.0/28 ! -i lo -j THEIRS")
    iptables(4, "-F THEIRS", "-X THEIRS")
    iptables(6, "-F THEIRS")

    assert counts == {(tx(4, "internet"), pack(POD[4])): Count(2 * sent.bytes, 2 * sent.packets)}
    assert [line for line in found if "IPv6" in line] == ["IPv6: chain NETACCT-RX: a rule that is not ours leads there"]
    assert [line for line in found if "IPv4" in line]
    assert all("IPv4: chain NETACCT-TX" in line or "IPv6" in line for line in found)
    assert datapath.verify() == []


HOLDER = 'exec 9>"$XTABLES_LOCKFILE" && flock 9 && echo held && exec cat'


@pytest.mark.usefixtures("netns")
def test_the_lock_is_waited_for_and_its_holder_named() -> None:
    """While somebody holds the xtables lock, an install gives up in time, names the holder, and changes no rule."""
    with subprocess.Popen(["sh", "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin
        assert holder.stdout
        holder.stdout.readline()
        with closing(IptablesDatapath(patience=0.2)) as datapath:
            with pytest.raises(LockTimeoutError, match=r"xtables\.lock is held by process \d+ for over 0\.2 s"):
                datapath.install(plan())
            assert "IPv4: table mangle is missing" in datapath.verify()
            holder.stdin.close()
            holder.wait(support.PATIENCE)
            datapath.install(plan())
            assert datapath.verify() == []


def test_writers_that_take_the_lock_lose_nothing(node: Node, datapath: IptablesDatapath) -> None:
    """While another program adds and deletes rules of its own, installs neither undo its changes nor lose ours."""
    iptables(4, "-N BUSY")
    done = threading.Event()
    rounds = 40

    def write() -> None:
        for number in range(rounds):
            iptables(4, f"-A BUSY -m mark --mark {number}")
            if number % 2:
                iptables(4, f"-D BUSY -m mark --mark {number}")
        done.set()

    writer = threading.Thread(target=node.netns.run, args=(write,))
    writer.start()
    storage = True
    while not done.is_set():
        storage = not storage
        datapath.install(plan(storage=storage))
    writer.join()
    datapath.install(plan())

    marks = [line.split()[-1] for line in table(4).splitlines() if "-A BUSY" in line]
    assert marks == [hex(number) for number in range(0, rounds, 2)]
    assert datapath.verify() == []


CHILD = """
import pickle, sys
from support import plan
from netacct.kernel.iptables import IptablesDatapath

def keep(snapshot):
    with open(sys.argv[1], "ab") as books:
        pickle.dump(snapshot, books)

datapath = IptablesDatapath()
print("ready", flush=True)
sys.stdin.readline()
while True:
    datapath.install(plan(storage=False, local=("10.244.1.0/29", "10.244.1.8/29")), keep)
    datapath.install(plan(), keep)
    datapath.remove(keep)
"""


def killed_agent(books: Path, seconds: float) -> None:
    """Let a child install and remove over and over, and kill it after so many seconds."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(books)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(support.__file__).parent,
    ) as child:
        try:
            assert child.stdin
            assert child.stdout
            assert child.stdout.readline() == b"ready\n"
            child.stdin.write(b"\n")
            child.stdin.flush()
            time.sleep(seconds)
        finally:
            child.kill()


def kept(books: Path) -> Iterator[Snapshot]:
    """The snapshots in a child's books; one that it was killed over is cut off, and was not kept."""
    if books.exists():
        with books.open("rb") as file, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                yield pickle.load(file)  # noqa: S301  # written by our own child


def test_a_kill_at_any_point_loses_and_doubles_nothing(node: Node, tmp_path: Path) -> None:
    """After an agent was killed anywhere in install or remove, the next install converges with every byte booked."""
    booked: dict[tuple[CounterKey, int], Count] = {}
    total = Count(0, 0)
    books, ip = tmp_path / "books", pack(POD[4])
    for _ in range(12):
        with closing(IptablesDatapath()) as datapath:
            snapshots = [*kept(books), datapath.install(plan())]
            total = total.plus(node.send(4, (node.pod, POD[4]), (node.peer, support.STORAGE[4]), 3, 100))
            snapshots.append(datapath.read())
            assert datapath.verify() == []
        for snapshot in snapshots:
            assert not snapshot.unreadable
            for reading in snapshot.readings:
                if reading.key.scope is Scope.POD and ip in reading.counts:
                    booked[reading.key, reading.epoch] = Count(*reading.counts[ip])
        assert table(4).count("-A FORWARD -s") == 1
        assert "+" not in sh("ipset list -n")
        assert functools.reduce(Count.plus, booked.values()) == total
        killed_agent(books, random.uniform(0.0, 0.25))
