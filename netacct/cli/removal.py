"""What `netacct rules remove` would take away: of each datapath, what is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netacct.kernel.layout import Layout
    from netacct.kernel.plan import Plan
    from netacct.model import Family


def lines(plan: Plan, tool: str | None) -> list[str]:
    """What takes away everything of netacct that is in this network namespace.

    Args:
        plan: what should be there; tells the hooks' rules in full.
        tool: `ipset`, `iptables`, `ip6tables` or `nft`: lines as input for that; None for all of them, for people.

    Errors: DatapathError, PermissionRefusedError.
    """
    from netacct.kernel import layout, nft_render  # noqa: PLC0415 -- other commands start faster without them

    found = []
    for one in layout.build(plan):
        name = "iptables" if one.family == 4 else "ip6tables"
        changes = _changes(one) if tool in (None, name) else []
        if changes:
            found += changes if tool is None else ["*mangle", *changes, "COMMIT"]
    if tool in (None, "ipset"):
        found += [f"destroy {name}" for name in _sets()]
    if tool in (None, "nft"):
        found += nft_render.removal_text(_nft_families()).splitlines()
    return found


def _changes(wanted: Layout) -> list[str]:
    """Commands of iptables-restore for one family: rules of hooks, then all chains."""
    from netacct.kernel import detect_look, render  # noqa: PLC0415 -- as above

    present = detect_look.legacy_chains()[wanted.family]
    commands = [line for line in render.removal_text(wanted).splitlines() if line.startswith("-D ")]
    hooks = [line for line in commands if line.rpartition(" ")[2] in present]
    return hooks + [f"-{option} {name}" for option in "FX" for name in sorted(present)]


def _sets() -> list[str]:
    from netacct.kernel import detect, detect_look  # noqa: PLC0415 -- as above
    from netacct.kernel.counters import set_names  # noqa: PLC0415 -- as above

    return set_names() if detect_look.ours(detect.IPTABLES) else []


def _nft_families() -> list[Family]:
    from netacct.kernel import detect_look  # noqa: PLC0415 -- as above

    return detect_look.nft_families()
