"""`tools/cluster demo|in|kubectl|down`: the cluster for a person."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from textwrap import dedent
from types import FrameType

from clusterlab import demo, kept
from clusterlab.cluster import Cluster
from clusterlab.hosts import HostError
from clusterlab.prerequisites import MissingError

_SKIPPED = 77
_LOOK = """
    The cluster stays. To look around:
      tools/cluster kubectl get pods -A -o wide
      tools/cluster in node1 netacct pods
      tools/cluster in node1 netacct rules show
      tools/cluster in node1 curl -s http://127.0.0.1:19112/metrics
      tools/cluster in node1          (a shell; there are also: node2, cp, internet)
    To take it down:
      tools/cluster down
"""


def main() -> int:
    """Parse the command line and do it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools/cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("demo", help="bring a cluster up, run an experiment, compare, take it down")
    shown.add_argument("--keep", action="store_true", help="leave it running")
    shown.add_argument("--nodes", type=int, default=2, help="how many (default 2)")
    shown.add_argument("--proxy-mode", choices=("iptables", "nftables"), default="iptables", help="of kube-proxy")
    entered = commands.add_parser("in", help="run a command in a host of the cluster that was kept; a shell by default")
    entered.add_argument("host")
    entered.add_argument("argv", nargs=argparse.REMAINDER)
    commands.add_parser("kubectl", help="run kubectl on it").add_argument("argv", nargs=argparse.REMAINDER)
    commands.add_parser("down", help="take it down")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    try:
        return _do(args)
    except MissingError as error:
        print(f"skipped: {error}", file=sys.stderr)
        return _SKIPPED
    except (HostError, kept.NoClusterError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _do(args: argparse.Namespace) -> int:
    if args.command == "in":
        kept.enter(args.host, args.argv)
    elif args.command == "kubectl":
        kept.kubectl(args.argv)
    elif args.command == "down":
        kept.down()
    elif kept.exists():
        raise kept.NoClusterError("one is there already; take it down first: tools/cluster down")
    else:
        return _demo(args)
    return 0


def _demo(args: argparse.Namespace) -> int:
    began = time.monotonic()
    cluster = Cluster(
        kept.PREFIX if args.keep else "",
        args.nodes,
        args.proxy_mode,
        kept.WORK if args.keep else None,
        keep=args.keep,
    )
    cluster.up()
    stays = False
    try:
        if args.keep:
            kept.save(cluster)
        print(f"{args.nodes} nodes are Ready after {time.monotonic() - began:.1f} s", flush=True)
        exact = demo.run(cluster, keep=args.keep)
        if args.keep:
            stays = True
            print(dedent(_LOOK), end="")
    finally:
        if not stays:
            cluster.down()
    return 0 if exact else 1


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
