"""What commands print: tables for people, JSON for programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add `-o table|json`; the choice is `args.output`."""
    parser.add_argument(
        "-o", "--output", choices=("table", "json"), default="table", help="for people, or for programs (default table)"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]], right: frozenset[int] = frozenset()) -> str:
    """Aligned columns under a header, two blanks apart, each line ended.

    Args:
        header: the columns' names.
        rows: one cell per column, shown by `str`.
        right: the columns (from 0) whose cells, being numbers, line up on the right.
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip() + "\n")
    return "".join(lines)


def some(items: Sequence[str], room: int) -> str:
    """As many items as `room` characters hold, the first in any case, and how many are left out."""
    shown = 1
    while shown < len(items) and len(",".join(items[: shown + 1])) <= room:
        shown += 1
    left = len(items) - shown
    return ",".join(items[:shown]) + (f" and {left} more" if left > 0 else "")


def write(text: str) -> None:
    """Print to stdout as it is."""
    sys.stdout.write(text)


def write_json(value: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
