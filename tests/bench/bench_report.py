"""What the bench prints, and the file of raw samples that stands behind it."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_netns import ToolError, run
from bench_stats import Figure

import netacct

TOOLS = {
    "iptables": ("iptables-legacy", "--version"),
    "ipset": ("ipset", "--version"),
    "iproute2": ("ip", "-Version"),
    "gcc": ("gcc", "-dumpfullversion"),
}
LIBRARIES = ("python-iptables", "pyroute2", "prometheus-client")


def machine() -> dict[str, str]:
    """What the figures depend on: load, kernel, CPU, versions. Nothing that names the machine. Call it first."""
    facts = {
        "load": f"{os.getloadavg()[0]:.2f} before the start",
        "kernel": platform.release(),
        "cpu": _cpu_model(),
        "python": platform.python_version(),
        "netacct": netacct.__version__,
        "commit": _commit(),
    }
    facts |= {name: run(*argv).strip().splitlines()[0] for name, argv in TOOLS.items()}
    return facts | {name: importlib.metadata.version(name) for name in LIBRARIES}


def table(figures: Iterable[Figure]) -> str:
    """The figures as a Markdown table, which a terminal shows well enough too."""
    rows: list[tuple[str, ...]] = [("figure", "median", "95 % interval", "threshold", "verdict", "detail")]
    rows += [_row(figure) for figure in figures]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def write(
    folder: Path, command: str, facts: Mapping[str, str], figures: Sequence[Figure], samples: Mapping[str, Any]
) -> Path:
    """Write raw samples and figures to `folder`, named by today's date; returns the file. Never overwrites one.

    `facts` are those of the machine, from before the run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    names = (f"{today}.json" if number == 1 else f"{today}-{number}.json" for number in range(1, 1000))
    path = next(folder / name for name in names if not (folder / name).exists())
    content = {
        "command": command,
        "date": today,
        "machine": facts,
        "figures": [_as_json(figure) for figure in figures],
        "samples": samples,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _row(figure: Figure) -> tuple[str, ...]:
    low, median, high = (
        _number(figure, value) for value in (figure.interval.low, figure.interval.median, figure.interval.high)
    )
    unit = f" {figure.unit}" if figure.unit else ""
    if figure.threshold is None:
        threshold, verdict = "", ""
    else:
        threshold = f"{'>=' if figure.better == 'higher' else '<='} {figure.threshold:g}{unit}"
        verdict = "MISSED" if figure.missed else "kept"
    return figure.name, median + unit, f"{low} to {high}", threshold, verdict, figure.detail


def _number(figure: Figure, value: float) -> str:
    return f"{value:.2f}" if figure.unit else f"{value:.3f}"


def _as_json(figure: Figure) -> dict[str, Any]:
    interval = figure.interval
    return {
        "part": figure.part,
        "name": figure.name,
        "unit": figure.unit or "ratio",
        "median": interval.median,
        "low": interval.low,
        "high": interval.high,
        "threshold": figure.threshold,
        "missed": figure.missed,
        "detail": figure.detail,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    lines = [line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name")]
    return f"{len(lines)} x {lines[0]}" if lines else platform.machine()


def _commit() -> str:
    """The commit that was measured, with a `+` where the working tree differs from it."""
    here = str(Path(__file__).parent)
    try:
        dirty = run("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
        return run("git", "-C", here, "rev-parse", "--short", "HEAD").strip() + ("+" if dirty else "")
    except (ToolError, FileNotFoundError):
        return "unknown"
