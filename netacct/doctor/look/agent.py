"""The agent as seen from outside, and our rules as they are."""

from __future__ import annotations

import contextlib
from pathlib import Path

from netacct import choosing, desired
from netacct.accounting.store import DATABASE
from netacct.config import Config
from netacct.control import LOCK, PAUSED, SOCKET, NoAgentError, ask
from netacct.doctor.facts import Agent, Datapath, Rules
from netacct.doctor.look.process import flock_on
from netacct.errors import MissingFeatureError, NetacctError
from netacct.kernel import detect_look
from netacct.kernel.detect import DATAPATHS

PATIENCE = 3.0
"""Seconds to wait for an agent's answer. It compares its rules in a tenth of one."""


def agent(state_dir: Path) -> tuple[Agent, tuple[str, ...]]:
    """Who runs here, and what it says about its rules (nothing, where they are in another namespace)."""
    lock = flock_on(state_dir / LOCK)
    pid = None if lock is None else lock.pid
    other = bool(pid) and _namespace(f"/proc/{pid}") != _namespace("/proc/thread-self")
    socket, stored = (state_dir / SOCKET).exists(), (state_dir / DATABASE).exists()
    try:
        differences: list[str] = ask(state_dir, "differences", patience=PATIENCE)
    except NoAgentError as error:
        return Agent(pid, other, socket, "" if pid is None else str(error), stored), ()
    except NetacctError as error:
        return Agent(pid or 0, other, socket, str(error), stored), ()
    return Agent(pid or 0, other, socket, stored=stored), () if other else tuple(differences)


def _namespace(process: str) -> str:
    try:
        return str(Path(process, "ns/net").readlink())
    except OSError:  # gone meanwhile, or another user's
        return ""


def datapath(config: Config, answered: tuple[str, ...] | None) -> tuple[Datapath, Rules]:
    """What counts here or would, and how our rules are. Errors: DatapathError, PermissionRefusedError.

    Args:
        config: says what should be there.
        answered: what a running agent found, which knows more than the files; None where none runs here.
    """
    facts = detect_look.look()
    installed = tuple(name for name in DATAPATHS if facts.backend(name).ours)
    named = config.datapath if config.datapath in DATAPATHS else ""
    try:
        choice, opened = choosing.open_suitable(config, facts)
    except MissingFeatureError as error:
        none = Datapath(named, "", bool(named), installed, facts.obstacles)
        return none, Rules(bool(installed), answered or (), unavailable=str(error))
    chosen = Datapath(choice.name, choice.reason, bool(named), installed, facts.obstacles)
    with contextlib.closing(opened):
        if answered is not None:
            paused = answered == (PAUSED,)
            return chosen, Rules(bool(installed), () if paused else answered, paused=paused)
        if choice.name not in installed or not config.enabled:
            return chosen, Rules(bool(installed))
        opened.adopt(desired.plan(config)[0])
        return chosen, Rules(installed=True, differences=tuple(opened.verify()))
