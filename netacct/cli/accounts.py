"""`netacct accounts`: what finished pods got and sent, exactly, from the files that the agent leaves."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from netacct.accounting import accounts
from netacct.accounting.accounts import Account
from netacct.accounting.accounts_read import GROUPS, Selection, Sum, read_directory, read_files, sums
from netacct.accounting.series import Flow
from netacct.cli import common, configuration, output
from netacct.errors import PermissionRefusedError, UsageError
from netacct.model import Count, Direction

HEADER = ("NAMESPACE", "POD", "WORKLOAD", "ADDRESS", "START", "END", "STATE", "RECEIVED", "TRANSMITTED")
SUM_HEADER = ("LEASES", "INCOMPLETE", "START", "END", "RECEIVED", "TRANSMITTED")

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "accounts",
        help="exact totals of finished pods",
        description="Reads the accounts that the agent writes into accounts_dir: one for each closed lease, which is a "
        "pod's tenure of one address. A lease that lasted into the time from --since to --until is taken whole. "
        "Received and transmitted are bytes (layer 3).",
    )
    choose = parser.add_argument_group("which")
    choose.add_argument("-n", "--namespace", default="", help="only this namespace")
    choose.add_argument("--workload", type=_name, metavar="[KIND/]NAME", help="only pods of this owner")
    choose.add_argument("--pod", default="", help="only pods of this name")
    choose.add_argument(
        "-l", "--label", action="append", default=[], type=_label, metavar="NAME=VALUE", help="only with this label"
    )
    choose.add_argument(
        "--since",
        type=_time,
        metavar="TIME",
        help="only what ended since; RFC 3339, a date (UTC), or 90m, 12h, 7d, 2w ago",
    )
    choose.add_argument("--until", type=_time, metavar="TIME", help="only what began before")
    choose.add_argument("--traffic", action="append", default=[], metavar="CLASS", help="only bytes of this class")
    choose.add_argument("--open", action="store_true", help="also leases that last, as of some minutes ago")
    parser.add_argument(
        "--by", choices=("lease", *GROUPS), default="lease", help="sum what belongs together (default lease)"
    )
    parser.add_argument(
        "--file", action="append", type=Path, metavar="PATH", help="read this, not accounts_dir; may be given again"
    )
    common(parser)
    output.add_format(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line per account, or per sum of accounts."""
    if args.since is not None and args.until is not None and args.since >= args.until:
        raise UsageError("--since must be before --until")
    selection = _selection(args)
    classes: set[str] = set()
    try:
        records = _noting(_read(args), classes)
        if args.by == "lease":
            _show_each([record for record in records if selection.takes(record)], selection, args.output)
        else:
            _show_sums(sums(records, args.by, selection), args.by, args.output)
    except PermissionError as error:
        raise PermissionRefusedError(f"{error.filename}: {error.strerror}") from error
    for traffic in args.traffic:
        if traffic not in classes:
            _warn(f"--traffic {traffic}: no account has that class; they have: {', '.join(sorted(classes)) or 'none'}")
    return 0


def _noting(records: Iterable[Account], classes: set[str]) -> Iterator[Account]:
    """The same records; adds the classes of traffic in them to `classes`."""
    for record in records:
        classes.update(traffic for _, traffic in record.counts)
        yield record


def _selection(args: argparse.Namespace) -> Selection:
    kind, _, workload = (args.workload or "").rpartition("/")
    return Selection(
        namespace=args.namespace,
        workload_kind=kind,
        workload=workload,
        pod=args.pod,
        labels=tuple(args.label),
        since=float("-inf") if args.since is None else args.since,
        until=float("inf") if args.until is None else args.until,
        traffic=tuple(args.traffic),
    )


def _read(args: argparse.Namespace) -> Iterable[Account]:
    if args.file:
        if args.open:
            raise UsageError("--open reads accounts_dir: with --file, name the file of open leases last")
        return read_files(args.file, _warn)
    directory = Path(configuration(args).accounts_dir)
    if not directory.exists():
        _warn(f"{directory} does not exist: no agent has written accounts there yet")
        return ()
    return read_directory(directory, _warn, with_open=args.open)


def _show_each(found: list[Account], selection: Selection, form: str) -> None:
    if form == "json":
        output.write_json([_record(record, selection) for record in found])
        return
    rows = []
    for record in found:
        counts = selection.counts(record)
        where = (record.namespace, record.pod, _workload(record.workload_kind, record.workload), record.ip)
        when = (_short(record.start), _short(record.end), record.state)
        rows.append((*where, *when, *_bytes(counts)))
    output.write(output.table(HEADER, rows, right=frozenset({7, 8})))


def _show_sums(found: dict[tuple[str, ...], Sum], by: str, form: str) -> None:
    if form == "json":
        output.write_json([_sum_record(by, name, total) for name, total in found.items()])
        return
    names = {"workload": ("NAMESPACE", "WORKLOAD")}.get(by) or tuple(field.upper() for field in GROUPS[by])
    rows = []
    for name, total in found.items():
        shown = (name[0], _workload(*name[1:])) if by == "workload" else name
        rows.append(
            (*shown, total.leases, total.incomplete, _short(total.start), _short(total.end), *_bytes(total.counts))
        )
    first = len(names)
    right = frozenset({first, first + 1, first + 4, first + 5})
    output.write(output.table((*names, *SUM_HEADER), rows, right=right))


def _record(record: Account, selection: Selection) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(accounts.encode(record))
    counts = selection.counts(record)
    return value | {direction: accounts.traffic_of(counts, direction) for direction in Direction}


def _sum_record(by: str, name: tuple[str, ...], total: Sum) -> dict[str, Any]:
    return {
        **dict(zip(GROUPS[by], name, strict=True)),
        "leases": total.leases,
        "incomplete": total.incomplete,
        "start": accounts.timestamp(total.start),
        "end": accounts.timestamp(total.end),
        **{direction: accounts.traffic_of(total.counts, direction) for direction in Direction},
    }


def _bytes(counts: Mapping[Flow, Count]) -> Iterator[int]:
    for direction in Direction:
        yield sum(count.bytes for flow, count in counts.items() if flow[0] is direction)


def _workload(kind: str, name: str) -> str:
    return f"{kind}/{name}" if name else "-"


def _short(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _warn(text: str) -> None:
    sys.stderr.write(f"netacct: warning: {text}\n")


def _name(text: str) -> str:
    if not re.fullmatch(r"([^/]+/)?[^/]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no workload, as in train or Job/train")
    return text


def _label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no label, as in experiment=scaling-laws")
    return name, value


def _time(text: str) -> float:
    """Unix seconds of a time or date (UTC where it names no zone), or of so long ago."""
    ago = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhdw])", text)
    if ago:
        return time.time() - float(ago[1]) * _UNITS[ago[2]]
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        example = "as in 2025-05-09T21:30:00Z, 2025-05-09, or 12h for twelve hours ago"
        raise argparse.ArgumentTypeError(f"{text!r} is no time, {example}") from None
