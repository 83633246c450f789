"""Medians, their intervals, and verdicts. Pure.

A packet costs some microseconds, and the machine's mood changes by more than what a rule costs. So variants take turns,
and what counts is the ratio of two measurements of the same round. The median of those ratios is the figure; its
interval says how far it can be trusted, without assuming that noise has any particular shape.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
LEAST_SAMPLES = 6
"""Below six samples not even the range from smallest to largest holds the median with 95 % confidence."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and the interval that holds the true one with at least 95 % confidence."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result.

    part:      which part of the bench (`packet`, `read`, ...).
    name:      what was measured, in words; against what, where it is a ratio.
    unit:      of `interval`; "" for a ratio.
    interval:  of the median of the samples.
    detail:    what else belongs in the line (absolute figures), in words.
    threshold: what the figure must keep; None where it is for information.
    better:    which side of the threshold is the good one.
    """

    part: str
    name: str
    unit: str
    interval: Interval
    detail: str = ""
    threshold: float | None = None
    better: Literal["higher", "lower"] = "lower"

    @property
    def missed(self) -> bool:
        """Whether even the favourable end of the interval lies on the wrong side of the threshold."""
        if self.threshold is None:
            return False
        if self.better == "higher":
            return self.interval.high < self.threshold
        return self.interval.low > self.threshold


def median_ranks(samples: int) -> tuple[int, int]:
    """The 0-based ranks of those two sorted samples that enclose the true median with 95 % confidence or more.

    The number of samples below the true median is binomial(n, 1/2), whatever the distribution is. So the interval from
    the k-th smallest to the k-th largest misses it with probability 2 * P(fewer than k below); the largest k that keeps
    this within 5 % is taken. (Distribution-free interval for a quantile: e.g. Conover, Practical Nonparametric
    Statistics, section 3.2.) Raises ValueError below `LEAST_SAMPLES`.
    """
    if samples < LEAST_SAMPLES:
        raise ValueError(f"{samples} samples cannot give a 95 % interval of the median; {LEAST_SAMPLES} or more can")
    missing, rank = 0.0, 0
    while True:
        missing += 2 * math.comb(samples, rank) / 2**samples
        if missing > 1 - CONFIDENCE:
            return rank - 1, samples - rank
        rank += 1


def interval(samples: Sequence[float]) -> Interval:
    """The median with its 95 % interval; with too few samples for one, the whole range stands in for it."""
    ordered = sorted(samples)
    low, high = median_ranks(len(ordered)) if len(ordered) >= LEAST_SAMPLES else (0, len(ordered) - 1)
    return Interval(ordered[low], statistics.median(ordered), ordered[high])


def high_quantile(samples: Sequence[float], share: float) -> Interval:
    """The sample that this share is not above, such as 0.99.

    Below the interval the true quantile lies with 5 % probability at most: how many samples are below it is
    binomial(n, share). Its upper end is the highest sample; few samples say no more of a high quantile.
    """
    ordered, number = sorted(samples), len(samples)
    below, rank = 0.0, 0
    while (below := below + _binomial(number, rank, share)) <= 1 - CONFIDENCE:
        rank += 1
    return Interval(ordered[max(0, rank - 1)], ordered[math.ceil(share * number) - 1], ordered[-1])


def _binomial(number: int, hits: int, share: float) -> float:
    return math.comb(number, hits) * share**hits * (1 - share) ** (number - hits)


def ratios(base: Sequence[float], variant: Sequence[float]) -> list[float]:
    """Throughput of the variant as a share of the base's, round by round, from costs per packet."""
    return [b / v for b, v in zip(base, variant, strict=True)]


def differences(base: Sequence[float], variant: Sequence[float]) -> list[float]:
    """What the variant adds to the base, round by round."""
    return [v - b for b, v in zip(base, variant, strict=True)]


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """The first and third quartile: the spread that the middle half of the samples has."""
    if len(samples) < 2:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third
