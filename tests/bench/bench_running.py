"""Scrape, memory and start: three measurements of the running agent."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import bench_stats
from bench_agent import PODS, Bed
from bench_stats import Figure, Interval

SCRAPES = 45
APART = 1.1
"""Seconds between scrapes: two within one second share a reading, and would look cheap."""

CHURN_EVERY = 50
CHECKPOINTS = (100, 1000, 5000, 10_000)
FLAT = 1.0
MEGABYTES = 55.0
SCRAPE_MILLISECONDS = 30.0
START_SECONDS = 2.0
STARTS = 9
BRIEF = "{retention: 5s, zero_first: 1s}"
"""Short against the run, so that the series of gone pods leave while it lasts, as they do in a long life."""


def scrape(folder: Path) -> dict[str, list[float]]:
    """Milliseconds of the agent's CPU for each scrape with traffic before it, and for each idle second."""
    bed = Bed(folder)
    try:
        with bed.agent() as agent:
            samples: dict[str, list[float]] = {"scrape": [], "idle": [], "answer": []}
            for number in range(2 * SCRAPES):
                kind = ("scrape", "idle")[number % 2]
                bed.traffic()
                before, start = agent.cpu(), time.monotonic()
                if kind == "scrape":
                    agent.scrape()
                    samples["answer"].append((time.monotonic() - start) * 1e3)
                time.sleep(max(start + APART - time.monotonic(), 0))
                samples[kind].append((agent.cpu() - before) * 1e3)
            return samples
    finally:
        bed.close()


def scrape_figures(samples: dict[str, list[float]]) -> list[Figure]:
    """The rows of the result."""
    rows = (
        (f"CPU of a scrape, {PODS} pods, traffic of every class", "scrape", SCRAPE_MILLISECONDS),
        (f"CPU of {APART} s without a scrape", "idle", None),
        ("time to answer a scrape", "answer", None),
    )
    return [_figure("scrape", name, "ms", samples[key], threshold) for name, key, threshold in rows]


def memory(folder: Path, scrapes: int) -> dict[str, float]:
    """Resident MB of the agent after so many scrapes, with pods coming and going and traffic in between."""
    bed = Bed(folder, BRIEF)
    resident: dict[str, float] = {}
    try:
        with bed.agent() as agent:
            for number in range(1, scrapes + 1):
                if number % CHURN_EVERY == 0:
                    bed.set_pods(number // CHURN_EVERY)
                    bed.traffic()
                agent.scrape()
                if number in {*CHECKPOINTS, scrapes}:
                    resident[f"{number:,}"] = agent.resident()
                    print(f"memory: {number:,} scrapes, {resident[f'{number:,}']:.1f} MB", file=sys.stderr)
        return resident
    finally:
        bed.close()


def memory_figures(resident: dict[str, float]) -> list[Figure]:
    """The rows of the result: RSS at each checkpoint, and its growth from the 5,000th scrape to the last.

    Until then a hundred generations of pods fill what is remembered of the past, which is bounded.
    """
    rows = [
        Figure("memory", f"resident after {scrapes} scrapes", "MB", Interval(value, value, value), "", MEGABYTES)
        for scrapes, value in resident.items()
    ]
    values = list(resident.values())
    grown = values[-1] - resident.get("5,000", values[0])
    interval = Interval(grown, grown, grown)
    return [*rows, Figure("memory", "growth since 5,000 scrapes", "MB", interval, "pods come and go", FLAT)]


def start(folder: Path) -> dict[str, list[float]]:
    """Seconds from exec to the first scrape that has every pod: on a new node, and where counters are in place."""
    samples: dict[str, list[float]] = {"first": [], "again": []}
    folder.mkdir()
    for number in range(STARTS):
        bed = Bed(folder / str(number))
        try:
            for ready_after in samples.values():
                with bed.agent() as agent:
                    ready_after.append(agent.ready_after)
        finally:
            bed.close()
    return samples


def start_figures(samples: dict[str, list[float]]) -> list[Figure]:
    """The rows of the result."""
    rows = (("start on a new node to first scrape", "first"), ("restart to first scrape", "again"))
    return [_figure("start", name, "s", samples[key], START_SECONDS) for name, key in rows]


def _figure(part: str, name: str, unit: str, samples: list[float], threshold: float | None) -> Figure:
    first, third = bench_stats.quartiles(samples)
    detail = f"middle half {first:.2f} to {third:.2f}"
    return Figure(part, name, unit, bench_stats.interval(samples), detail, threshold)
