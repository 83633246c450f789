"""`netacct pods`: addresses, owners and totals, from the running agent."""

from __future__ import annotations

import argparse
from typing import Any

from netacct.cli import common, output
from netacct.cli.asking import ask_agent
from netacct.errors import NetacctError

HEADER = ("NAMESPACE", "POD", "WORKLOAD", "ADDRESSES", "SOURCE", "RECEIVED", "TRANSMITTED")

_ROOM = 32
"""Characters for addresses: two of IPv4, or one of each family where they are short."""


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "pods",
        help="list local pods with their addresses and exact totals",
        description="Asks the running agent, which reads the counters for it. Totals are bytes (layer 3) of all kinds "
        "of peer together, since this boot; a pod beyond metrics.max_pod_series has none of its own and shows 0.",
    )
    parser.add_argument("-n", "--namespace", default="", help="only this namespace")
    common(parser)
    output.add_format(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line per pod."""
    config, pods = ask_agent(args, "pods")
    if pods is None:
        raise NetacctError(f"no agent is running (nothing listens in {config.state_dir})")
    shown = [pod for pod in pods if args.namespace in ("", pod["namespace"])]
    if args.output == "json":
        output.write_json(shown)
        return 0
    output.write(output.table(HEADER, [_row(pod) for pod in shown], right=frozenset({5, 6})))
    return 0


def _row(pod: dict[str, Any]) -> tuple[object, ...]:
    workload = f"{pod['workload_kind']}/{pod['workload']}" if pod["workload"] else "-"
    addresses = pod["addresses"]
    sources = ",".join(pod["sources"])
    totals = (pod["receive_bytes"], pod["transmit_bytes"])
    return (pod["namespace"], pod["pod"], workload, output.some(addresses, _ROOM), sources, *totals)
