"""The packet path: what one packet costs with and without us. Variants take turns, in random order."""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import bench_product
import bench_stats
from bench_flows import make_flows, random_cidrs
from bench_lane import Flow, Lane, compile_blast
from bench_product import Booked
from bench_stats import Figure
from bench_variants import Variant, make_variants

from netacct.model import Scope

WARM, COUNT = 20_480, 102_400
"""Packets of one turn: each a multiple of every flow's number of routes together, so that all routes are used alike."""
MANY_CIDRS, MORE_CIDRS = 8000, 10_000
ROUNDS_PER_LANE = 5
"""New lanes after so many rounds: where the kernel happens to put a lane's tables is chance too."""
OUT, IN, TO_NODE, FROM_NODE = "pod to internet", "internet to pod", "pod to node", "node to internet"
ANYWHERE, LISTED = "pod to 2,048 addresses anywhere", "pod to 2,048 listed addresses"
FROM_4096, TO_4096 = "4,096 pods to internet", "internet to 4,096 pods"
CLOUD, NFT_CLOUD = f"netacct, {MANY_CIDRS:,} CIDRs", f"netacct, nftables, {MORE_CIDRS:,} CIDRs"
OF_MORE = f" ({MORE_CIDRS:,} CIDRs)"


class Row(NamedTuple):
    """A comparison: `variant` against `base` on one flow."""

    flow: str
    base: str
    variant: str
    threshold: float | None = None


ROWS = (
    Row(OUT, "kubernetes", "kubernetes + netacct", 0.94),
    Row(OUT, "bare", "netacct", 0.88),
    Row(OUT, "bare", "netacct, 4,096 addresses", 0.86),
    Row(ANYWHERE, "bare", CLOUD, 0.83),
    Row(LISTED, "bare", CLOUD),
    Row(OUT, "kubernetes", "kubernetes + netacct, nftables", 0.92),
    Row(OUT, "bare", "netacct, nftables", 0.90),
    Row(OUT, "bare", "netacct, nftables, 4,096 addresses", 0.88),
    Row(ANYWHERE + OF_MORE, "bare", NFT_CLOUD, 0.88),
    Row(LISTED + OF_MORE, "bare", NFT_CLOUD),
    Row(OUT, "netacct, nftables", "netacct, nftables, marks"),
    Row(TO_NODE, "bare", "netacct, nftables"),
    Row(FROM_NODE, "bare", "netacct, nftables"),
    Row(TO_NODE, "netacct, nftables", "netacct, nftables, host pods"),
    Row(FROM_NODE, "netacct, nftables", "netacct, nftables, host pods"),
    Row(IN, "bare", "netacct, nftables"),
    Row(FROM_4096, "bare, 4,096 addresses", "netacct, nftables, 4,096 addresses"),
    Row(TO_4096, "bare, 4,096 addresses", "netacct, nftables, 4,096 addresses"),
    Row(OUT, "bare", "naive, 110 pods"),
    Row(OUT, "bare", "naive, 250 pods"),
    Row(OUT, "bare", "empty mangle table"),
    Row(OUT, "netacct", "netacct, marks"),
    Row(OUT, "kubernetes + netacct", "kubernetes + netacct, marks"),
    Row(TO_NODE, "bare", "netacct, pods only"),
    Row(TO_NODE, "netacct, pods only", "netacct"),
    Row(FROM_NODE, "bare", "netacct, pods only"),
    Row(FROM_NODE, "netacct, pods only", "netacct"),
    Row(FROM_NODE, "kubernetes", "kubernetes + netacct"),
    Row(IN, "kubernetes", "kubernetes + netacct"),
    Row(IN, "bare", "netacct"),
    Row(FROM_4096, "bare, 4,096 addresses", "netacct, 4,096 addresses"),
    Row(TO_4096, "bare, 4,096 addresses", "netacct, 4,096 addresses"),
)


