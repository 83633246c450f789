"""Marks: who else uses the bits of the policy's mask, and what the kernel makes of a marked packet's way back."""

from __future__ import annotations

from collections.abc import Iterable

from netacct.doctor.facts import Facts
from netacct.doctor.finding import Finding, Severity, finding
from netacct.kernel.marks import Finding as MarkUser

_CONF = "net.ipv4.conf"


def collisions(facts: Facts) -> Iterable[Finding]:
    """Other owners of our bits, where marks are wanted at all. `on` is refused where a rule of theirs sets them."""
    if facts.settings.marks == "off":
        return
    forced = facts.settings.marks == "on"
    for user in facts.mark_users:
        outcome = _outcome(user, forced=forced)
        severity: Severity | None = "error" if forced and user.kind == "sets" else None
        yield finding("mark-collision", f"{user}; {outcome}", user.where, severity)


def _outcome(user: MarkUser, *, forced: bool) -> str:
    if not forced:
        return "so marks are off"
    return "so the agent does not start" if user.kind == "sets" else "but marks.mode is on"


def reverse_path(facts: Facts) -> Iterable[Finding]:
    """Interfaces that check a packet's way back strictly and by its mark, where we set marks."""
    settings, sysctls = facts.settings, facts.sysctls
    wanted = settings.marks == "on" or (settings.marks == "auto" and not facts.mark_users)
    if not (settings.mask and wanted):
        return

    def effective(interface: str, key: str) -> int:
        return max(sysctls.get(f"{_CONF}.{name}.{key}", 0) for name in ("all", interface))

    interfaces = [
        link.name
        for link in facts.links
        if link.name != "lo" and effective(link.name, "src_valid_mark") and effective(link.name, "rp_filter") == 1
    ]
    if interfaces:
        selected = any(user.kind == "selects" for user in facts.mark_users)
        what = f"rp_filter is 1 and src_valid_mark is 1 on {', '.join(interfaces)}"
        yield finding("strict-reverse-path", what, interfaces[0], "warning" if selected else None)


CHECKS = (collisions, reverse_path)
