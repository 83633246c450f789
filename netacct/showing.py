"""What an agent shows: to a scrape what configuration and books hold, to a service manager one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import netacct
from netacct.books import Books
from netacct.config import Config
from netacct.export.native import Detail, View
from netacct.identity.source import Health
from netacct.kernel.base import Datapath
from netacct.marking import Marking
from netacct.policy import Policy
from netacct.rivals import blind_spots

REMOVAL = "netacct rules remove"
"""Who paused an agent; where none runs, the origin of `enabled` for the moment of the removal."""


def view(
    config: Config,
    policy: Policy,
    datapath: Datapath,
    books: Books,
    marking: Marking,
    health: Mapping[str, Health],
    now: float,
) -> View:
    """All that these have to show at `now`; the agent adds what it knows of itself."""
    shown, ledger = books.show(now), books.ledger
    return View(
        version=netacct.__version__,
        datapath=datapath.name,
        policy_name=policy.name,
        policy_hash=policy.hash,
        series=tuple(shown.totals.items()),
        pods=shown.pods,
        pod_labels=config.metrics.labels,
        by_label=config.metrics.by_label,
        detail=Detail(config.metrics.pods, config.metrics.workloads, config.metrics.packets),
        blind_spots={**blind_spots(datapath), **books.audit.blind_spots(now)},
        coverage_ratio=books.audit.coverage(now),
        counter_resets=ledger.resets,
        ambiguous_bytes=ledger.ambiguous_bytes,
        leases=len(books.leases.open_leases()),
        series_capped=ledger.capped,
        accounting_start=books.began,
        marks_enabled=marking.enabled,
        marks_reason=marking.reason,
        sources_up={name: each.up for name, each in health.items()},
        sources_age={name: each.age for name, each in health.items() if each.age is not None},
    )


def aged(last: View | None, seconds: float) -> View | None:
    """An earlier view, with the present age of its reading, where it has one."""
    if last is None or last.reading_age_seconds is None:
        return last
    return dataclasses.replace(last, reading_age_seconds=max(0.0, seconds))


def status(policy: Policy, datapath: Datapath, books: Books, differences: Sequence[str], *, paused: bool) -> str:
    """One line for the service manager."""
    if paused:
        return "paused: rules are removed"
    state = f"{len(differences)} differences" if differences else "in sync"
    state += ", behind others" if any(blind_spots(datapath).values()) else ""
    return f"accounting {len(books.leases.open_leases())} addresses, policy {policy.name}, rules {state}"


def pause_reason(config: Config) -> str:
    """What paused the accounting, for the log."""
    asked = config.enabled or config.origins.get("enabled") == REMOVAL
    return REMOVAL if asked else "enabled is false in the configuration"


def troubles(differences: Sequence[str], is_old: bool) -> list[str]:
    """Why readiness is refused: how the rules differ, a reading that is too old."""
    reasons = [f"rules are not in sync: {words}" for words in differences[:3]]
    if is_old:
        reasons.append("the counters have not been read for too long")
    return reasons
