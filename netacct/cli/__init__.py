"""The command line: a file per command, each with `add(subparsers)` and `run(args) -> exit code`.

Nothing heavy is imported here or at the head of a command's file: `netacct --help` answers at once, and a command that
needs neither structlog nor pyroute2 never loads them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import netacct
from netacct.errors import EX_FAILURE, NetacctError

COMMANDS = ("run", "check", "rules", "pods", "demo", "version")

EX_SIGPIPE = 128 + 13
EX_INTERRUPTED = 128 + 2
"""What a shell makes of a program that a signal ended; both are ways to leave that need no message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    `argv` is without the program's name; the process's own by default. A `NetacctError` becomes one line on stderr and
    its exit code. argparse itself exits (SystemExit) with 2 for a wrong command line and with 0 after --help.
    """
    args = parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except NetacctError as error:
        sys.stderr.write(f"netacct: error: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        # The reader has left. Python flushes stdout once more at exit, and must find somewhere to put the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EX_SIGPIPE
    except KeyboardInterrupt:
        return EX_INTERRUPTED
    except OSError as error:
        sys.stderr.write(f"netacct: error: {error}\n")
        return EX_FAILURE
    return code


def parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    top = argparse.ArgumentParser(
        prog="netacct",
        description="Per-pod and per-namespace network accounting, exact to the byte.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"netacct {netacct.__version__}")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"netacct.cli.{name}").add(subparsers)
    return top
