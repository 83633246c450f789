"""`netacct check`: whether the agent would start with these files, and with which values."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from netacct import clock, config
from netacct.cli import common, flags, output
from netacct.errors import EX_CONFIG, ConfigError
from netacct.identity import pods_file
from netacct.model import WHOLE

T = TypeVar("T")


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "check",
        help="check configuration, policy and pods file; print what is in effect",
        description="Reads the configuration, the policy and the pods file as the agent would, prints every key with "
        "its value and where that comes from, and each error. Exit code 78 where there is one. Changes nothing.",
    )
    common(parser)
    output.add_format(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check all files, print settings to stdout and, for people, errors to stderr."""
    effective, errors = config.examine(args.config_file, flags(args))
    policy = _attempt(lambda: _policy(effective), errors)
    pods = _attempt(lambda: _pods(effective), errors)
    cluster, faults = (None if errors else _attempt(lambda: _cluster(effective), errors)) or ([], [])
    settings = config.effective(effective)
    if args.output == "json":
        output.write_json(
            {
                "valid": not errors,
                "settings": [setting._asdict() for setting in settings],
                "policy": policy,
                "pods": pods,
                "cluster_ranges": cluster,
                "cluster_faults": faults,
                "errors": [
                    {"file": e.file, "line": e.line, "key": e.key, "found": e.found, "allowed": e.allowed}
                    for e in errors
                ],
            }
        )
        return EX_CONFIG if errors else 0
    output.write(output.table(("KEY", "VALUE", "FROM"), [row for setting in settings for row in _rows(setting)]))
    if policy is not None:
        output.write("policy: {name} ({file}), {cidrs} CIDRs, hash {hash}\n".format_map(policy))
    for line in cluster:
        note = f"; not used: {line['unused']}" if line["unused"] else ""
        output.write("cluster range: {network} {traffic}, {because}".format_map(line) + f"{note}\n")
    output.write("".join(f"not taken for a cluster range: {why}\n" for why in faults))
    if pods is not None:
        note = f" ({pods['note']})" if "note" in pods else ""
        output.write("pods file: {file}, {pods} pods, {addresses} addresses".format_map(pods) + f"{note}\n")
    sys.stdout.flush()
    for error in errors:
        sys.stderr.write(f"netacct: error: {error}\n")
    return EX_CONFIG if errors else 0


def _policy(effective: config.Config) -> dict[str, Any]:
    from netacct import policy_file  # noqa: PLC0415 -- other commands start faster without it

    policy = policy_file.load(effective.policy, named_at=effective.origins.get("policy", ""))
    return {"file": policy.path, "name": policy.name, "hash": policy.hash, "cidrs": len(policy.prefixes)}


def _cluster(effective: config.Config) -> tuple[list[dict[str, str]], list[str]]:
    """The ranges of the whole cluster that are found now, with why one is not used; and what cannot be a range."""
    from netacct import desired, policy_file, policy_found, sources  # noqa: PLC0415 -- other commands start faster without it

    policy = policy_file.load(effective.policy)
    local = desired.local_ranges(effective)
    found, faults = sources.cluster_ranges(effective, local.facts)
    unused = dict(policy_found.merge(policy, found, local.networks).unused)
    lines = [
        {"network": str(fact.network), "traffic": fact.traffic, "because": fact.origin, "unused": unused.get(fact, "")}
        for fact in policy_found.sure(policy, found, local.networks)
    ]
    return lines, list(faults)


def _pods(effective: config.Config) -> dict[str, Any] | None:
    from netacct.identity import file  # noqa: PLC0415 -- as above

    path = effective.identity.file.path
    if pods_file.SOURCE not in effective.identity.sources:
        return None
    data = file.read(path)
    if data is None:
        return {"file": path, "pods": 0, "addresses": 0, "note": "missing, which is an empty list"}
    observations = pods_file.parse(data, path, clock.now())
    present = [observation for observation in observations if observation.present]
    return {"file": path, "pods": len({o.pod.uid for o in present}), "addresses": sum(o.ip != WHOLE for o in present)}


def _attempt(work: Callable[[], T], errors: list[ConfigError]) -> T | None:
    try:
        return work()
    except ConfigError as error:
        errors.append(error)
        return None


def _rows(setting: config.Setting) -> list[tuple[str, str, str]]:
    """One row; of a list, one for each item."""
    values = setting.value if isinstance(setting.value, list) else [setting.value]
    first, *others = map(_shown, values or ["-"])
    return [(setting.key, first, setting.origin), *(("", other, "") for other in others)]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
