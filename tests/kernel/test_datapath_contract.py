"""The contract of `Datapath`, for each datapath that there is: the fake everywhere, the real ones in a namespace.

Counters are set from outside, as if packets had been counted, so that one text serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import nftlab
import pytest
import support
from support import OTHER_POD, POD, counted, epochs, key, plan, rx, tx

from netacct.errors import DatapathError
from netacct.kernel.base import Datapath
from netacct.kernel.counters import set_names
from netacct.kernel.fake import FakeDatapath, FakeKernel
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.nftables import NftablesDatapath
from netacct.kernel.setmaker import key_of
from netacct.model import WHOLE, Address, CounterKey, Direction, Scope, Snapshot, pack, unpack

WIDE = ("10.244.0.0/16", "fd00:10:244:1::/64")
LEASED, STRANGER = pack("10.244.9.9"), pack("fd00:10:244:1::99")
HOST = key(4, Scope.HOST, Direction.RECEIVE, "tunnel")


class Lab(Protocol):
    """One kernel, on which agents come and go."""

    def agent(self) -> Datapath:
        """A new agent's datapath."""
        ...

    def count(self, one: CounterKey, ip: Address, octets: int, packets: int) -> None:
        """Let a counter be at so many bytes and packets."""
        ...

    def flush(self, one: CounterKey) -> None:
        """Flush a set, as somebody else might."""
        ...


class FakeLab:
    """The fake's kernel."""

    def __init__(self) -> None:
        self._kernel = FakeKernel()

    def agent(self) -> Datapath:
        """See `Lab`."""
        return FakeDatapath(self._kernel)

    def count(self, one: CounterKey, ip: Address, octets: int, packets: int) -> None:
        """See `Lab`."""
        octets_now, packets_now = self._kernel.sets[one].counts[ip]
        self._kernel.count(one, ip, octets - octets_now, packets - packets_now)

    def flush(self, one: CounterKey) -> None:
        """See `Lab`."""
        self._kernel.flush(one)


@dataclass
class IptablesLab:
    """The real kernel, in the thread's namespace."""

    made: list[IptablesDatapath]

    def agent(self) -> Datapath:
        """See `Lab`."""
        self.made.append(IptablesDatapath())
        return self.made[-1]

    def count(self, one: CounterKey, ip: Address, octets: int, packets: int) -> None:
        """See `Lab`. Without a counter clause `-exist` would keep the counters; with one it sets them."""
        element = unpack(ip) if ip else ("0.0.0.0" if one.family == 4 else "::/1")  # noqa: S104  # the first half
        support.sh(f"ipset -exist add {self._name(one)} {element} packets {packets} bytes {octets}")

    def flush(self, one: CounterKey) -> None:
        """See `Lab`."""
        support.sh(f"ipset flush {self._name(one)}")

    @staticmethod
    def _name(one: CounterKey) -> str:
        (name,) = [name for name in set_names() if key_of(name) == one]
        return name


@dataclass
class NftablesLab:
    """The real kernel, in the thread's namespace. A new agent finds tables whose owner has gone, as after a restart."""

    made: list[NftablesDatapath]

    def agent(self) -> Datapath:
        """See `Lab`."""
        for earlier in self.made:
            earlier.release()
        self.made.append(NftablesDatapath())
        return self.made[-1]

    def count(self, one: CounterKey, ip: Address, octets: int, packets: int) -> None:
        """See `Lab`."""
        nftlab.set_count(self.made[-1], one, ip, octets, packets)

    def flush(self, one: CounterKey) -> None:
        """See `Lab`."""
        nftlab.flush(self.made[-1], one)


@pytest.fixture
def fake_lab() -> Lab:
    """The fake."""
    return FakeLab()


@pytest.fixture
def iptables_lab(netns: support.Netns) -> Iterator[Lab]:
    """The iptables datapath, in a namespace of the test's own."""
    assert netns.run(set_names) == []
    lab = IptablesLab([])
    yield lab
    for made in lab.made:
        made.close()


@pytest.fixture
def nftables_lab(netns: support.Netns) -> Iterator[Lab]:
    """The nftables datapath, in a namespace of the test's own."""
    assert netns.sh("nft list tables") == ""
    lab = NftablesLab([])
    yield lab
    for made in lab.made:
        made.close()


@pytest.fixture(
    params=[
        "fake_lab",
        pytest.param("iptables_lab", marks=pytest.mark.kernel),
        pytest.param("nftables_lab", marks=pytest.mark.kernel),
    ],
    ids=["fake", "iptables", "nftables"],
)
def lab(request: pytest.FixtureRequest) -> Lab:
    """Each of the labs."""
    found: Lab = request.getfixturevalue(request.param)
    return found


