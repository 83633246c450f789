"""The checks: each takes the facts and yields findings. All of this package is pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from netacct.doctor.checks import agent, kernel, marks, network, settings, tables
from netacct.doctor.facts import Facts
from netacct.doctor.finding import SEVERITIES, Finding, finding

Check = Callable[[Facts], Iterable[Finding]]

CHECKS: tuple[Check, ...] = (
    *settings.CHECKS,
    *kernel.CHECKS,
    *agent.CHECKS,
    *tables.CHECKS,
    *marks.CHECKS,
    *network.CHECKS,
)


def examine(facts: Facts) -> list[Finding]:
    """Everything that the checks find, the gravest first; equal facts give equal lists."""
    found = [item for check in CHECKS for item in check(facts)]
    found += [finding("could-not-look", f"{where}: {what}", where) for where, what in facts.unread]
    return sorted(
        dict.fromkeys(found), key=lambda item: (SEVERITIES.index(item.severity), item.name, item.where, item.what)
    )
