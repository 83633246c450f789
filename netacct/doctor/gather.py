"""Gathers the facts: every reader once, and what one of them cannot see is a fact itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from netacct.config import Config
from netacct.doctor.facts import Agent, Datapath, Directory, Facts, Fault, Process, Rules, Settings, XtablesLock
from netacct.doctor.look import agent, cni, kernel, links, nft, process, saved, settings, xtables
from netacct.errors import PermissionRefusedError
from netacct.identity.host_pods import tree_root
from netacct.kernel import marks, modules
from netacct.kernel.modules import Modules

T = TypeVar("T")


class _Looking:
    """Calls readers, and notes those that fail."""

    def __init__(self) -> None:
        self.unread: list[Fault] = []

    def at(self, what: str, reader: Callable[[], T], otherwise: T) -> T:
        """What the reader returns; `otherwise`, where it raises anything."""
        try:
            return reader()
        except Exception as error:  # noqa: BLE001 -- what nobody foresaw here must not hide what the others see
            self.unread.append(Fault(what, str(error) or type(error).__name__))
            return otherwise


def gather(config_file: str | None = None, flags: Mapping[str, str | list[str]] | None = None) -> Facts:
    """Look at everything. Takes a fraction of a second; at most a few where an agent does not answer.

    Args:
        config_file: as for `config.load`.
        flags: as for `config.load`.

    Raises:
        PermissionRefusedError: not root, who alone sees most of it.
    """
    if os.geteuid():
        raise PermissionRefusedError("only root sees rules, locks and processes; run netacct doctor as root")
    look, nothing = _Looking(), Facts()
    config, wanted = settings.settings(config_file, flags or {})
    me = look.at("capabilities", process.process, Process())
    tables = look.at("legacy tables", xtables.tables, nothing.xtables)
    unseen = nothing.nft_chains, nothing.nft_rules, nothing.flowtables
    chains, rules, flowtables = look.at("nftables", nft.ruleset, unseen)
    runs, datapath, ours = _ours(look, config, me)
    return Facts(
        modules=look.at("kernel modules", modules.look, Modules()),
        process=me,
        lock=look.at("xtables lock", process.xtables_lock, XtablesLock()),
        agent=runs,
        datapath=datapath,
        rules=ours,
        directories=look.at("state directory", lambda: _directories(config), ()),
        settings=wanted,
        mark_users=look.at("packet marks", lambda: _mark_users(wanted), ()),
        links=look.at("interfaces", links.links, ()),
        networks=look.at("addresses", links.networks, ()),
        masquerades=look.at("CNI configuration", lambda: cni.masquerades(config.ranges.cni.directories), ()),
        xtables=tables,
        nft_chains=chains,
        nft_rules=rules,
        flowtables=flowtables,
        saved=look.at("saved rulesets", saved.rulesets, ()),
        cgroups=look.at("cgroups", tree_root, nothing.cgroups),
        virtual_services=look.at("IPVS", kernel.virtual_services, 0),
        sysctls=look.at("sysctl", kernel.sysctls, {}),
        wall_clock=time.time(),
        unread=tuple(look.unread),
    )


def _ours(look: _Looking, config: Config, me: Process) -> tuple[Agent, Datapath, Rules]:
    """The agent and its rules; without the capabilities, which is a finding, there is no use in looking at rules."""
    nobody: tuple[Agent, tuple[str, ...]] = (Agent(), ())
    runs, differences = look.at("agent", lambda: agent.agent(Path(config.state_dir)), nobody)
    if me.missing:
        return runs, Datapath(), Rules()
    answered = None if runs.pid is None or runs.other_namespace or runs.trouble else differences
    return runs, *look.at("rules", lambda: agent.datapath(config, answered), (Datapath(), Rules()))


def _directories(config: Config) -> tuple[Directory, ...]:
    pairs = (("state_dir", config.state_dir), ("accounts_dir", config.accounts_dir))
    return tuple(process.directory(key, Path(path)) for key, path in pairs)


def _mark_users(wanted: Settings) -> tuple[marks.Finding, ...]:
    return marks.scan(wanted.mask) if wanted.mask and wanted.marks != "off" else ()
