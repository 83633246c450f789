"""The fake's own means of counting, which the contract suite does not cover."""

from __future__ import annotations

import ipaddress

import pytest

from netacct.kernel.fake import FakeDatapath, FakeKernel
from netacct.kernel.plan import FamilyPlan, Plan
from netacct.model import WHOLE, CounterKey, Direction, Scope, cgroup_key, pack
from netacct.policy import Tunnel

POD = pack("10.244.1.10")
KEY = CounterKey(4, Scope.POD, Direction.TRANSMIT, "internet")
REST = KEY._replace(scope=Scope.REST)


@pytest.fixture
def kernel() -> FakeKernel:
    """A kernel with one prefilled pod address."""
    net = ipaddress.ip_network("10.244.1.10/32")
    family = FamilyPlan(4, (net,), (), (POD,), (), ipaddress.ip_network("127.0.0.0/8"), ())
    made = FakeKernel()
    FakeDatapath(made).install(Plan("p", "h", ("node", "internet"), "internet", Tunnel(), None, (family,)))
    return made


def test_counts_add_up(kernel: FakeKernel) -> None:
    """Counting twice at an address gives the sum."""
    kernel.count(KEY, POD, 100)
    kernel.count(KEY, POD, 50, 2)

    assert kernel.sets[KEY].counts == {POD: (150, 3)}


def test_an_address_without_a_counter_counts_as_rest(kernel: FakeKernel) -> None:
    """What has no counter of its own lands in the rest counter of its class."""
    kernel.count(KEY, pack("10.244.1.11"), 100)

    assert kernel.sets[KEY].counts == {POD: (0, 0)}
    assert kernel.sets[REST].counts == {WHOLE: (100, 1)}


def test_a_flushed_catch_all_counts_nothing(kernel: FakeKernel) -> None:
    """Packets that meet a flushed catch-all are counted nowhere, as in the kernel."""
    kernel.flush(REST)
    kernel.count(REST, WHOLE, 100)

    assert kernel.sets[REST].counts == {}


def test_host_pods_have_counters_where_they_are_told_apart() -> None:
    """A cgroup that is added counts in its own counter, another one with the host; dropping it gives its last value."""
    family = FamilyPlan(4, (), (), (), (), ipaddress.ip_network("127.0.0.0/8"), ())
    kernel, key, cgroup = FakeKernel(), KEY._replace(scope=Scope.HOST_POD), cgroup_key(7)
    datapath = FakeDatapath(kernel)
    datapath.install(Plan("p", "h", ("internet",), "internet", Tunnel(), None, (family,), host_pods=(2,)))
    datapath.add([cgroup])
    kernel.count(key, cgroup, 100)
    kernel.count(key, cgroup_key(8), 50)
    assert kernel.sets[KEY._replace(scope=Scope.HOST)].counts == {WHOLE: (50, 1)}
    (dropped,) = [reading for reading in datapath.discard([cgroup]).readings if any(map(any, reading.counts.values()))]
    assert (dropped.key, dropped.counts) == (key, {cgroup: (100, 1)})
