"""What of the totals is shown, and when. Pure: times are CLOCK_BOOTTIME, handed in. Worker thread only.

Prometheus takes the first sample of a counter as its start, so bytes that are already in it are never seen as growth.
A new series is therefore shown as 0 first, for `zero_first` seconds and at least one scrape, and then with its true
value. From then on it must never be shown lower, also not by the next process: `View.must_save` says that a true value
is about to be shown for the first time, so that the state is saved before anybody sees it. A series that was only ever
shown as 0 may begin again.

A series is shown while its name lives (`SeriesTable.alive`), and beyond that until its true value was shown once, if
that comes within `patience` after its first zero: a pod of five seconds leaves its bytes behind. Series of zero bytes
and packets do not exist. Host and unattributed series always live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from netacct.accounting.series import NAMED, Name
from netacct.model import ZERO, Count, Level, Pod, SeriesKey

ZERO_FIRST = 60.0


@dataclass(frozen=True, slots=True)
class View:
    """What one scrape shows.

    pods: one per pod series' name, of those that live or are still shown; for `netacct_pod_info`.
    must_save: save the state before showing this, because some value in it is shown for the first time.
    """

    totals: Mapping[SeriesKey, Count]
    pods: tuple[Pod, ...]
    must_save: bool


@dataclass(frozen=True, slots=True)
class ExposureState:
    """An `Exposure` as a value: when each series was first shown, and None once its true value was."""

    shown: Mapping[SeriesKey, float | None]

    def only(self, totals: Mapping[SeriesKey, Count]) -> ExposureState:
        """What was shown of these totals: a series that begins again at 0 has not been shown yet."""
        return ExposureState({key: first for key, first in self.shown.items() if key in totals})


class Exposure:
    """Remembers which series were shown.

    Args:
        zero_first: seconds for which a new series is 0.
        patience: seconds after its first zero for which a series waits to show its true value, though its name ended.
        levels: which levels are shown at all.
    """

    def __init__(
        self,
        state: ExposureState | None = None,
        *,
        zero_first: float = ZERO_FIRST,
        patience: float = 300.0,
        levels: Iterable[Level] = tuple(Level),
    ) -> None:
        self._zero_first = zero_first
        self._patience = max(patience, 2 * zero_first)
        self._levels = frozenset(levels)
        self._shown: dict[SeriesKey, float | None] = dict(state.shown) if state else {}
        self._pods: dict[Name, Pod] = {}

    def view(
        self, totals: Mapping[SeriesKey, Count], alive: Iterable[tuple[Level, Name, Pod | None]], now: float
    ) -> View:
        """What to show at `now`; counts as shown. `totals` and `alive` are the ledger's."""
        living, pods = self._living(alive)
        shown: dict[SeriesKey, Count] = {}
        must_save = False
        for key, total in totals.items():
            level = key[0]
            if level not in self._levels or total == ZERO:
                continue
            first = self._shown.get(key, now)
            if level in NAMED and (level, key[1]) not in living and not self._waits(key, now):
                continue
            if first is None:
                shown[key] = total
            elif key in self._shown and now - first >= self._zero_first:
                shown[key] = total
                self._shown[key] = None
                must_save = True
            else:
                shown[key] = ZERO
                self._shown[key] = first
        self._forget(totals)
        return View(shown, self._infos(pods, shown), must_save)

    def state(self) -> ExposureState:
        """Everything, as a value."""
        return ExposureState(dict(self._shown))

    def _living(
        self, alive: Iterable[tuple[Level, Name, Pod | None]]
    ) -> tuple[set[tuple[Level, Name]], dict[Name, Pod]]:
        living: set[tuple[Level, Name]] = set()
        pods: dict[Name, Pod] = {}
        for level, name, pod in alive:
            living.add((level, name))
            if pod is not None and level is Level.POD:
                pods[name] = pod
        return living, pods

    def _waits(self, key: SeriesKey, now: float) -> bool:
        """Whether a series whose name ended still owes its true value."""
        first = self._shown.get(key)
        return first is not None and now - first <= self._patience

    def _infos(self, pods: dict[Name, Pod], shown: Mapping[SeriesKey, Count]) -> tuple[Pod, ...]:
        if Level.POD not in self._levels:
            return ()
        for name in {key.labels for key in shown if key.level is Level.POD}:
            if name not in pods and name in self._pods:
                pods[name] = self._pods[name]
        self._pods = pods
        return tuple(pods.values())

    def _forget(self, totals: Mapping[SeriesKey, Count]) -> None:
        if not self._shown.keys() <= totals.keys():
            self._shown = {key: first for key, first in self._shown.items() if key in totals}
