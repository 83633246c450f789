"""The command line: a file per command, each with `add(subparsers)` and `run(args) -> exit code`.

Nothing heavy is imported here or at the head of a command's file: `netacct --help` answers at once, and a command that
needs neither structlog nor pyroute2 never loads them.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import netacct
from netacct.config import DEFAULT_PATH, FLAGS, Config, load
from netacct.config_keys import LISTEN_FORMS, LOG_FORMATS, LOG_LEVELS, PATH_FORMS, listen_address, telemetry_path
from netacct.errors import EX_FAILURE, NetacctError

COMMANDS = ("run", "check", "rules", "pods", "accounts", "doctor", "demo", "version")

EX_SIGPIPE = 128 + 13
EX_INTERRUPTED = 128 + 2
"""What a shell makes of a program that a signal ended; both are ways to leave that need no message."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    `argv` is without the program's name; the process's own by default. A `NetacctError` becomes one line on stderr and
    its exit code. argparse itself exits (SystemExit) with 2 for a wrong command line and with 0 after --help.
    """
    _open_standard_files()
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr has it: names and paths may be in what no locale prints
        sys.stdout.reconfigure(errors="backslashreplace")
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
        sys.stderr.write(f"netacct: error: {_words(error)}\n")
        _give_up_output()
        return EX_FAILURE
    return code


def _open_standard_files() -> None:
    """Where stdin, stdout or stderr was closed (`>&-`), put /dev/null in its place.

    Else Python has none to write to, and the next file or socket gets the number: a database, into which a library then
    prints its complaints.
    """
    for number, mode in enumerate("rww"):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
            name = ("stdin", "stdout", "stderr")[number]
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 -- for good


def _words(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else error.strerror or str(error)


def _give_up_output() -> None:
    """Where stdout takes no more (a full disk), throw away the rest: Python would complain once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    top = argparse.ArgumentParser(
        prog="netacct",
        description="Per-pod and per-namespace network accounting, exact to the byte.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"netacct {netacct.__version__}")
    kind: type[argparse.ArgumentParser] = _CommandParser
    subparsers = top.add_subparsers(metavar="COMMAND", required=True, parser_class=kind)
    for name in COMMANDS:
        importlib.import_module(f"netacct.cli.{name}").add(subparsers)
    return top


def common(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every command which reads the configuration accepts; `configuration` reads them."""
    group = parser.add_argument_group("configuration", "These win over the file.")
    group.add_argument(
        "--config.file", dest="config_file", metavar="PATH", help=f"instead of {DEFAULT_PATH}, which may be missing"
    )
    group.add_argument(
        FLAGS["web.listen_address"],
        dest="web.listen_address",
        metavar="ADDRESS",
        action="append",
        type=_checked(listen_address, LISTEN_FORMS),
        help="where to serve HTTP; may be given several times (default :19112)",
    )
    group.add_argument(
        FLAGS["web.telemetry_path"],
        dest="web.telemetry_path",
        metavar="PATH",
        type=_checked(telemetry_path, PATH_FORMS),
        help="the path of the metrics (default /metrics)",
    )
    group.add_argument(
        FLAGS["log.level"], dest="log.level", choices=LOG_LEVELS, help="the least that is logged (default info)"
    )
    group.add_argument(
        FLAGS["log.format"],
        dest="log.format",
        choices=LOG_FORMATS,
        help="auto is console on a terminal and logfmt elsewhere (default auto)",
    )


def flags(args: argparse.Namespace) -> dict[str, str | list[str]]:
    """What the flags of `common` set, by configuration key."""
    given = vars(args)
    return {key: given[key] for key in FLAGS if given.get(key) is not None}


def configuration(args: argparse.Namespace) -> Config:
    """The configuration that `args` of a command with the flags of `common` asks for. Raises ConfigError."""
    return load(args.config_file, flags(args))


class _CommandParser(argparse.ArgumentParser):
    """Takes flags in full only: an abbreviation in somebody's unit file would change its meaning with a new flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)


def _checked(read: Callable[[str], object], allowed: str) -> Callable[[str], str]:
    """An argparse type that keeps the text when `read` accepts it."""

    def check(text: str) -> str:
        try:
            read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a valid value (allowed: {allowed})") from None
        return text

    return check
