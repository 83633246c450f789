"""`netacct demo`: real traffic through a node made of network namespaces, and whether the agent counted all of it."""

from __future__ import annotations

import argparse
import sys

from netacct.cli import output
from netacct.errors import EX_FAILURE


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "demo",
        help="watch the agent count known traffic, in namespaces of its own",
        description="Build a node, four pods and their peers from network namespaces, start the agent in the node, "
        "drive known traffic of both families through every path that is counted, and compare. "
        "Exit code 0 only when every series is exact.",
    )
    parser.add_argument("--keep", action="store_true", help="leave it running with a little traffic, until Ctrl-C")
    parser.add_argument(
        "--datapath", choices=("auto", "iptables", "nftables"), default="auto", help="which one to show"
    )
    parser.add_argument(
        "--pods",
        choices=("auto", "cni", "veth"),
        default="auto",
        help="who makes them: the real CNI plugins (auto: where they are installed), or plain veth pairs",
    )
    output.add_format(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 when all is exact, else 1."""
    from netacct.demo import report, session  # noqa: PLC0415 -- other commands need none of it
    from netacct.demo.stage import Row  # noqa: PLC0415 -- as above

    keep = ["--keep"] if args.keep else []
    session.become_root(
        ["demo", f"--datapath={args.datapath}", f"--pods={args.pods}", f"--output={args.output}", *keep]
    )

    def show(rows: list[Row]) -> None:
        if args.output == "json":
            output.write_json(report.document(rows))
        else:
            output.write(output.table(report.HEADER, report.cells(rows), report.NUMBERS))
            output.write(report.verdict(rows) + "\n")
        sys.stdout.flush()

    def say(line: str) -> None:
        sys.stderr.write(f"netacct demo: {line}\n")

    rows = session.perform(args.datapath, args.pods, show, say, keep=args.keep)
    return 0 if report.exact(rows) else EX_FAILURE
