"""`netacct doctor`: what is, or will be, in the way of counting on this node."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from netacct.cli import common, flags, output
from netacct.errors import EX_FAILURE, NetacctError

if TYPE_CHECKING:
    from netacct.doctor.finding import Finding

NPD_OK, NPD_PROBLEM, NPD_UNKNOWN = 0, 1, 2
NPD_WIDTH = 80
"""Exit codes, and how much of the message is kept (node-problem-detector, docs/custom_plugin_monitor.md)."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="find what is, or will be, in the way of counting on this node",
        description="Looks at kernel, rules, agent, locks, interfaces and files, and says of each thing that is in the "
        "way what it is, why it matters and what to do. Changes nothing. Exit code 1 where something is an error or a "
        "warning.",
    )
    common(parser)
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json", "npd"),
        default="table",
        help="for people, for programs, or for node-problem-detector: one line, exit code 0 (good), 1 (a problem) or "
        "2 (not known) (default table)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, judge, and print."""
    if args.output == "npd":
        return _npd(args)
    found = _examine(args)
    if args.output == "json":
        output.write_json([dataclasses.asdict(item) for item in found])
    else:
        output.write("\n".join(map(_paragraph, found)) or "nothing found\n")
    return EX_FAILURE if _problems(found) else 0


def _npd(args: argparse.Namespace) -> int:
    """One line that fits on stdout, which becomes the condition's message, and all that was found on stderr."""
    try:
        found = _examine(args)
    except (NetacctError, OSError) as error:
        output.write(_fit(str(error)))
        return NPD_UNKNOWN
    sys.stderr.write("".join(f"{item.severity} {item.name}: {item.what}\n" for item in found))
    problems = _problems(found)
    if problems:
        more = f" (+{len(problems) - 1})" if len(problems) > 1 else ""
        output.write(_fit(f"{problems[0].name}{more}: {problems[0].what}"))
        return NPD_PROBLEM
    unseen = [item for item in found if item.name == "could-not-look"]
    output.write(
        _fit(f"could not look at {', '.join(item.where for item in unseen)}" if unseen else "no problem found")
    )
    return NPD_UNKNOWN if unseen else NPD_OK


def _examine(args: argparse.Namespace) -> list[Finding]:
    from netacct.doctor import checks, gather  # noqa: PLC0415 -- other commands start faster without it

    return checks.examine(gather.gather(args.config_file, flags(args)))


def _problems(found: list[Finding]) -> list[Finding]:
    return [item for item in found if item.severity != "info"]


def _paragraph(item: Finding) -> str:
    lines = (("what", item.what), ("where", item.where), ("why", item.why), ("do", item.do))
    return f"{item.severity}: {item.name}\n" + "".join(f"  {name + ':':<7}{text}\n" for name, text in lines)


def _fit(text: str) -> str:
    """One line of NPD_WIDTH bytes at most."""
    line = " ".join(text.split()).encode()
    short = line if len(line) <= NPD_WIDTH else line[: NPD_WIDTH - 3] + b"..."
    return short.decode("utf-8", "ignore") + "\n"
