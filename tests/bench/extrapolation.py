"""By how much Prometheus' increase() is off, for a pod of five seconds and for a long one, at three scrape intervals.

    python tests/bench/extrapolation.py [--phases N]

Nothing is measured in real time. The agent's own code says what each scrape would have shown (zero first, retention);
promtool imports that as blocks; a real Prometheus, on the loopback of a private network namespace, answers the queries.
Each case is scraped at N phases, because what counts is where the pod's life falls between two scrapes; the table gives
the lowest and the highest error. Needs root, prometheus and promtool. Exit code 0; 77 where one of them is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from netacct.accounting.exposure import ZERO_FIRST, Exposure
from netacct.accounting.series import Limits
from netacct.demo.netns import Namespace
from netacct.model import Count, Direction, Level, Pod, SeriesKey

sys.path.append(str(Path(__file__).resolve().parents[1] / "prometheus"))
from promlab import Prometheus, find_tool, missing

INTERVALS = (1, 15, 30)
RETENTION = Limits().pod_retention
BIRTH = 1_700_006_400
"""When every pod starts (Unix seconds): a multiple of all scrape intervals."""
EX_NOPERM = 77


class Life(NamedTuple):
    """A pod that sends `rate` bytes per second from its first to its last second."""

    name: str
    seconds: int
    rate: int

    def sent(self, age: float) -> int:
        """Bytes that it has sent `age` seconds after its start."""
        return int(self.rate * min(max(age, 0.0), self.seconds))


class Case(NamedTuple):
    """A board over the last `span` seconds, opened `age` seconds after a pod's start."""

    life: Life
    title: str
    age: int
    span: int

    @property
    def truth(self) -> int:
        """Bytes that the pod sent within the board's range."""
        return self.life.sent(self.age) - self.life.sent(self.age - self.span)


BRIEF = Life("five-seconds", 5, 100_000_000)
LONG = Life("two-hours", 7200, 1_000_000)
CASES = (
    Case(BRIEF, "5 s pod, 2 min after its start", 120, 3600),
    Case(BRIEF, "5 s pod, 5 min after its start", 300, 3600),
    Case(BRIEF, "5 s pod, series ended", 1800, 3600),
    Case(LONG, "2 h pod, while it runs, last hour", 5400, 3600),
    Case(LONG, "2 h pod, series ended", 9000, 4 * 3600),
)
QUERIES = {
    "`increase(x[range])`": "increase({0}) / {1} - 1",
    "`max_over_time(x[range]) - min_over_time(x[range])`": "(max_over_time({0}) - min_over_time({0})) / {1} - 1",
}
PEAK = "max_over_time(rate({0}[2m])[20m:5s]) / {1}"
PEAK_AGE = 1200


def samples(life: Life, interval: int, phase: float) -> Iterator[tuple[float, int]]:
    """What a scraper sees of a pod that sends: age of the pod and value, until its series ends."""
    name = ("team-a", life.name)
    pod = Pod(*name, uid=life.name)
    series = SeriesKey(Level.POD, name, Direction.TRANSMIT, "internet")
    exposure = Exposure(zero_first=ZERO_FIRST, patience=RETENTION)
    age = phase
    while age <= life.seconds + RETENTION + interval:
        alive = [(Level.POD, name, pod)] if age - life.seconds <= RETENTION else []
        sent = life.sent(age)
        shown = exposure.view({series: Count(sent, sent // 1000)}, alive, age).totals
        if series in shown:
            yield age, shown[series].bytes
        age += interval


def openmetrics(phases: int) -> Iterator[str]:
    """Every series of every case, as OpenMetrics text with timestamps."""
    yield "# TYPE sent_bytes counter\n"
    for life in (BRIEF, LONG):
        for interval in INTERVALS:
            for number in range(phases):
                labels = f'pod="{life.name}",interval="{interval}",phase="{number}"'
                for age, value in samples(life, interval, interval * (number + 0.5) / phases):
                    yield f"sent_bytes_total{{{labels}}} {value} {BIRTH + age:.3f}\n"
    yield "# EOF\n"


def load(promtool: str, folder: Path, phases: int) -> None:
    """Import all series into `folder`/data."""
    text = folder / "samples.txt"
    with text.open("w", encoding="ascii") as file:
        file.writelines(openmetrics(phases))
    blocks = [promtool, "tsdb", "create-blocks-from", "openmetrics", str(text), str(folder / "data")]
    subprocess.run(blocks, check=True, stdout=subprocess.DEVNULL)


def spread(server: Prometheus, query: str, age: int, phases: int) -> tuple[float, float]:
    """The lowest and highest answer over all phases."""
    values = [vector.values[0] for vector in server.instant(query, BIRTH + age)]
    if len(values) != phases:
        raise RuntimeError(f"{len(values)} of {phases} phases answer {query}")
    return min(values), max(values)


def selector(life: Life, interval: int, span: str = "") -> str:
    """One pod at one scrape interval, all phases."""
    return f'sent_bytes_total{{pod="{life.name}",interval="{interval}"}}{span}'


def table(server: Prometheus, phases: int) -> Iterator[str]:
    """Markdown: the errors by case and interval, for each way to ask; then the peak of a load that has just begun."""
    for title, query in QUERIES.items():
        yield f"| {title} | " + " | ".join(f"scraped each {interval} s" for interval in INTERVALS) + " |"
        yield "|---" * (1 + len(INTERVALS)) + "|"
        for case in CASES:
            cells = []
            for interval in INTERVALS:
                asked = query.format(selector(case.life, interval, f"[{case.span}s]"), case.truth)
                low, high = spread(server, asked, case.age, phases)
                cells.append(f"{low:+.1%} … {high:+.1%}")
            yield f"| {case.title} | " + " | ".join(cells) + " |"
        yield ""
    yield (
        "| two-minute mean, first 20 min | " + " | ".join(f"scraped each {interval} s" for interval in INTERVALS) + " |"
    )
    yield "|---" * (1 + len(INTERVALS)) + "|"
    peaks = (spread(server, PEAK.format(selector(LONG, i), LONG.rate), PEAK_AGE, phases) for i in INTERVALS)
    yield "| peak of a steady load | " + " | ".join(f"x {low:.2f} … {high:.2f}" for low, high in peaks) + " |"


def main(argv: Sequence[str]) -> int:
    """Print the tables; returns the exit code."""
    parser = argparse.ArgumentParser(prog="extrapolation", description="How far increase() is off.")
    parser.add_argument("--phases", type=int, default=20, help="phases of each scrape interval (default: 20)")
    options = parser.parse_args(argv)
    if options.phases < 1:
        parser.error("--phases is at least 1")
    promtool = find_tool("promtool")
    reason = missing("prometheus", "promtool")
    if reason or promtool is None:
        print(f"extrapolation: {reason}", file=sys.stderr)
        return EX_NOPERM
    with tempfile.TemporaryDirectory(prefix="netacct-bench-") as folder:
        load(promtool, Path(folder), options.phases)
        space = Namespace("prometheus")
        space.run(["ip", "link", "set", "lo", "up"])
        server = Prometheus(space, Path(folder), "{}\n", 9090, "--storage.tsdb.retention.time=100y")
        try:
            server.wait_ready()
            for line in table(server, options.phases):
                print(line)
        finally:
            server.stop()
            space.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
