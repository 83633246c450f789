"""The agent, its rules, its files, and the lock that it shares with others."""

from __future__ import annotations

import stat
from collections.abc import Iterable

from netacct.doctor.facts import Directory, Facts
from netacct.doctor.finding import Finding, finding
from netacct.kernel.detect import NFTABLES

ROOM = 16 << 20
"""Bytes that a checkpoint of the largest node needs with room to spare (it is written beside the old one)."""

_SHOWN = 3
_SHADOWED = "which can end traversal"
"""Differences with these words are `rules-shadowed`, which says more about them."""


def process(facts: Facts) -> Iterable[Finding]:
    """An agent that is gone, stuck, or somewhere else."""
    agent = facts.agent
    if agent.pid is None:
        if agent.socket:
            yield finding("control-socket-stale", "the control socket is there, but nobody listens", "control socket")
        return
    who = f"process {agent.pid}" if agent.pid else "an agent in another PID namespace"
    if agent.other_namespace:
        yield finding("agent-in-other-namespace", f"{who} runs in another network namespace than this command", who)
    if agent.trouble:
        yield finding("agent-not-answering", f"{who} holds the agent's lock, but: {agent.trouble}", who)


def rules(facts: Facts) -> Iterable[Finding]:
    """What verification says, and rules that nobody looks after."""
    if facts.rules.installed and (facts.agent.pid is None or facts.agent.other_namespace):
        yield finding("rules-without-agent", "rules of netacct are here, but no agent runs in this namespace", "rules")
    if facts.rules.paused:
        yield finding("accounting-paused", "rules of netacct were removed, and its agent waits", "rules")
    if facts.agent.stored and facts.agent.pid is None and not facts.rules.installed and facts.settings.enabled:
        what = "totals of this boot are stored, but there are neither rules nor an agent"
        yield finding("nothing-counts", what, "rules")
    differences = [words for words in facts.rules.differences if _SHADOWED not in words]
    if differences:
        more = f"; and {len(differences) - _SHOWN} more (`netacct rules diff`)" if len(differences) > _SHOWN else ""
        yield finding("rules-not-in-place", "; ".join(differences[:_SHOWN]) + more, "rules")


def directories(facts: Facts) -> Iterable[Finding]:
    """Directories that cannot be used, that others can use, or that are full."""
    for directory in facts.directories:
        yield from _directory(directory)


def _directory(directory: Directory) -> Iterable[Finding]:
    key, path = directory.key, directory.path
    if directory.problem:
        yield finding("state-directory-unusable", f"{key} {path}: {directory.problem}", path)
        return
    others = stat.S_IWGRP | stat.S_IWOTH | (stat.S_IXOTH if key == "state_dir" else 0)
    if directory.owner or directory.mode & others:
        what = f"{key} {path} belongs to uid {directory.owner} and has mode {directory.mode:04o}"
        yield finding("state-directory-open", what, path)
    if directory.free < ROOM:
        yield finding("state-directory-full", f"{key} {path} has {directory.free >> 10} KiB left", path)


def lock(facts: Facts) -> Iterable[Finding]:
    """The xtables lock: usable, and not held for long."""
    path, holder = facts.lock.path, facts.lock.holder
    if facts.lock.problem and facts.datapath.name == NFTABLES:
        what = f"{path}: {facts.lock.problem}; the datapath nftables does without it"
        yield finding("xtables-lock-unusable", what, path, "info")
    elif facts.lock.problem:
        yield finding("xtables-lock-unusable", f"{path}: {facts.lock.problem}", path)
    if holder is None:
        return
    who = f"process {holder.pid} ({holder.command or 'gone; a child of it has the lock'})"
    bound = "" if holder.age is None else f", and for {holder.age:.0f} s at most"
    waiting = f"; {holder.waiting} waiting" if holder.waiting else ""
    what = f"{who} has held {path} for at least {holder.watched:.1f} s{bound}{waiting}"
    yield finding("xtables-lock-held", what, path)


CHECKS = (process, rules, directories, lock)
