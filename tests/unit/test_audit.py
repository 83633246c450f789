"""The self-audit, case by case."""

from __future__ import annotations

import pytest

from netacct.audit import BRIDGE, BYPASS, ENOUGH, KEEP, REASONS, Audit, Missing, Seen
from netacct.model import ZERO, Count, Direction

PLACE = (7, Direction.TRANSMIT)
OTHER = (8, Direction.RECEIVE)
MB = ENOUGH


def seen(crossed: int, counted: int, **changes: object) -> Seen:
    """A look at a quiet moment; packets have a thousand bytes."""
    whole = Count(crossed, crossed // 1000)
    one = Seen(PLACE, "pod", Count(counted, counted // 1000), whole, whole)
    return one._replace(**changes)  # type: ignore[arg-type]  # fields of Seen


def looks(audit: Audit, *several: Seen, begin: float = 0.0) -> list[list[Missing]]:
    """Several looks, a second apart."""
    return [audit.look([one], begin + number) for number, one in enumerate(several)]


def amounts(found: list[list[Missing]]) -> list[int]:
    """The bytes that each look found missing."""
    return [sum(missing.amount.bytes for missing in one) for one in found]


def test_the_first_look_is_where_comparing_begins() -> None:
    """What crossed before the first look is nobody's, and is to be stored."""
    audit = Audit()
    assert audit.coverage(0.0) is None
    assert audit.blind_spots(0.0) == {}
    assert looks(audit, seen(50 * MB, 0)) == [[]]
    assert audit.began
    assert audit.blind_spots(0.0) == dict.fromkeys(REASONS, False)
    assert looks(audit, seen(50 * MB, 0)) == [[]]
    assert not audit.began


def test_missing_bytes_are_believed_when_seen_twice() -> None:
    """The first time that netfilter lacks bytes is a doubt; the second is a blind spot, with all that is missing."""
    audit = Audit()
    looks(audit, seen(0, 0))
    assert audit.look([seen(3 * MB, MB)], 1.0) == []
    unsure = [audit.unsure]
    assert audit.coverage(1.0) is None
    assert not any(audit.blind_spots(1.0).values())
    (missing,) = audit.look([seen(4 * MB, MB, reason=BRIDGE)], 2.0)
    assert [*unsure, audit.unsure] == [True, False]
    assert missing == Missing(PLACE, Count(3 * MB, 3000), BRIDGE, 0.25)
    assert [reason for reason, shown in audit.blind_spots(2.0).items() if shown] == [BRIDGE]
    assert audit.coverage(2.0) == 0.25


def test_a_doubt_that_was_a_queue_goes_away() -> None:
    """Bytes that netfilter counts a moment later are not missing."""
    audit = Audit()
    assert amounts(looks(audit, seen(0, 0), seen(3 * MB, MB), seen(3 * MB, 3 * MB), seen(3 * MB, 3 * MB))) == [0] * 4
    assert audit.coverage(3.0) == 1.0


def test_what_netfilter_counts_late_is_taken_off_what_is_booked_next() -> None:
    """Bytes that were booked and then counted after all make the next booking smaller; none is negative."""
    audit = Audit()
    found = looks(
        audit,
        seen(0, 0),
        seen(3 * MB, 0),
        seen(3 * MB, 0),
        seen(6 * MB, MB),
        seen(9 * MB, MB + MB // 2),
        begin=0.0,
    )
    assert amounts(found) == [0, 0, 3 * MB, 2 * MB, 5 * MB // 2]
    assert sum(amounts(found)) == 9 * MB - (MB + MB // 2)


def test_less_than_a_megabyte_waits_until_it_is_one() -> None:
    """Small amounts are compared once they are enough together, however many looks that takes."""
    audit = Audit()
    part = MB // 4
    found = looks(audit, *(seen(number * part, 0) for number in range(8)))
    assert amounts(found) == [0, 0, 0, 0, 0, 5 * part, 0, 0]


def test_a_surplus_covers_nothing_elsewhere() -> None:
    """A pod of which netfilter counts more than its interface is covered, and does not make good for another."""
    audit = Audit()
    for at, factor in enumerate((0, 2, 4)):
        one = seen(factor * MB, 2 * factor * MB)
        other = seen(factor * MB, 0, place=OTHER)
        found = audit.look([one, other], float(at))
    assert [missing.place for missing in found] == [OTHER]
    assert audit.coverage(2.0) == pytest.approx(2 / 6)


def test_a_bypass_that_ends_leaves_a_blind_spot_for_a_while() -> None:
    """The blind spot stays for some minutes, so that short jobs do not make it flap; the coverage is of now."""
    audit = Audit()
    looks(audit, seen(0, 0), seen(2 * MB, 0), seen(2 * MB, 0), seen(4 * MB, 2 * MB))
    assert audit.coverage(3.0) == 1.0
    assert audit.blind_spots(2.0 + KEEP)[BYPASS]
    assert not audit.blind_spots(2.1 + KEEP)[BYPASS]


def test_coverage_is_of_the_last_minutes() -> None:
    """Where nothing was compared for some minutes, or the pod is gone, there is no coverage to show."""
    audit = Audit()
    looks(audit, seen(0, 0), seen(2 * MB, 2 * MB))
    assert audit.coverage(1.0 + KEEP) == 1.0
    assert audit.coverage(1.1 + KEEP) is None
    audit.look([], 2.0)
    assert audit.coverage(2.0) is None


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(seen(20 * MB, 0, holder="another pod"), id="holder"),
        pytest.param(seen(5 * MB, 10 * MB), id="interface"),
        pytest.param(seen(20 * MB, 5 * MB), id="tally"),
    ],
)
def test_what_begins_anew_is_compared_anew(second: Seen) -> None:
    """Another holder, an interface made anew, or a tally begun again: nothing of before is missing."""
    audit = Audit()
    found = looks(audit, seen(10 * MB, 10 * MB), second, second, second)
    assert amounts(found) == [0] * 4


def test_a_place_that_was_away_begins_anew() -> None:
    """What crossed while an interface was not found is not compared."""
    audit = Audit()
    audit.look([seen(0, 0)], 0.0)
    audit.look([], 1.0)
    assert amounts(looks(audit, seen(9 * MB, 0), seen(9 * MB, 0), begin=2.0)) == [0, 0]


def test_forgetting_begins_everything_anew() -> None:
    """Of what crosses while nobody is to count, nothing is booked."""
    audit = Audit()
    looks(audit, seen(0, 0), seen(9 * MB, 0))
    audit.forget()
    assert amounts(looks(audit, seen(9 * MB, 0), seen(9 * MB, 0))) == [0, 0]


def test_packets_are_never_negative() -> None:
    """Where segments were counted apart on one side only, packets that seem too many are none."""
    audit = Audit()
    first = Seen(PLACE, "pod", ZERO, ZERO, ZERO)
    then = Seen(PLACE, "pod", Count(MB, 900), Count(3 * MB, 50), Count(3 * MB, 50))
    found = looks(audit, first, then, then)
    assert found[2][0].amount == Count(2 * MB, 0)
