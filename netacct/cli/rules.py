"""`netacct rules show|diff|apply|remove|explain`: what is, or should be, in the kernel, and why."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from netacct.cli import common, configuration, output, removal
from netacct.cli.asking import ask_agent
from netacct.errors import EX_FAILURE, UsageError

if TYPE_CHECKING:
    from netacct.config import Config
    from netacct.kernel.plan import Plan
    from netacct.list_files import ListFiles

_NOTHING = "nothing to remove"

FORMATS = ("ipset", "iptables", "ip6tables", "nft")


def add(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register the commands."""
    parser = subparsers.add_parser(
        "rules",
        help="show, compare, apply, remove or explain the rules",
        description="The rules are those that configuration, policy and pods file ask for on this node, now.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    show = _action(actions, "show", _show, "print the rules and sets that this node should have")
    _format(show)
    _action(actions, "diff", _diff, "print how the kernel differs from that; exit code 1 where it does")
    apply = _action(actions, "apply", _apply, "install or repair; counters and totals are kept")
    _dry(apply, "print what should be there instead of making it so")
    remove = _action(actions, "remove", _remove, "book the last values, then take everything of netacct away")
    _dry(remove, "print what would be taken away instead of doing so")
    explain = _action(actions, "explain", _explain, "tell an address's class, and the line that decided")
    explain.add_argument("address", metavar="ADDRESS", help="an IPv4 or IPv6 address")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: object, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    common(parser)
    output.add_format(parser)
    parser.set_defaults(run=run)
    return parser


def _dry(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--dry-run", action="store_true", help=text)
    _format(parser)


def _format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="as input for one tool: `ipset restore`, `iptables-restore --noflush`, `nft -f`",
    )


def _show(args: argparse.Namespace) -> int:
    _require_one_form(args)
    config = configuration(args)
    if not config.enabled:
        sys.stderr.write(
            "netacct: warning: enabled is false in the configuration: none of these rules shall be there\n"
        )
    _print_plan(config, args)
    return 0


def _diff(args: argparse.Namespace) -> int:
    from netacct import choosing  # noqa: PLC0415 -- other commands start faster without it

    config, found = ask_agent(args, "differences")
    if found is None and not config.enabled:
        found = choosing.left_over()
    elif found is None:
        _, datapath = choosing.choose(config)
        datapath.adopt(_plan(config))
        found = [*choosing.left_over(datapath.name), *datapath.verify()]
    _print_lines(args, found)
    return EX_FAILURE if found else 0


def _apply(args: argparse.Namespace) -> int:
    _require_dry(args)
    if args.dry_run:
        from netacct import desired  # noqa: PLC0415 -- other commands start faster without it

        config = configuration(args)
        desired.require_enabled(config)
        _print_plan(config, args)
        return 0
    _print_done(args, _write(args, "apply"), "nothing to do")
    return 0


def _remove(args: argparse.Namespace) -> int:
    _require_dry(args)
    if args.dry_run:
        lines = removal.lines(_plan(_without_obstacles(configuration(args))), args.format)
        output.write("".join(f"{line}\n" for line in lines)) if args.format else _print_done(args, lines, _NOTHING)
        return 0
    _print_done(args, _write(args, "remove"), _NOTHING)
    return 0


def _without_obstacles(config: Config) -> Config:
    """The configuration without what the removal does not ask either: a policy that is wrong, marks that cannot be."""
    return replace(config, policy="default", marks=replace(config.marks, mode="off"))


def _require_dry(args: argparse.Namespace) -> None:
    if args.format and not args.dry_run:
        raise UsageError("--format is for what --dry-run prints; without it nothing is printed for a tool")
    _require_one_form(args)


def _require_one_form(args: argparse.Namespace) -> None:
    if args.format and args.output == "json":
        raise UsageError(f"--format {args.format} and -o json exclude each other: no such tool reads JSON of ours")


def _explain(args: argparse.Namespace) -> int:
    from netacct import explain, policy_file  # noqa: PLC0415 -- other commands start faster without it
    from netacct.desired import local_ranges, merged  # noqa: PLC0415 -- as above
    from netacct.identity.ranges import own_addresses  # noqa: PLC0415 -- as above
    from netacct.list_files import ListFiles  # noqa: PLC0415 -- as above

    config = configuration(args)
    lists = ListFiles(config.state_dir)
    policy = policy_file.load(config.policy, lists, config.origins.get("policy", ""))
    _warn_of(lists)
    local = local_ranges(config)
    policy, unused = merged(config, policy, local)
    facts = explain.explain(policy, args.address, own_addresses(), local.networks, unused, dict(local.names))
    if local.faults:
        facts["not_read"] = "; ".join(local.faults)
    if args.output == "json":
        output.write_json(facts)
    else:
        width = max(map(len, facts)) + 1
        output.write("".join(f"{name + ':':<{width}} {value}\n" for name, value in facts.items()))
    return 0


def _plan(config: Config) -> Plan:
    from netacct import desired  # noqa: PLC0415 -- other commands start faster without it
    from netacct.list_files import ListFiles  # noqa: PLC0415 -- as above

    lists = ListFiles(config.state_dir)
    plan, unsure = desired.plan(config, lists)
    _warn_of(lists)
    if unsure:
        sys.stderr.write(f"netacct: warning: shown without marks, {unsure}\n")
    return plan


def _warn_of(lists: ListFiles) -> None:
    for error in lists.stale.values():
        sys.stderr.write(f"netacct: warning: {error}; its last good copy is taken\n")


def _write(args: argparse.Namespace, command: str) -> list[str]:
    """Let the running agent do it; where none runs, be the agent for that long."""
    config, done = ask_agent(args, command)
    if done is not None:
        return list(done)
    from netacct import log, once  # noqa: PLC0415 -- other commands start faster without it
    from netacct.control import sole_writer  # noqa: PLC0415 -- as above

    if command == "remove" and not once.is_anything_there():
        return []
    log.configure(config.log.level, config.log.format)
    with sole_writer(Path(config.state_dir)):
        if command == "apply":
            return once.apply(config)
        once.remove(config)
        return ["removed"]


def _by_nftables(config: Config, args: argparse.Namespace) -> bool:
    """Whether what is printed is for nftables: because it was asked for, or because that is what counts here."""
    from netacct import choosing  # noqa: PLC0415 -- other commands start faster without it
    from netacct.kernel.detect import NFTABLES  # noqa: PLC0415 -- as above

    if args.format:
        return bool(args.format == "nft")
    return choosing.suitable(config) == NFTABLES


def _print_nft_plan(plan: Plan, args: argparse.Namespace) -> None:
    from netacct.kernel import nft_layout, nft_render  # noqa: PLC0415 -- other commands start faster without it

    layouts = nft_layout.build(plan)
    if args.output == "json" and not args.format:
        output.write_json({f"ipv{one.family}": nft_render.facts(one) for one in layouts})
        return
    prefilled = {family.family: family.prefilled for family in plan.families}
    text = "\n".join(nft_render.text(one, prefilled[one.family]) for one in layouts)
    output.write(text if args.format else nft_render.shortened(text))


def _print_plan(config: Config, args: argparse.Namespace) -> None:
    from netacct.kernel import layout, render  # noqa: PLC0415 -- other commands start faster without it

    plan = _plan(config)
    if _by_nftables(config, args):
        _print_nft_plan(plan, args)
        return
    layouts = layout.build(plan)
    prefilled = {family.family: family.prefilled for family in plan.families}
    if args.format == "ipset":
        output.write("\n".join(render.ipset_text(one, prefilled[one.family]) for one in layouts))
    elif args.format:
        family = 4 if args.format == "iptables" else 6
        output.write("\n".join(render.iptables_text(one) for one in layouts if one.family == family))
    elif args.output == "json":
        output.write_json(
            {
                f"ipv{one.family}": {"rules": render.rules(one), "sets": [spec.name for spec in one.sets]}
                for one in layouts
            }
        )
    else:
        output.write("\n".join(f"# IPv{one.family}\n" + "\n".join(render.rules(one)) + "\n" for one in layouts))


def _print_done(args: argparse.Namespace, lines: list[str], nothing: str) -> None:
    """What was done, or would be; for people, that it is `nothing`."""
    _print_lines(args, lines or ([] if args.output == "json" else [nothing]))


def _print_lines(args: argparse.Namespace, lines: list[str]) -> None:
    if args.output == "json":
        output.write_json(lines)
    else:
        output.write("".join(f"{line}\n" for line in lines))