def test_a_new_installation_reads_as_zero(lab: Lab) -> None:
    """After the first install every counter of the plan is there, at zero, each set with an epoch of its own."""
    datapath = lab.agent()
    returned = datapath.install(plan())
    snapshot = datapath.read()

    assert (returned.readings, snapshot.unreadable, counted(snapshot)) == ((), (), {})
    assert len(set(epochs(snapshot).values())) == len(snapshot.readings)
    assert {tx(4, "internet"), rx(6, "storage"), HOST} <= epochs(snapshot).keys()
    assert all(epochs(snapshot).values())
    (reading,) = [reading for reading in snapshot.readings if reading.key == tx(4, "pod")]
    assert set(reading.counts) == set(plan().families[0].prefilled)
    assert datapath.verify() == []


def test_installing_twice_is_installing_once(lab: Lab) -> None:
    """A second install of the same plan drops nothing, keeps every count and epoch, and calls nobody."""
    datapath = lab.agent()
    datapath.install(plan())
    lab.count(tx(4, "pod"), pack(POD[4]), 1000, 10)
    lab.count(HOST, WHOLE, 500, 5)
    before = datapath.read()
    kept: list[Snapshot] = []
    returned = datapath.install(plan(), kept.append)
    after = datapath.read()

    assert (kept, returned.readings) == ([], ())
    assert after.readings == before.readings
    assert counted(after) == {(tx(4, "pod"), pack(POD[4])): (1000, 10), (HOST, WHOLE): (500, 5)}


def test_a_restarted_agent_adopts_counters_with_their_epochs(lab: Lab) -> None:
    """An agent that installs over what an earlier one left reads the same values and epochs."""
    first = lab.agent()
    first.install(plan())
    lab.count(rx(6, "internet"), pack(POD[6]), 1234, 12)
    before = first.read()
    second = lab.agent()
    second.install(plan())

    assert second.read().readings == before.readings


def test_adopting_writes_nothing_and_sees_everything(lab: Lab) -> None:
    """An adopted plan reads and verifies like an installed one where it is there, and as missing where it is not."""
    observer = lab.agent()
    observer.adopt(plan())
    missing, unreadable = observer.verify(), observer.read().unreadable
    still_missing = observer.verify()
    first = lab.agent()
    first.install(plan())
    observer.adopt(plan())

    assert missing == still_missing != []
    assert set(unreadable) == epochs(first.read()).keys()
    assert observer.verify() == []
    assert observer.read().readings == first.read().readings


def test_nothing_works_before_an_install(lab: Lab) -> None:
    """Verifying, reading and adding without a plan are errors that say so."""
    datapath = lab.agent()
    for attempt in (datapath.verify, datapath.read, lambda: datapath.add([LEASED])):
        with pytest.raises(DatapathError, match="nothing is installed"):
            attempt()


def test_a_retired_class_is_kept_before_it_is_gone(lab: Lab) -> None:
    """What a new plan lacks is handed to `keep` with its epoch, while it still exists, and then no longer read."""
    datapath = lab.agent()
    datapath.install(plan())
    lab.count(tx(4, "storage"), pack(POD[4]), 300, 3)
    lab.count(tx(4, "pod"), pack(POD[4]), 100, 1)
    before = epochs(datapath.read())
    kept: list[Snapshot] = []
    returned = datapath.install(plan(storage=False), kept.append)
    after = datapath.read()

    assert kept == [returned]
    assert counted(returned) == {(tx(4, "storage"), pack(POD[4])): (300, 3)}
    assert epochs(returned) == {tx(4, "storage"): before[tx(4, "storage")]}
    assert counted(after) == {(tx(4, "pod"), pack(POD[4])): (100, 1)}
    assert tx(4, "storage") not in epochs(after)


def test_what_could_not_be_kept_is_not_destroyed(lab: Lab) -> None:
    """Where `keep` fails, the counters stay, and the next install hands the same values over with the same epoch."""

    def full_disk(_: Snapshot) -> None:
        raise OSError("no space left on device")

    datapath = lab.agent()
    datapath.install(plan())
    lab.count(tx(4, "storage"), pack(POD[4]), 300, 3)
    before = epochs(datapath.read())
    with pytest.raises(OSError, match="no space"):
        datapath.install(plan(storage=False), full_disk)
    returned = lab.agent().install(plan(storage=False))

    assert counted(returned) == {(tx(4, "storage"), pack(POD[4])): (300, 3)}
    assert epochs(returned) == {tx(4, "storage"): before[tx(4, "storage")]}


