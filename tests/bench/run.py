"""What netacct costs: packet path, reading, scrape, memory, start. As root; everything in private network namespaces.

    python tests/bench/run.py [--check] [--rounds N] [--scrapes N] [--only PART]... [--out DIR]

Prints a table, and writes it with every raw sample to a file in DIR. Exit code 0; 1 with --check where a figure misses
its threshold by more than noise explains; 2 for a wrong command line. docs/benchmarks.md explains the method.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import bench_apiserver
import bench_cluster
import bench_identity
import bench_lists
import bench_packet
import bench_read
import bench_report
import bench_running
import bench_write
from bench_stats import Figure

PARTS = ("packet", "read", "write", "lists", "scrape", "memory", "start", "identity", "apiserver")
ON_DEMAND = ("cluster",)
"""What runs only where it is named: it needs `make setup-cluster`."""
RESULTS = Path(__file__).parent / "results"
CHECK_ROUNDS = 9
EX_NOPERM = 77


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="bench", description="Measure what netacct costs.")
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its threshold")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the packet path (default: 15)")
    parser.add_argument("--scrapes", type=int, default=10_000, help="scrapes of the memory part (default: 10000)")
    parser.add_argument("--only", action="append", choices=PARTS + ON_DEMAND, help="run this part (may be repeated)")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for raw samples (default: tests/bench/results)"
    )
    options = parser.parse_args(argv)
    if options.rounds < 1 or options.scrapes < 1:
        parser.error("--rounds and --scrapes are at least 1")
    if options.check and options.rounds < CHECK_ROUNDS:
        parser.error(f"--check needs {CHECK_ROUNDS} rounds or more: the intervals of fewer say little")
    return options


def measure(options: argparse.Namespace, folder: Path) -> tuple[list[Figure], dict[str, Any]]:
    """Run the chosen parts; returns their figures and raw samples."""
    runs: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Figure]]]] = {
        "packet": (lambda: bench_packet.measure(options.rounds, folder, random.Random()), bench_packet.figures),
        "read": (lambda: bench_read.measure(folder), bench_read.figures),
        "write": (lambda: bench_write.measure(folder), bench_write.figures),
        "lists": (lambda: bench_lists.measure(folder), bench_lists.figures),
        "scrape": (lambda: bench_running.scrape(folder / "scrape"), bench_running.scrape_figures),
        "memory": (lambda: bench_running.memory(folder / "memory", options.scrapes), bench_running.memory_figures),
        "start": (lambda: bench_running.start(folder / "start"), bench_running.start_figures),
        "identity": (lambda: bench_identity.measure(folder / "identity"), bench_identity.figures),
        "apiserver": (lambda: bench_apiserver.measure(folder / "apiserver"), bench_apiserver.figures),
        "cluster": (lambda: bench_cluster.measure(folder / "cluster"), bench_cluster.figures),
    }
    figures: list[Figure] = []
    samples: dict[str, Any] = {}
    for part in PARTS + ON_DEMAND:
        if part in (options.only or PARTS):
            print(f"{part} ...", file=sys.stderr)
            run, summarize = runs[part]
            raw = run()
            samples[part] = bench_packet.as_rows(raw) if part == "packet" else raw
            figures += summarize(raw)
    return figures, samples


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns the exit code."""
    options = parse(argv)
    if os.geteuid():
        print("bench: needs root, to make network namespaces and rules in them", file=sys.stderr)
        return EX_NOPERM
    signal.signal(signal.SIGTERM, _interrupt)
    facts = bench_report.machine()
    with tempfile.TemporaryDirectory(prefix="netacct-bench-") as folder:
        figures, samples = measure(options, Path(folder))
    command = " ".join(["tests/bench/run.py", *argv])
    print("\n".join(f"{name}: {value}" for name, value in {"command": command, **facts}.items()))
    print(f"\n{bench_report.table(figures)}")
    print(f"\nraw samples: {bench_report.write(options.out, command, facts, figures, samples)}")
    missed = [figure for figure in figures if figure.missed]
    for figure in missed:
        print(f"bench: {figure.name}: {figure.interval.median:.3f} misses {figure.threshold}", file=sys.stderr)
    return 1 if missed and options.check else 0


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(sys.argv[1:]))
    sys.exit(130)
