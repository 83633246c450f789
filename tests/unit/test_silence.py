"""When an address has been without lease and packet for long enough."""

from __future__ import annotations

from netacct.model import Address, CounterKey, Direction, Reading, Scope, Snapshot, cgroup_key, pack
from netacct.silence import Silence

A, B, PREFILLED = pack("192.0.2.1"), pack("192.0.2.2"), pack("10.0.0.1")


def reading(at: float, **octets: dict[Address, int]) -> Snapshot:
    """A snapshot of pod counters, by class."""
    return Snapshot(
        at,
        tuple(
            Reading(CounterKey(4, Scope.POD, Direction.TRANSMIT, traffic), 1, {ip: (n, n) for ip, n in counts.items()})
            for traffic, counts in octets.items()
        ),
    )


def test_it_begins_with_the_first_of_equal_readings() -> None:
    """An address is silent since the first reading with the counters that it still has."""
    silence = Silence()
    silence.look(reading(10, internet={A: 1, B: 1}), (), ())
    silence.look(reading(20, internet={A: 2, B: 1}), (), ())
    silence.look(reading(30, internet={A: 2, B: 1}), (), ())
    assert silence.silent_since(10) == [B]
    assert set(silence.silent_since(20)) == {A, B}


def test_one_reading_is_not_enough() -> None:
    """An address that was just released, and not read since, is not silent."""
    silence = Silence()
    silence.released([A], 10)
    assert silence.silent_since(1000) == []
    assert silence.addresses == {A}


def test_a_lease_ends_it() -> None:
    """An address with a lease is not looked at, and begins anew when it is released again."""
    silence = Silence()
    silence.look(reading(10, internet={A: 1}), (), ())
    silence.look(reading(20, internet={A: 1}), (), {A})
    assert silence.addresses == set()
    silence.look(reading(30, internet={A: 1}), (), ())
    assert silence.silent_since(20) == []


def test_prefilled_addresses_keep_their_counters() -> None:
    """A prefilled address is looked at only when it was named: it may be one that joined with a lease."""
    silence = Silence()
    silence.look(reading(10, internet={PREFILLED: 1, A: 1}), {PREFILLED, A}, ())
    assert silence.addresses == set()
    silence.released([A], 10)
    silence.look(reading(20, internet={PREFILLED: 1, A: 1}), {PREFILLED, A}, ())
    assert silence.addresses == {A}


def test_a_set_that_could_not_be_read_proves_nothing() -> None:
    """Readings that lack a set, or have it again, are not equal to those before."""
    silence = Silence()
    silence.look(reading(10, internet={A: 1}, storage={A: 1}), (), ())
    silence.look(reading(20, internet={A: 1}), (), ())
    silence.look(reading(30, internet={A: 1}, storage={A: 1}), (), ())
    assert silence.silent_since(20) == []
    assert silence.silent_since(30) == [A]


def test_cgroups_of_host_pods_are_looked_at_like_addresses() -> None:
    """A cgroup without a lease whose counters stand still may lose them."""
    silence, cgroup = Silence(), cgroup_key(7)
    for at in (10, 20):
        key = CounterKey(6, Scope.HOST_POD, Direction.TRANSMIT, "internet")
        silence.look(Snapshot(at, (Reading(key, 1, {cgroup: (5, 1)}),)), (), ())
    assert silence.silent_since(10) == [cgroup]