def test_a_class_that_returns_begins_a_new_epoch(lab: Lab) -> None:
    """A class that was retired and is back counts from zero, under another epoch."""
    datapath = lab.agent()
    datapath.install(plan())
    lab.count(tx(4, "storage"), pack(POD[4]), 300, 3)
    before = epochs(datapath.read())
    datapath.install(plan(storage=False))
    datapath.install(plan())
    after = datapath.read()

    assert counted(after) == {}
    assert epochs(after)[tx(4, "storage")] != before[tx(4, "storage")]
    assert epochs(after)[tx(4, "pod")] == before[tx(4, "pod")]


def test_a_family_that_leaves_the_plan_is_dropped_whole(lab: Lab) -> None:
    """Where a plan's local range loses a family, that family's pod counters are handed over."""
    datapath = lab.agent()
    datapath.install(plan())
    lab.count(tx(6, "internet"), pack(POD[6]), 700, 7)
    returned = datapath.install(plan(local=(support.LOCAL[4],)))

    assert counted(returned) == {(tx(6, "internet"), pack(POD[6])): (700, 7)}
    assert datapath.verify() == []


def test_adding_is_idempotent_and_keeps_counts(lab: Lab) -> None:
    """Added addresses have counters at zero; adding them again, or prefilled ones, leaves counts as they are."""
    datapath = lab.agent()
    datapath.install(plan(local=WIDE))
    datapath.add([LEASED, STRANGER])
    lab.count(tx(4, "pod"), LEASED, 100, 1)
    datapath.add([LEASED])
    by_key = {reading.key: reading.counts for reading in datapath.read().readings}

    assert dict(by_key[tx(4, "pod")]) == {LEASED: (100, 1)}
    assert dict(by_key[rx(6, "internet")]) == {STRANGER: (0, 0)}


def test_discarding_hands_over_and_forgets(lab: Lab) -> None:
    """Discarded addresses are handed to `keep` and no longer read; unknown and prefilled ones are left alone."""
    datapath = lab.agent()
    datapath.install(plan(local=("10.244.0.0/16", support.LOCAL[6])))
    datapath.add([LEASED, pack("10.244.9.10")])
    lab.count(tx(4, "pod"), LEASED, 100, 1)
    lab.count(tx(6, "pod"), pack(OTHER_POD[6]), 200, 2)
    kept: list[Snapshot] = []
    returned = datapath.discard([LEASED, pack("10.244.9.11"), pack(OTHER_POD[6])], kept.append)
    nothing = datapath.discard([LEASED], kept.append)

    assert kept == [returned]
    assert nothing.readings == ()
    assert counted(returned) == {(tx(4, "pod"), LEASED): (100, 1)}
    assert counted(datapath.read()) == {(tx(6, "pod"), pack(OTHER_POD[6])): (200, 2)}
    assert datapath.verify() == []


@pytest.mark.parametrize("one", [tx(4, "pod"), rx(6, "internet"), HOST], ids=["v4 pods", "v6 pods", "host"])
def test_a_flushed_set_is_unreadable_until_repaired(lab: Lab, one: CounterKey) -> None:
    """A flushed set is reported, not read as zero; repaired, it has a new epoch and all others keep theirs."""
    datapath = lab.agent()
    datapath.install(plan())
    before = epochs(datapath.read())
    lab.flush(one)
    broken, found = datapath.read(), datapath.verify()
    datapath.install(plan())
    after = epochs(datapath.read())

    assert broken.unreadable == (one,)
    assert found
    assert datapath.verify() == []
    assert after.pop(one) != before.pop(one)
    assert after == before


def test_removing_hands_everything_over(lab: Lab) -> None:
    """`remove`, also by an agent that installed nothing, hands the last values over and leaves nothing to remove."""
    lab.agent().install(plan())
    lab.count(tx(4, "pod"), pack(POD[4]), 100, 1)
    lab.count(HOST, WHOLE, 500, 5)
    datapath = lab.agent()
    kept: list[Snapshot] = []
    removed = datapath.remove(kept.append)
    again = datapath.remove(kept.append)

    assert kept == [removed]
    assert counted(removed) == {(tx(4, "pod"), pack(POD[4])): (100, 1), (HOST, WHOLE): (500, 5)}
    assert again.readings == ()


def test_readings_carry_the_time_before_them(lab: Lab) -> None:
    """Each snapshot's time is on the boot clock, and later ones are later."""
    datapath = lab.agent()
    datapath.install(plan())
    one, two = datapath.read(), datapath.read()

    assert 0 < one.at < two.at
