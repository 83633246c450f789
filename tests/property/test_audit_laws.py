"""Laws of the self-audit, over worlds in which the truth is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from netacct.audit import COVERED, ENOUGH, Audit, AuditState, Missing, Seen
from netacct.model import ZERO, Count, Direction

PLACE = (7, Direction.TRANSMIT)

_MOST = 10 * ENOUGH
_SIZES = st.integers(0, _MOST).map(lambda size: Count(size, size // 1000))
_SEEN = st.tuples(_SIZES, st.just(ZERO))
_UNSEEN = st.tuples(st.just(ZERO), _SIZES)
_ANY = st.one_of(_SEEN, _UNSEEN, st.tuples(_SIZES, _SIZES))


@dataclass
class World:
    """A pod that sends through netfilter and past it, and an audit that may be killed and go on from its store."""

    seen: Count = ZERO
    past: Count = ZERO
    booked: Count = ZERO
    at: float = 0.0
    audit: Audit = field(default_factory=Audit)
    stored: tuple[AuditState, Count] = field(default_factory=lambda: ({}, ZERO))

    def send(self, amounts: tuple[Count, Count]) -> None:
        """Bytes through netfilter, and past it."""
        self.seen, self.past = self.seen.plus(amounts[0]), self.past.plus(amounts[1])

    def look(
        self, during: Iterable[tuple[Count, Count]] = ((ZERO, ZERO), (ZERO, ZERO)), seconds: float = 30
    ) -> list[Missing]:
        """One look, with traffic between its three readings."""
        before, after = during
        self.at += seconds
        least = self.seen.plus(self.past)
        self.send(before)
        counted = self.seen
        self.send(after)
        most = self.seen.plus(self.past)
        found = self.audit.look([Seen(PLACE, "pod", counted, least, most)], self.at)
        for missing in found:
            self.booked = self.booked.plus(missing.amount)
        return found

    def save(self) -> None:
        """A checkpoint: the audit's state and the totals, at once."""
        self.stored = (self.audit.state(), self.booked)

    def kill(self) -> None:
        """Another life goes on from the checkpoint."""
        state, self.booked = self.stored
        self.audit = Audit(state)


_STEPS = st.lists(st.tuples(_ANY, st.tuples(_ANY, _ANY), st.booleans(), st.booleans()), max_size=12)


@given(_STEPS)
def test_never_more_is_booked_than_passed_by(steps: list[tuple[object, ...]]) -> None:
    """Whatever is sent, when, and however often the agent dies, no byte and no packet is booked that was counted."""
    world = World()
    for between, during, save, kill in steps:
        world.send(between)  # type: ignore[arg-type]  # as drawn
        before = world.booked
        world.look(during)  # type: ignore[arg-type]  # as drawn
        assert before.bytes <= world.booked.bytes <= world.past.bytes
        assert world.booked.packets <= world.past.packets
        if save:
            world.save()
        if kill:
            world.kill()


@given(st.lists(st.tuples(_SEEN, st.tuples(_SEEN, _SEEN)), max_size=12))
def test_where_nothing_passes_by_nothing_is_missing(steps: list[tuple[object, ...]]) -> None:
    """Bursts between the readings of a look are never taken for a bypass."""
    world = World()
    for between, during in steps:
        world.send(between)  # type: ignore[arg-type]  # as drawn
        assert world.look(during) == []  # type: ignore[arg-type]  # as drawn
    assert world.audit.coverage(world.at) in (None, 1.0)
    assert not any(world.audit.blind_spots(world.at).values())


@given(st.lists(st.tuples(_UNSEEN, st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_what_only_passes_by_is_booked_to_the_byte(steps: list[tuple[tuple[Count, Count], bool, bool]]) -> None:
    """Of a pod that netfilter never sees all is booked in the end, kills or not, but for less than a megabyte."""
    world = World()
    world.look()
    world.save()
    for amounts, save, kill in steps:
        world.send(amounts)
        world.look()
        if save:
            world.save()
        if kill:
            world.kill()
    world.look()
    world.look()
    assert world.past.bytes - ENOUGH < world.booked.bytes <= world.past.bytes
    if world.past.bytes - world.booked.bytes == 0:
        assert world.booked == world.past


@given(st.lists(_ANY, max_size=12), st.integers(0, 12))
def test_a_kill_changes_nothing(steps: list[tuple[Count, Count]], at: int) -> None:
    """A life that goes on from a checkpoint books what one that never ended does."""
    one, other = World(), World()
    for number, amounts in enumerate(steps):
        for world in (one, other):
            world.send(amounts)
            world.look()
        if number == at:
            other.save()
            other.kill()
    assert one.booked == other.booked
    assert one.audit.state() == other.audit.state()


@given(st.lists(_SIZES, min_size=1, max_size=8), st.floats(0, 1 - COVERED - 0.001))
def test_a_tenth_is_not_told_from_headers(amounts: list[Count], share: float) -> None:
    """Where netfilter counts nine tenths of each interval nothing is booked, however long it goes on."""
    world = World()
    for amount in amounts:
        past = int(amount.bytes * share)
        world.send((Count(amount.bytes - past, amount.packets), Count(past, 0)))
        assert world.look() == []
    assert not any(world.audit.blind_spots(world.at).values())
