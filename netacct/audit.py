"""The self-audit: what crossed a pod's own interface, against what netfilter counted of it. Pure.

Goal
    No confident low number. Traffic that passes by netfilter (a bridge without br_netfilter, a redirect by tc or eBPF)
    still crosses the pod's interface. What is missing from netfilter's count is told, and booked as `unclassified`.

Tensions
    *The two counts are never of one moment.* Interfaces are read before and after netfilter's counters, and what
    crossed is taken from the end of one look to the begin of the next: the least that it can have been. So a burst
    between two readings is never missing. Packets that wait in a queue between interface and netfilter are, for
    milliseconds; so nothing is believed before it was seen twice.

    *The two counts differ where nothing is wrong*: by what netfilter does not count (ARP, neighbour discovery), and by
    the headers of segments that one side counts apart and the other together. That is a few percent. So what is covered
    to `COVERED` or better is taken as whole, and nothing is booked.

    *What was booked must not be booked again*, by a later look, by netfilter that catches up, or by another life of the
    agent. So all that is missing since the last comparison that was covered is one sum, and only what it grew is
    booked. A `state()` belongs to the totals it was taken with.

Decisions
    - A comparison waits for `ENOUGH` bytes on either side, however long that takes.
    - Each pod and direction is on its own: what one pod has too much does not cover what another has not.
    - Whenever the holder, its counts or the interface began anew, so does the comparison: what crossed before is lost
      to it, and never booked to somebody else.
    - A blind spot stays for `KEEP` seconds after the last comparison that showed it; comparisons as long count for the
      coverage.
    - What cannot be compared at all (a pod without an interface of its own on the node, RDMA) is a blind spot as well,
      without a number: nothing can be booked then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from netacct.model import ZERO, Count, Direction

ENOUGH = 1_000_000
"""Bytes that one side must have counted before the two are compared."""

COVERED = 0.90
"""The share of an interface's bytes that netfilter must have counted."""

KEEP = 300.0
"""Seconds for which a comparison, and the blind spot that it showed, are shown."""

BRIDGE = "bridge"
BYPASS = "bypass"
NO_INTERFACE = "no_interface"
RDMA = "rdma"
REASONS = (BRIDGE, BYPASS, NO_INTERFACE, RDMA)
"""A pod is on a bridge that does not show netfilter its frames; bytes are missing for any other reason; there is
nothing to compare a pod with; adapters move bytes past the kernel."""

Place: TypeAlias = tuple[int, Direction]
"""The number of a pod's (first) interface, and the direction as the pod sees it."""


class Seen(NamedTuple):
    """One pod's interfaces in one direction, at one look.

    Args:
        place: which.
        holder: names the tenure whose bytes these are; another one begins anew.
        counted: what netfilter counted for the holder, at some moment between the next two.
        least, most: what the interfaces counted before and after that, without link headers.
        reason: `BRIDGE` or `BYPASS`, in case something is missing.
    """

    place: Place
    holder: str
    counted: Count
    least: Count
    most: Count
    reason: str = BYPASS


class Missing(NamedTuple):
    """What is to be booked as unclassified; `coverage` is of the comparison that showed it."""

    place: Place
    amount: Count
    reason: str
    coverage: float


class Pair(NamedTuple):
    """What interface and netfilter had counted at one look."""

    crossed: Count
    counted: Count


@dataclass(frozen=True, slots=True)
class Track:
    """One place over time.

    start: the last look up to which all was covered. mark: the last comparison. booked: what was, since `start`.
    doubted: the last comparison was not covered.
    """

    holder: str
    start: Pair
    mark: Pair
    booked: Count = ZERO
    doubted: bool = False


AuditState: TypeAlias = Mapping[Place, Track]
"""An `Audit` as a value, but for what it shows."""


class _Comparison(NamedTuple):
    at: float
    crossed: int
    counted: int


class Audit:
    """All comparisons. Worker thread only.

    Attributes:
        unsure: the last look doubted something for the first time; look again soon.
        began: it began something anew; a life that does not know of it loses what crosses from here on.
    """

    def __init__(self, state: AuditState | None = None) -> None:
        self._tracks: dict[Place, Track] = dict(state or {})
        self._compared: dict[Place, _Comparison] = {}
        self._spots: dict[str, float] = {}
        self._looked = False
        self.unsure = False
        self.began = False

    def look(self, seen: Iterable[Seen], at: float) -> list[Missing]:
        """Compare; returns what is to be booked. Places that are not among `seen` are forgotten."""
        tracks: dict[Place, Track] = {}
        missing: list[Missing] = []
        self.unsure = self.began = False
        self._looked = True
        for one in seen:
            tracks[one.place], found = self._step(self._tracks.get(one.place), one, at)
            if found is not None:
                missing.append(found)
        self._tracks = tracks
        self._compared = {
            place: last for place, last in self._compared.items() if place in tracks and at - last.at <= KEEP
        }
        return missing

    def forget(self) -> None:
        """Begin anew everywhere: what crosses until the next look is not compared."""
        self._tracks = {}

    def spot(self, reason: str, at: float) -> None:
        """Show that there is what no comparison can tell of: one of `REASONS`."""
        self._spots[reason] = at

    def coverage(self, now: float) -> float | None:
        """The share that netfilter counted of what crossed the interfaces, in each place's last comparison.

        None where nothing was compared in the last `KEEP` seconds.
        """
        recent = [last for last in self._compared.values() if now - last.at <= KEEP]
        crossed = sum(last.crossed for last in recent)
        return sum(last.counted for last in recent) / crossed if crossed else None

    def blind_spots(self, now: float) -> dict[str, bool]:
        """Whether traffic is, or may be, missing, by reason; empty before the first look."""
        if not self._looked:
            return {}
        return {reason: reason in self._spots and now - self._spots[reason] <= KEEP for reason in REASONS}

    def state(self) -> AuditState:
        """Everything that the next life needs, as a value."""
        return dict(self._tracks)

    def _step(self, track: Track | None, seen: Seen, at: float) -> tuple[Track, Missing | None]:
        here = Pair(seen.most, seen.counted)
        if track is None or track.holder != seen.holder or not _follows(seen, track.mark):
            self.began = True
            return Track(seen.holder, here, here), None
        crossed = seen.least.minus(track.mark.crossed).bytes
        counted = seen.counted.minus(track.mark.counted).bytes
        if max(crossed, counted) < ENOUGH:
            return track, None
        covered = counted >= COVERED * crossed
        if not covered and not track.doubted:
            self.unsure = True
            return replace(track, doubted=True), None
        self._compared[seen.place] = _Comparison(at, crossed, min(crossed, counted))
        if covered:
            return Track(seen.holder, here, here), None
        self._spots[seen.reason] = at
        amount = _more(seen, track)
        booked = track.booked.plus(amount)
        return replace(track, mark=here, booked=booked), Missing(seen.place, amount, seen.reason, counted / crossed)


def _follows(seen: Seen, mark: Pair) -> bool:
    """Whether no counter went back since the mark."""
    return seen.least.bytes >= mark.crossed.bytes and seen.counted.bytes >= mark.counted.bytes


def _more(seen: Seen, track: Track) -> Count:
    """What is missing since the start, and not yet booked."""
    missing = seen.least.minus(track.start.crossed).minus(seen.counted.minus(track.start.counted)).minus(track.booked)
    return Count(max(missing.bytes, 0), max(missing.packets, 0))
