"""The agent as seen from outside, and our rules as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from netacct import desired
from netacct.config import Config
from netacct.control import LOCK, SOCKET, NoAgentError, ask
from netacct.doctor.facts import Agent, Rules, XtTable
from netacct.doctor.look.process import flock_on
from netacct.errors import MissingFeatureError, NetacctError
from netacct.kernel import ipset, setmaker
from netacct.kernel.iptables import IptablesDatapath
from netacct.kernel.layout import CHAIN_PREFIX
from netacct.kernel.netlink import Netlink

PATIENCE = 3.0
"""Seconds to wait for an agent's answer. It compares its rules in a tenth of one."""


def agent(state_dir: Path) -> tuple[Agent, tuple[str, ...]]:
    """Who runs here, and what it says about its rules (nothing, where they are in another namespace)."""
    lock = flock_on(state_dir / LOCK)
    pid = None if lock is None else lock.pid
    other = bool(pid) and _namespace(f"/proc/{pid}") != _namespace("/proc/thread-self")
    socket = (state_dir / SOCKET).exists()
    try:
        differences: list[str] = ask(state_dir, "differences", patience=PATIENCE)
    except NoAgentError as error:
        return Agent(pid, other, socket, "" if pid is None else str(error)), ()
    except NetacctError as error:
        return Agent(pid or 0, other, socket, str(error)), ()
    return Agent(pid or 0, other, socket), () if other else tuple(differences)


def _namespace(process: str) -> str:
    try:
        return str(Path(process, "ns/net").readlink())
    except OSError:  # gone meanwhile, or another user's
        return ""


def are_installed(tables: Iterable[XtTable]) -> bool:
    """Whether chains or sets of ours are here, whoever made them."""
    if any(name.startswith(CHAIN_PREFIX) for table in tables for name in table.chains):
        return True
    with Netlink() as link:
        return any(setmaker.is_ours(name) for name in ipset.set_names(link, ""))


def rules(config: Config, *, installed: bool, answered: tuple[str, ...] | None) -> Rules:
    """How our rules are.

    Args:
        config: says what should be there.
        installed: see `are_installed`.
        answered: what a running agent found, which knows more than the files; None where none runs here.
    """
    if answered is not None:
        return Rules(installed, answered)
    try:
        with contextlib.closing(IptablesDatapath()) as datapath:
            if not installed or not config.enabled:
                return Rules(installed)
            datapath.adopt(desired.plan(config)[0])
            return Rules(installed, tuple(datapath.verify()))
    except MissingFeatureError as error:
        return Rules(installed, unavailable=str(error))
