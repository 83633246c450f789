"""What is shown when."""

from __future__ import annotations

from netacct.accounting.exposure import Exposure, View
from netacct.accounting.series import Name
from netacct.model import ZERO, Count, Direction, Level, Pod, SeriesKey

POD = Pod("team-a", "train-0", "uid-a")
NAME: Name = ("team-a", "train-0")
SERIES = SeriesKey(Level.POD, NAME, Direction.RECEIVE, "internet")
HOST = SeriesKey(Level.HOST, (), Direction.RECEIVE, "tunnel")
ALIVE = [(Level.POD, NAME, POD)]
TOTALS = {SERIES: Count(1000, 2)}


def values(view: View) -> list[Count]:
    """The values of a view."""
    return list(view.totals.values())


def test_a_new_series_is_zero_first_and_then_true() -> None:
    """A series shows 0 for a minute from its first scrape on, then its value, and asks for a save at that moment."""
    exposure = Exposure()
    first, still, then, after = (exposure.view(TOTALS, ALIVE, now) for now in (100.0, 159.9, 160.0, 161.0))
    assert values(first) == values(still) == [ZERO]
    assert values(then) == values(after) == [Count(1000, 2)]
    assert [view.must_save for view in (first, still, then, after)] == [False, False, True, False]


def test_zero_is_shown_at_least_once_however_short_the_time() -> None:
    """Even without a waiting time the first scrape sees 0."""
    exposure = Exposure(zero_first=0.0)
    assert values(exposure.view(TOTALS, ALIVE, 100.0)) == [ZERO]
    assert values(exposure.view(TOTALS, ALIVE, 100.0)) == [Count(1000, 2)]


def test_a_series_without_traffic_does_not_exist() -> None:
    """Zero bytes and packets are no series, and do not start its minute either."""
    exposure = Exposure()
    assert not exposure.view({SERIES: ZERO}, ALIVE, 100.0).totals
    assert values(exposure.view(TOTALS, ALIVE, 200.0)) == [ZERO]


def test_a_restart_never_shows_less_than_before() -> None:
    """A state restored after the true value was shown goes on showing it."""
    exposure = Exposure()
    exposure.view(TOTALS, ALIVE, 100.0)
    exposure.view(TOTALS, ALIVE, 160.0)
    assert values(Exposure(exposure.state()).view(TOTALS, ALIVE, 170.0)) == [Count(1000, 2)]


def test_a_restart_goes_on_with_the_minute_of_zero() -> None:
    """The minute counts from the first scrape of the process before."""
    exposure = Exposure()
    exposure.view(TOTALS, ALIVE, 100.0)
    again = Exposure(exposure.state())
    assert values(again.view(TOTALS, ALIVE, 130.0)) == [ZERO]
    assert values(again.view(TOTALS, ALIVE, 160.0)) == [Count(1000, 2)]


def test_an_ended_series_goes_once_its_true_value_was_shown() -> None:
    """A pod of a few seconds stays until its bytes were seen, and no longer."""
    exposure = Exposure()
    exposure.view(TOTALS, ALIVE, 100.0)
    waiting = exposure.view(TOTALS, [], 130.0)
    assert values(waiting) == [ZERO]
    assert waiting.pods == (POD,)
    assert values(exposure.view(TOTALS, [], 165.0)) == [Count(1000, 2)]
    gone = exposure.view(TOTALS, [], 166.0)
    assert not gone.totals
    assert not gone.pods


def test_an_ended_series_does_not_wait_for_ever() -> None:
    """Without a scrape in time the series ends unseen."""
    exposure = Exposure(patience=300.0)
    exposure.view(TOTALS, ALIVE, 100.0)
    assert not exposure.view(TOTALS, [], 401.0).totals


def test_a_series_that_returns_is_not_new() -> None:
    """A name that ended and comes back continues at its value: 0 in between would be billed as a reset."""
    exposure = Exposure()
    for now in (100.0, 160.0):
        exposure.view(TOTALS, ALIVE, now)
    assert not exposure.view(TOTALS, [], 1000.0).totals
    assert values(exposure.view({SERIES: Count(1500, 3)}, ALIVE, 2000.0)) == [Count(1500, 3)]


def test_a_forgotten_total_is_new_again() -> None:
    """Once the ledger dropped a total, a series of that name starts over at 0."""
    exposure = Exposure()
    for now in (100.0, 160.0):
        exposure.view(TOTALS, ALIVE, now)
    exposure.view({}, [], 9000.0)
    assert values(exposure.view({SERIES: Count(5, 1)}, ALIVE, 9001.0)) == [ZERO]


def test_a_forgotten_total_is_new_again_beside_those_that_are_not_shown() -> None:
    """The same where the ledger has more totals than are shown, as with `metrics.pods: off`."""
    jobs = SeriesKey(Level.WORKLOAD, ("team-a", "Job", "train"), Direction.RECEIVE, "internet")
    alive = [(Level.WORKLOAD, jobs.labels, None)]
    exposure = Exposure(levels=[Level.WORKLOAD])
    for now in (100.0, 160.0):
        exposure.view({**TOTALS, jobs: Count(1000, 2)}, alive, now)
    exposure.view(TOTALS, [], 9000.0)
    assert values(exposure.view({**TOTALS, jobs: Count(5, 1)}, alive, 9001.0)) == [ZERO]


def test_host_series_need_no_name_to_live() -> None:
    """Host totals are shown though nothing is alive."""
    assert list(Exposure().view({HOST: Count(1, 1)}, [], 100.0).totals) == [HOST]


def test_a_level_that_is_switched_off_shows_neither_series_nor_pods() -> None:
    """Without the pod level there are no pod series and no pod infos."""
    view = Exposure(levels=[Level.HOST]).view({**TOTALS, HOST: Count(1, 1)}, ALIVE, 100.0)
    assert list(view.totals) == [HOST]
    assert view.pods == ()


def test_a_pod_has_its_info_before_its_first_byte() -> None:
    """A silent pod with a lease is known all the same."""
    assert Exposure().view({}, ALIVE, 100.0).pods == (POD,)
