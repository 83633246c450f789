"""The bench's statistics: medians, their intervals, verdicts."""

from __future__ import annotations

import random
import statistics
import sys
from itertools import product
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))  # the bench is a program, not a package

import bench_stats  # found by the line above
from bench_stats import Figure, Interval


@pytest.mark.parametrize(
    ("samples", "ranks"), [(6, (0, 5)), (8, (0, 7)), (9, (1, 7)), (12, (2, 9)), (15, (3, 11)), (21, (5, 15))]
)
def test_ranks_of_the_median_are_those_of_the_sign_test(samples: int, ranks: tuple[int, int]) -> None:
    """The ranks are those that tables of the sign test give for 95 %, counted from 0."""
    assert bench_stats.median_ranks(samples) == ranks


@pytest.mark.parametrize("samples", [6, 7, 9, 12])
def test_interval_misses_the_median_in_five_of_a_hundred_at_most(samples: int) -> None:
    """Over all ways in which samples can fall on either side of the true median, at most 5 % leave it outside."""
    low, high = bench_stats.median_ranks(samples)
    outside = 0
    for sides in product((-1, 1), repeat=samples):
        ordered = sorted(sides)
        outside += ordered[low] > 0 or ordered[high] < 0
    assert outside / 2**samples <= 0.05


def test_too_few_samples_have_no_interval() -> None:
    """Five samples are refused, because not even their whole range holds the median with 95 % confidence."""
    with pytest.raises(ValueError, match="5 samples"):
        bench_stats.median_ranks(5)


def test_interval_of_few_samples_is_their_range() -> None:
    """With too few samples for an interval the whole range stands in for it."""
    assert bench_stats.interval([3.0, 1.0, 2.0]) == Interval(1.0, 2.0, 3.0)


def test_interval_does_not_depend_on_the_order_of_samples() -> None:
    """Shuffled samples give the same median and interval, with the median inside."""
    samples = [random.gauss(1, 0.1) for _ in range(21)]
    found = bench_stats.interval(samples)
    random.shuffle(samples)
    assert bench_stats.interval(samples) == found
    assert found.low <= found.median == statistics.median(samples) <= found.high


def test_a_high_quantile_has_the_rank_of_its_share() -> None:
    """Of 100 samples the p99 is the 99th, and not below the 97th: P(binomial(100, 0.99) < 97) is 2 %, of 98 8 %."""
    samples = list(range(1, 101))
    random.Random(1).shuffle(samples)
    assert bench_stats.high_quantile(samples, 0.99) == Interval(97, 99, 100)


def test_ratio_is_of_throughput_round_by_round() -> None:
    """A variant that takes twice as long in one round and as long in the other has ratios of a half and one."""
    assert bench_stats.ratios([100.0, 300.0], [200.0, 300.0]) == [0.5, 1.0]
    assert bench_stats.differences([100.0, 300.0], [200.0, 300.0]) == [100.0, 0.0]


def test_rounds_without_a_partner_are_refused() -> None:
    """Base and variant with different numbers of rounds cannot be paired."""
    with pytest.raises(ValueError, match="zip"):
        bench_stats.ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("better", "interval", "missed"),
    [
        ("higher", Interval(0.90, 0.93, 0.94), False),
        ("higher", Interval(0.90, 0.92, 0.93), True),
        ("lower", Interval(0.94, 0.97, 0.99), False),
        ("lower", Interval(0.95, 0.97, 0.99), True),
    ],
)
def test_a_threshold_is_missed_only_with_the_whole_interval(better: str, interval: Interval, missed: bool) -> None:
    """A figure misses its threshold of 0.94 only where the favourable end of its interval does, too."""
    figure = Figure("packet", "x", "", interval, threshold=0.94, better="higher" if better == "higher" else "lower")
    assert figure.missed is missed


def test_a_figure_without_threshold_misses_nothing() -> None:
    """What is measured for information cannot fail."""
    assert not Figure("packet", "x", "", Interval(0.1, 0.2, 0.3)).missed


def test_quartiles_hold_the_middle_half() -> None:
    """Of one to five, the middle half is two to four; a single sample is its own spread."""
    assert bench_stats.quartiles([5.0, 1.0, 4.0, 2.0, 3.0]) == (2.0, 4.0)
    assert bench_stats.quartiles([7.0]) == (7.0, 7.0)
