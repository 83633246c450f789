"""The ledger's decisions, one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from netacct.accounting import ledger as ledger_module
from netacct.accounting.ledger import Ledger
from netacct.accounting.series import OTHER, Limits
from netacct.model import (
    UNBOUNDED,
    WHOLE,
    Address,
    Count,
    CounterKey,
    Direction,
    Lease,
    Level,
    Pod,
    Reading,
    Scope,
    SeriesKey,
    Snapshot,
    cgroup_key,
    pack,
)

IP = pack("10.0.0.1")
IN = CounterKey(4, Scope.POD, Direction.RECEIVE, "internet")
OUT = CounterKey(4, Scope.POD, Direction.TRANSMIT, "pod")
A = Pod("team-a", "train-0", "uid-a", "Job", "train")
B = Pod("team-b", "serve-0", "uid-b")


def snap(at: float, held: Mapping[CounterKey, Mapping[Address, tuple[int, int]]], epoch: int = 7) -> Snapshot:
    """A snapshot of some sets, all of one epoch."""
    return Snapshot(at, tuple(Reading(key, epoch, counts) for key, counts in held.items()))


def one(at: float, byte_count: int, packets: int = 1, epoch: int = 7) -> Snapshot:
    """A snapshot of one counter."""
    return snap(at, {IN: {IP: (byte_count, packets)}}, epoch)


def lease(pod: Pod, created: float, opened: float, closed: float | None = None, ip: Address = IP) -> Lease:
    """A lease of `pod`."""
    return Lease(ip, pod, f"box-{pod.uid}", created, opened, closed)


def total(ledger: Ledger, level: Level, *labels: str, key: CounterKey = IN) -> int:
    """The bytes of one series, 0 where there is none."""
    return ledger.totals.get(SeriesKey(level, labels, key.direction, key.traffic), Count(0, 0)).bytes


def unattributed(ledger: Ledger) -> int:
    """The unattributed bytes that came in from the internet."""
    return total(ledger, Level.UNATTRIBUTED)


@pytest.fixture
def ledger() -> Ledger:
    """A ledger that began at time 10 with a counter of 100 bytes."""
    begun = Ledger(late_binding=120.0)
    begun.baseline(one(10.0, 100), 10.0)
    return begun


def test_baseline_books_nothing_and_the_next_reading_only_its_growth(ledger: Ledger) -> None:
    """Counting begins at the kernel's present values."""
    assert not ledger.totals
    ledger.settle(one(20.0, 150), [lease(A, 5.0, 6.0)], 20.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 50
    assert total(ledger, Level.WORKLOAD, "team-a", "Job", "train") == 50
    assert total(ledger, Level.NAMESPACE, "team-a") == 50


def test_a_pod_without_a_workload_has_no_workload_series(ledger: Ledger) -> None:
    """A bare pod is summed in its namespace, and in no workload."""
    ledger.settle(one(20.0, 150), [lease(B, 5.0, 6.0)], 20.0)
    assert {key.level for key in ledger.totals} == {Level.POD, Level.NAMESPACE}


def test_both_families_of_a_pod_make_one_total(ledger: Ledger) -> None:
    """A dual-stack pod's IPv4 and IPv6 bytes go to the same series."""
    six = pack("fd00::1")
    key = CounterKey(6, Scope.POD, Direction.RECEIVE, "internet")
    both = snap(20.0, {IN: {IP: (130, 2)}, key: {six: (1000, 5)}})
    ledger.settle(both, [lease(A, 5.0, 6.0), lease(A, 5.0, 6.0, ip=six)], 20.0)
    assert ledger.totals[SeriesKey(Level.POD, ("team-a", "train-0"), *IN[2:])] == Count(1030, 6)


def test_rest_and_host_counters_go_to_levels_of_their_own(ledger: Ledger) -> None:
    """What found no room is unattributed, and the host's own is the host's, the tunnel class included."""
    rest = CounterKey(4, Scope.REST, Direction.RECEIVE, "internet")
    host = CounterKey(4, Scope.HOST, Direction.RECEIVE, "tunnel")
    ledger.settle(snap(20.0, {rest: {WHOLE: (11, 1)}, host: {WHOLE: (22, 1)}}), [], 20.0)
    assert unattributed(ledger) == 11
    assert total(ledger, Level.HOST, key=host) == 22


def test_a_lease_over_a_part_of_the_interval_gets_all_of_it_when_alone(ledger: Ledger) -> None:
    """A lease that opened in the middle of the interval, and closed before its end, gets the whole."""
    ledger.settle(one(20.0, 150), [lease(A, 12.0, 13.0, closed=18.0)], 20.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 50
    assert ledger.ambiguous_bytes == 0


@pytest.mark.parametrize(
    ("left", "made", "name"),
    [(14.0, 14.0, "serve-0"), (16.0, 16.0, "train-0"), (12.0, 18.0, "serve-0"), (12.0, 18.5, "train-0")],
)
def test_two_leases_in_one_interval_give_all_to_the_longer_and_say_so(
    ledger: Ledger, left: float, made: float, name: str
) -> None:
    """Where two pods held the address between two readings, the longer tenure gets the bytes, which are ambiguous."""
    ledger.settle(one(20.0, 150), [lease(B, made, 20.0), lease(A, 5.0, 6.0, closed=left)], 20.0)
    assert total(ledger, Level.POD, "team-a" if name == "train-0" else "team-b", name) == 50
    assert ledger.ambiguous_bytes == 50


def test_a_pod_that_left_before_the_interval_has_no_part_in_it(ledger: Ledger) -> None:
    """An heir that was made before the last reading, but known after it, gets the bytes of an interval of its own."""
    ledger.settle(one(20.0, 150), [lease(B, 9.5, 20.0), lease(A, 5.0, 6.0, closed=9.0)], 20.0)
    assert total(ledger, Level.POD, "team-b", "serve-0") == 50
    assert ledger.ambiguous_bytes == 0


def test_bytes_may_go_to_a_pod_that_started_long_before_its_sandbox(ledger: Ledger) -> None:
    """Where only the pod's start is known, it may lie before the address was released by another."""
    ledger.settle(one(12.0, 100), [lease(A, 5.0, 6.0, closed=12.0)], 12.0)
    ledger.settle(one(14.0, 150), [], 14.0)
    ledger.settle(one(15.0, 150), [dataclasses.replace(lease(B, 11.0, 15.0), sandbox="")], 15.0)
    assert total(ledger, Level.POD, "team-b", "serve-0") == 50


def test_two_sandboxes_of_one_pod_are_not_ambiguous(ledger: Ledger) -> None:
    """A pod whose sandbox was made anew gets its bytes either way."""
    ledger.settle(one(20.0, 150), [lease(A, 15.0, 16.0), lease(A, 5.0, 6.0, closed=16.0)], 20.0)
    assert ledger.ambiguous_bytes == 0


def test_bytes_wait_for_a_sandbox_that_can_have_sent_them(ledger: Ledger) -> None:
    """What nobody held is bound to a pod seen later whose sandbox was there before the interval's end."""
    ledger.settle(one(20.0, 150), [], 20.0)
    assert ledger.pending() == {(Direction.RECEIVE, "internet"): Count(50, 0)}
    ledger.settle(one(30.0, 150), [lease(A, 19.0, 25.0)], 30.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 50
    assert not ledger.pending()


def test_bytes_do_not_go_to_a_sandbox_made_after_them(ledger: Ledger) -> None:
    """A sandbox made after the interval's end cannot have sent its bytes: they become unattributed in time."""
    ledger.settle(one(20.0, 150), [], 20.0)
    newer = lease(A, 21.0, 25.0)
    ledger.settle(one(30.0, 150), [newer], 30.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == unattributed(ledger) == 0
    ledger.settle(one(140.0, 150), [newer], 140.0)
    assert unattributed(ledger) == 0
    ledger.settle(one(140.5, 150), [newer], 140.5)
    assert unattributed(ledger) == 50


def test_bytes_do_not_go_to_a_sandbox_older_than_the_last_release(ledger: Ledger) -> None:
    """A late word of a pod that was there before the last holder left claims nothing that came after."""
    ledger.settle(one(15.0, 100), [lease(A, 5.0, 6.0, closed=15.0)], 15.0)
    ledger.settle(one(20.0, 150), [lease(A, 5.0, 6.0, closed=15.0)], 20.0)
    ledger.settle(one(30.0, 150), [lease(B, 14.0, 25.0)], 30.0)
    assert total(ledger, Level.POD, "team-b", "serve-0") == 0
    ledger.settle(one(31.0, 150), [lease(B, 16.0, 25.0)], 31.0)
    assert total(ledger, Level.POD, "team-b", "serve-0") == 50


def test_a_sandbox_of_unknown_age_may_own_whatever_waits(ledger: Ledger) -> None:
    """A tenant from a file gets what waits for its address."""
    ledger.settle(one(20.0, 150), [], 20.0)
    ledger.settle(one(30.0, 150), [lease(A, UNBOUNDED, 29.0)], 30.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 50


def test_a_released_lease_of_unknown_age_claims_nothing_afterwards(ledger: Ledger) -> None:
    """What is counted after a tenant was removed is not that tenant's."""
    gone = lease(A, UNBOUNDED, 6.0, closed=15.0)
    ledger.settle(one(15.0, 100), [gone], 15.0)
    ledger.settle(one(20.0, 150), [gone], 20.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 0
    assert ledger.pending()


def test_a_brief_lease_gets_what_was_counted_during_it() -> None:
    """A pod that came and went between two readings is booked, whether its age is known or not."""
    for created in (14.0, UNBOUNDED):
        fresh = Ledger()
        fresh.baseline(one(10.0, 100), 10.0)
        fresh.settle(one(20.0, 150), [lease(A, created, 20.0, closed=20.0)], 20.0)
        assert total(fresh, Level.POD, "team-a", "train-0") == 50


def test_a_set_that_could_not_be_read_is_settled_over_all_of_its_interval(ledger: Ledger) -> None:
    """Leases that met while a set was unreadable are both considered when it is read again."""
    was = lease(A, 5.0, 6.0, closed=20.0)
    ledger.settle(snap(20.0, {OUT: {}}), [was], 20.0)
    assert ledger.since == 10.0
    ledger.settle(one(30.0, 150), [was, lease(B, 20.0, 20.0)], 30.0)
    assert total(ledger, Level.POD, "team-b", "serve-0") == ledger.ambiguous_bytes == 50


def test_a_new_epoch_begins_at_zero(ledger: Ledger) -> None:
    """A set made anew counts from zero, also when it is already past the last reading, and is no reset."""
    ledger.saved()
    ledger.settle(one(20.0, 500, epoch=8), [lease(A, 5.0, 6.0)], 20.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 500
    assert ledger.resets == 0
    assert ledger.must_save


def test_an_element_that_vanished_and_returned_begins_at_zero(ledger: Ledger) -> None:
    """Deleted and added again counts from zero, although the epoch is the same."""
    holder = [lease(A, 5.0, 6.0)]
    ledger.saved()
    ledger.settle(snap(20.0, {IN: {}}), holder, 20.0)
    assert ledger.must_save
    ledger.settle(one(30.0, 120), holder, 30.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 120
    assert ledger.resets == 0


def test_a_counter_that_went_backwards_is_a_reset_of_last_resort(ledger: Ledger) -> None:
    """Lower than before without a reason is taken as begun at zero, and counted."""
    ledger.saved()
    ledger.settle(one(20.0, 40), [lease(A, 5.0, 6.0)], 20.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 40
    assert ledger.resets == 1
    assert ledger.must_save


def test_a_counter_set_to_zero_is_a_reset_that_books_nothing(ledger: Ledger) -> None:
    """Nothing is left to book, so no series appears and nothing waits."""
    ledger.settle(one(20.0, 0, 0), [], 20.0)
    assert ledger.resets == 1
    assert not ledger.totals
    assert not ledger.pending()


def test_quiet_progress_needs_no_save(ledger: Ledger) -> None:
    """Growth that a restart could read from the kernel again asks for no checkpoint."""
    ledger.saved()
    ledger.settle(one(20.0, 150), [lease(A, 5.0, 6.0)], 20.0)
    assert not ledger.must_save


def test_a_final_reading_of_a_part_leaves_the_other_counters_alone(ledger: Ledger) -> None:
    """Dropping one address's counters books its last bytes, forgets it, and re-books nothing of the others."""
    other = pack("10.0.0.2")
    holders = [lease(A, 5.0, 6.0), lease(B, 5.0, 6.0, ip=other)]
    ledger.settle(snap(20.0, {IN: {IP: (150, 1), other: (70, 1)}}), holders, 20.0)
    ledger.settle(snap(21.0, {IN: {IP: (155, 1)}}), holders, 21.0, final=True)
    ledger.settle(snap(22.0, {IN: {other: (75, 1)}}), holders, 22.0)
    ledger.settle(snap(23.0, {IN: {IP: (200, 1), other: (75, 1)}}), holders, 23.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 55 + 200
    assert total(ledger, Level.POD, "team-b", "serve-0") == 75
    assert ledger.resets == 0


def test_a_retired_class_does_not_hold_the_interval_open(ledger: Ledger) -> None:
    """After the last reading of a whole set, nothing of it is waited for."""
    ledger.settle(one(20.0, 150), [], 20.0, final=True)
    assert ledger.since == 20.0


def test_an_older_snapshot_than_the_last_is_ignored(ledger: Ledger) -> None:
    """A reading that arrives late is not taken for counters that went backwards."""
    holder = [lease(A, 5.0, 6.0)]
    ledger.settle(one(20.0, 150), holder, 20.0)
    state = ledger.state()
    ledger.settle(one(19.0, 140), holder, 21.0)
    assert ledger.state() == state


def test_what_waits_is_bounded_and_the_oldest_gives_up_first(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of many addresses does not fill the memory, and loses no byte."""
    monkeypatch.setattr(ledger_module, "MOST_PENDING", 8)
    for second in range(20, 60):
        ledger.settle(one(float(second), 100 * second), [], float(second))
    waiting = sum(len(parcels) for parcels in ledger._pending.values())
    assert waiting <= 8
    assert unattributed(ledger) + sum(count.bytes for count in ledger.pending().values()) == 5900 - 100
    ledger.settle(one(60.0, 5900), [lease(A, 58.5, 60.0)], 60.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 100


def test_a_state_comes_back_as_it_was(ledger: Ledger) -> None:
    """A ledger made from another's state has the same state, and books the same next."""
    holders = [lease(A, 5.0, 6.0), lease(B, 5.0, 6.0, closed=15.0, ip=pack("10.0.0.9"))]
    ledger.settle(snap(20.0, {IN: {IP: (150, 3), pack("10.0.0.3"): (5, 1), pack("10.0.0.4"): (0, 0)}}), holders, 20.0)
    again = Ledger(ledger.state())
    assert again.state() == ledger.state()
    for books in (ledger, again):
        books.settle(one(30.0, 180, 5), holders, 30.0)
    assert again.totals == ledger.totals
    assert again.state() == ledger.state()


def test_a_state_ahead_of_the_kernel_is_told_from_one_reset_counter(ledger: Ledger) -> None:
    """Most counters below their last reading contradict the state; a single one among many does not."""
    addresses = [bytes([10, 0, 1, n]) for n in range(10)]
    ledger.settle(snap(20.0, {IN: dict.fromkeys(addresses, (100, 1))}), [], 20.0)
    lowered = {**dict.fromkeys(addresses, (100, 1)), addresses[0]: (1, 1)}
    assert not ledger.contradicts(snap(30.0, {IN: lowered}))
    assert ledger.contradicts(snap(30.0, {IN: dict.fromkeys(addresses, (99, 1))}))
    assert not ledger.contradicts(snap(30.0, {IN: dict.fromkeys(addresses, (99, 1))}, epoch=8))


def many(count: int, namespace: str = "team-a") -> list[Lease]:
    """Leases of so many pods of one namespace."""
    return [
        lease(Pod(namespace, f"pod-{n}", f"{namespace}-{n}"), 5.0, 6.0, ip=bytes([10, 9, 0, n])) for n in range(count)
    ]


def test_pods_beyond_the_cap_share_other_and_it_sticks() -> None:
    """Who came when all places were taken stays in `__other__`, also when places become free."""
    ledger = Ledger(limits=Limits(pods=2, pod_retention=5.0))
    ledger.baseline(snap(10.0, {}), 10.0)
    leases = many(3)
    ledger.settle(snap(20.0, {IN: {item.ip: (10, 1) for item in leases}}), leases, 20.0)
    assert total(ledger, Level.POD, "team-a", "pod-0") == 10
    assert total(ledger, Level.POD, "team-a", OTHER) == 10
    assert ledger.capped == 1
    # No look for longer than the retention: the third pod was there all the time, so it keeps its place all the same.
    ledger.settle(snap(40.0, {IN: {item.ip: (20, 1) for item in leases}}), leases[2:], 40.0)
    assert total(ledger, Level.POD, "team-a", OTHER) == 20
    assert total(ledger, Level.POD, "team-a", "pod-2") == 0
    assert total(ledger, Level.NAMESPACE, "team-a") == 40


def test_a_pod_that_ended_frees_its_place() -> None:
    """After its retention a pod's place goes to the next one."""
    ledger = Ledger(limits=Limits(pods=1, pod_retention=5.0))
    ledger.baseline(snap(10.0, {}), 10.0)
    first, second = many(2)
    ledger.settle(snap(20.0, {IN: {first.ip: (10, 1)}}), [first], 20.0)
    ledger.settle(snap(26.0, {IN: {first.ip: (10, 1), second.ip: (7, 1)}}), [second], 26.0)
    assert total(ledger, Level.POD, "team-a", "pod-1") == 7
    assert ledger.capped == 0


def test_the_total_of_a_name_that_returns_goes_on() -> None:
    """A StatefulSet's pod that comes back hours later continues its total, also after a restart."""
    ledger = Ledger(limits=Limits(pods=1, pod_retention=5.0))
    ledger.baseline(snap(10.0, {}), 10.0)
    first, second = many(2)
    ledger.settle(snap(20.0, {IN: {first.ip: (10, 1)}}), [first], 20.0)
    ledger.settle(snap(5000.0, {IN: {first.ip: (10, 1), second.ip: (7, 1)}}), [second], 5000.0)
    ledger = Ledger(ledger.state(), limits=Limits(pods=1, pod_retention=5.0))
    ledger.settle(snap(9000.0, {IN: {first.ip: (15, 1), second.ip: (7, 1)}}), [first], 9000.0)
    assert total(ledger, Level.POD, "team-a", "pod-0") == 15


def test_ended_totals_are_kept_only_for_so_many_names() -> None:
    """Years of short jobs do not fill the memory: of ended pods only the last ones keep their totals."""
    ledger = Ledger(limits=Limits(pods=4, pod_retention=5.0, kept=8))
    ledger.baseline(snap(0.0, {}), 0.0)
    sent = {}
    for number in range(1, 100):
        pod = lease(Pod("team-a", f"job-{number}", f"u{number}"), UNBOUNDED, number * 10.0)
        sent[IP] = (number * 10, number)
        ledger.settle(snap(number * 10.0 + 1, {IN: dict(sent)}), [pod], number * 10.0 + 1)
    pods = [key for key in ledger.totals if key.level is Level.POD]
    assert len(pods) <= 2 * 4 + 8 + 1
    assert len(ledger._series._routes) <= 2 * 4 + 1
    assert total(ledger, Level.NAMESPACE, "team-a") == 990


def test_names_live_on_leases_and_groups_on_bytes_too() -> None:
    """A pod's name ends its retention after the lease, its namespace's an hour after the last lease or byte."""
    ledger = Ledger(limits=Limits(pod_retention=300.0, group_retention=3600.0))
    ledger.baseline(one(10.0, 0), 10.0)
    ledger.settle(one(20.0, 50), [lease(A, 5.0, 6.0, closed=20.0)], 20.0)
    assert {name for _, name, _ in ledger.alive(320.0)} == {
        ("team-a", "train-0"),
        ("team-a",),
        ("team-a", "Job", "train"),
    }
    assert {name for _, name, _ in ledger.alive(320.5)} == {("team-a",), ("team-a", "Job", "train")}
    assert not list(ledger.alive(3621.0))


def test_namespaces_beyond_the_cap_share_one_other() -> None:
    """Pods of namespaces without a place share `__other__` of `__other__` once their own places are gone."""
    ledger = Ledger(limits=Limits(pods=1, namespaces=1))
    ledger.baseline(snap(10.0, {}), 10.0)
    leases = [*many(1, "team-a"), *many(1, "team-b")]
    leases = [leases[0], Lease(pack("10.9.1.1"), leases[1].pod, "", 5.0, 6.0)]
    ledger.settle(snap(20.0, {IN: {item.ip: (10, 1) for item in leases}}), leases, 20.0)
    assert total(ledger, Level.NAMESPACE, OTHER) == total(ledger, Level.POD, OTHER, OTHER) == 10


def test_a_name_that_returned_keeps_its_total_while_others_end() -> None:
    """A pod that came back does not fall to 0 when later pods end and their totals are forgotten."""
    ledger = Ledger(limits=Limits(pods=2, pod_retention=5.0, kept=2))
    ledger.baseline(snap(0.0, {}), 0.0)
    back = lease(Pod("team-a", "stateful-0", "u0"), UNBOUNDED, 1.0)
    ledger.settle(snap(2.0, {IN: {IP: (10, 1)}}), [back], 2.0)
    held = {IP: (10, 1)}
    for number in range(1, 30):
        at = number * 10.0
        pod = lease(Pod("team-a", f"job-{number}", f"u{number}"), at, at, ip=bytes([10, 1, 0, number]))
        held[pod.ip] = (1, 1)
        present = [lease(back.pod, UNBOUNDED, 30.0), pod] if number >= 3 else [pod]
        ledger.settle(snap(at + 1, {IN: dict(held)}), present, at + 1)
    assert total(ledger, Level.POD, "team-a", "stateful-0") == 10


def test_late_bytes_keep_a_namespace_alive_but_not_a_pod() -> None:
    """Bytes bound to a pod that has left count as its namespace's activity; the pod's own name lives on leases."""
    ledger = Ledger(limits=Limits(pod_retention=30.0, group_retention=60.0))
    ledger.baseline(one(10.0, 0), 10.0)
    ledger.settle(one(20.0, 50), [], 20.0)
    ledger.settle(one(45.0, 50), [lease(A, 19.0, 21.0, closed=22.0)], 45.0)
    assert total(ledger, Level.NAMESPACE, "team-a") == 50
    assert {name for _, name, _ in ledger.alive(100.0)} == {("team-a",), ("team-a", "Job", "train")}


def test_of_two_pods_of_one_name_the_last_opened_is_the_one_that_is_known() -> None:
    """A pod that replaced another of its name is the one shown, however often and in whatever order they are seen."""
    ledger = Ledger()
    ledger.baseline(one(10.0, 0), 10.0)
    old = lease(Pod("team-a", "web-0", "uid-2"), 5.0, 6.0, closed=15.0)
    new = lease(Pod("team-a", "web-0", "uid-1"), 14.0, 15.0)
    for number, leases in enumerate([[old, new], [new, old], [old, new], [old, new]]):
        ledger.settle(one(20.0 + number, 0), leases, 20.0 + number)
        (shown,) = [pod for level, _, pod in ledger.alive(20.0 + number) if level is Level.POD]
        assert shown == new.pod


def test_bytes_that_begin_to_wait_ask_for_a_save(ledger: Ledger) -> None:
    """When the interval ended decides who may claim them, and only the ledger knows that."""
    ledger.saved()
    ledger.settle(one(20.0, 150), [], 20.0)
    assert ledger.must_save
    ledger.saved()
    ledger.settle(one(30.0, 150), [], 30.0)
    assert not ledger.must_save


def test_pods_of_one_name_but_different_workloads_are_booked_to_their_own(ledger: Ledger) -> None:
    """While a pod replaces one of its name under another owner, each owner gets its own pod's bytes."""
    old, new = (Pod("team-a", "web-0", f"uid-{kind}", kind, "web") for kind in ("Job", "StatefulSet"))
    other = pack("10.0.0.2")
    both = [lease(new, 11.0, 12.0, ip=other), lease(old, 5.0, 6.0)]
    ledger.settle(snap(20.0, {IN: {IP: (150, 1), other: (30, 1)}}), both, 20.0)
    assert total(ledger, Level.WORKLOAD, "team-a", "Job", "web") == 50
    assert total(ledger, Level.WORKLOAD, "team-a", "StatefulSet", "web") == 30
    assert total(ledger, Level.POD, "team-a", "web-0") == 80


def test_what_a_cgroup_counted_is_its_pods(ledger: Ledger) -> None:
    """Bytes of a hostNetwork pod's cgroup are booked like those of an address: to the pod, and none to the host."""
    key, cgroup = IN._replace(scope=Scope.HOST_POD), cgroup_key(7)
    ledger.settle(snap(11.0, {key: {cgroup: (0, 0)}}), [lease(A, 10.5, 10.5, ip=cgroup)], 11.0)
    ledger.settle(snap(12.0, {key: {cgroup: (500, 1)}}), [lease(A, 10.5, 10.5, ip=cgroup)], 12.0)
    assert total(ledger, Level.POD, "team-a", "train-0") == 500
    assert (total(ledger, Level.HOST), unattributed(ledger)) == (0, 0)
