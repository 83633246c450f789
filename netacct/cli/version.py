"""`netacct version`."""

from __future__ import annotations

import argparse
import platform

import netacct
from netacct.cli import output


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser("version", help="print the version")
    output.add_format(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the versions of netacct, Python and the kernel."""
    versions = {"version": netacct.__version__, "python": platform.python_version(), "kernel": platform.release()}
    if args.output == "json":
        output.write_json(versions)
    else:
        output.write("netacct {version} (python {python}, kernel {kernel})\n".format(**versions))
    return 0
