"""`netacct run`: the agent."""

from __future__ import annotations

import argparse

from netacct.cli import common, configuration
from netacct.config import DEFAULT_PATH


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "run",
        help="run the agent: install the rules, count, serve metrics",
        description="Runs in the foreground until SIGTERM or SIGINT; reads files anew when they change, and all of "
        "them at SIGHUP. Rules stay when it ends, and the kernel goes on counting for the next start.",
    )
    common(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the agent to its end."""
    from netacct.service import Service  # noqa: PLC0415 -- other commands start faster without it

    return Service(lambda: configuration(args), args.config_file or DEFAULT_PATH).run()