class Turn(NamedTuple):
    """What is measured as one: a variant on a flow."""

    variant: str
    flow: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn's result; `position` is its place in the round's random order."""

    round: int
    position: int
    turn: Turn
    cpu_ns: float
    wall_ns: float


def measure(rounds: int, folder: Path, dice: random.Random) -> list[Sample]:
    """Run so many rounds. Raises RuntimeError where netacct has not counted exactly the packets that were sent."""
    compile_blast()
    seeded = random.Random(MANY_CIDRS)  # the lists are the same in every run; the order of turns is not
    cidrs, more = random_cidrs(seeded, MANY_CIDRS), random_cidrs(seeded, MORE_CIDRS)
    flows, variants = make_flows(folder, {"": cidrs, OF_MORE: more}, seeded), make_variants(folder, cidrs, more)
    samples: list[Sample] = []
    for start in range(0, rounds, ROUNDS_PER_LANE):
        batch = range(start, min(start + ROUNDS_PER_LANE, rounds))
        with _lanes(variants.values()) as lanes:
            for number in batch:
                print(f"packet path: round {number + 1} of {rounds}", file=sys.stderr)
                samples += _round(number, lanes, flows, dice)
            for name, lane in lanes.items():
                _check_counts(variants[name], lane, flows, len(batch))
    return samples


def figures(samples: Sequence[Sample]) -> list[Figure]:
    """The rows of the result."""
    by_turn: dict[Turn, list[float]] = defaultdict(list)
    for sample in sorted(samples, key=lambda sample: sample.round):
        by_turn[sample.turn].append(sample.cpu_ns)
    return [_figure(row, by_turn[Turn(row.base, row.flow)], by_turn[Turn(row.variant, row.flow)]) for row in ROWS]


def _turns() -> list[Turn]:
    both = [Turn(name, row.flow) for row in ROWS for name in (row.base, row.variant)]
    return list(dict.fromkeys(both))


@contextlib.contextmanager
def _lanes(variants: Iterable[Variant]) -> Iterator[dict[str, Lane]]:
    lanes = {variant.name: variant.dress() for variant in variants}
    try:
        yield lanes
    finally:
        for lane in lanes.values():
            lane.close()


def _round(number: int, lanes: dict[str, Lane], flows: dict[str, Flow], dice: random.Random) -> list[Sample]:
    turns = _turns()
    dice.shuffle(turns)
    samples = []
    for position, turn in enumerate(turns):
        cost = lanes[turn.variant].blast(flows[turn.flow], WARM, COUNT)
        samples.append(Sample(number, position, turn, cost.cpu, cost.wall))
    return samples


def _check_counts(variant: Variant, lane: Lane, flows: dict[str, Flow], rounds: int) -> None:
    """A rule that does not count is fast, so the counts must be right for the times to mean anything."""
    if variant.setup is None:
        return
    expected: Counter[Booked] = Counter()
    for turn in _turns():
        if turn.variant == variant.name:
            flow = flows[turn.flow]
            laps = rounds * (WARM + COUNT) // flow.length
            expected.update({booked: packets * laps for booked, packets in flow.books.items()})
    if not variant.host:
        expected = Counter({booked: n for booked, n in expected.items() if booked[0] is not Scope.HOST})
    counted = bench_product.booked_packets(lane.node, variant.setup)
    if counted != expected:
        raise RuntimeError(f"{variant.name}: sent {dict(expected)}, netacct counted {dict(counted)}")


def _figure(row: Row, base: list[float], variant: list[float]) -> Figure:
    added = bench_stats.interval(bench_stats.differences(base, variant))
    first, third = bench_stats.quartiles(variant)
    detail = (
        f"{median(base):,.0f} -> {median(variant):,.0f} ns (middle half {first:,.0f} to {third:,.0f}), "
        f"added {added.median:+.0f} ({added.low:+.0f} to {added.high:+.0f})"
    )
    return Figure(
        part="packet",
        name=f"{row.flow}: {row.variant} / {row.base}",
        unit="",
        interval=bench_stats.interval(bench_stats.ratios(base, variant)),
        detail=detail,
        threshold=row.threshold,
        better="higher",
    )


def as_rows(samples: Sequence[Sample]) -> dict[str, list[str]]:
    """The samples as they go to the file: one line of CSV for each turn, in the order in which they were taken."""
    lines = [
        f"{s.round},{s.position},{s.turn.variant!r},{s.turn.flow!r},{s.cpu_ns:.1f},{s.wall_ns:.1f}" for s in samples
    ]
    return {"columns": ["round", "position", "variant", "flow", "cpu_ns", "wall_ns"], "rows": lines}
