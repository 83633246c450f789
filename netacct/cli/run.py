"""`netacct run`: the agent."""

from __future__ import annotations

import argparse

from netacct.cli import common, configuration


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "run",
        help="run the agent: install the rules, count, serve metrics",
        description="Runs in the foreground until SIGTERM or SIGINT; SIGHUP reads the configuration anew. Rules stay "
        "when it ends, and the kernel goes on counting for the next start.",
    )
    common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the agent to its end."""
    from netacct.service import Service  # noqa: PLC0415 -- other commands start faster without it

    return Service(lambda: configuration(args)).run()
