"""Making an agent, and being one for as long as a command needs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from netacct import choosing, desired, log, policy_file, providers, rivals, sources
from netacct.accounting.store import Store
from netacct.agent import Agent
from netacct.books import Books
from netacct.config import Config
from netacct.errors import ConfigError
from netacct.identity.ranges import own_addresses
from netacct.kernel import detect_look
from netacct.kernel.base import Datapath
from netacct.kernel.detect import DATAPATHS
from netacct.kernel.interfaces import Interfaces
from netacct.list_files import ListFiles
from netacct.moving import OpenDatapath
from netacct.policy import Policy
from netacct.showing import REMOVAL

DEFAULT = "default"
"""A policy that is shipped."""


def make_datapath(config: Config) -> OpenDatapath:
    """The datapath that the configuration names, or for `auto` the one that suits this node; logs which and why."""
    choice, datapath = choosing.choose(config)
    choosing.announce(choice)
    return datapath


def make_agent(config: Config, datapath: Datapath, lists: ListFiles | None = None) -> Agent:
    """An agent with its books loaded from the state directory. Raises ConfigError as `load_policy` does.

    What the other datapath left on this node is booked and taken away when the agent starts.
    """
    lists = lists or ListFiles(config.state_dir)
    policy, named = load_policy(config, lists)
    books = Books(Store(Path(config.state_dir)), config, config.identity.sources)
    agent = Agent(config, policy, datapath, books, choosing.other_of(datapath.name), Interfaces())
    if named:
        lists.keep()
    else:
        agent.reload_failed()
    return agent


def load_policy(config: Config, lists: ListFiles) -> tuple[Policy, bool]:
    """The policy, and whether it is the one that the configuration names.

    No policy is needed to take rules away, because what counts is read by its name in the kernel. So where `enabled` is
    false, an error in it is only logged, and the default one stands in: a kill switch must not hang on another file.

    Errors: ConfigError where `enabled` is true.
    """
    try:
        return policy_file.load(config.policy, lists, config.origins.get("policy", "")), True
    except ConfigError as error:
        if config.enabled:
            raise
        log.get().error("policy refused, which does not keep rules from being taken away", error=str(error))
        return policy_file.load(DEFAULT), False


def apply(config: Config) -> list[str]:
    """Install or repair, and book what was counted meanwhile; returns what was done. The caller is sole writer."""
    desired.require_enabled(config)
    datapath = make_datapath(config)
    there = {name for name in DATAPATHS if detect_look.ours(name)}
    agent = make_agent(config, datapath)
    local = providers.found(config)
    agent.found_ranges(local.networks)
    agent.found_cluster(sources.cluster_ranges(config, local.facts)[0])
    found = agent.start(own_addresses(), sources.once(config))
    if datapath.name in there:
        gone = [f"took away rules and counters of the datapath {name}" for name in there - {datapath.name}]
        return gone + rivals.outcome(datapath, found)
    return [f"moved from {name} to {datapath.name}" for name in there] or ["installed"]


def is_anything_there() -> bool:
    """Whether there is anything that `remove` would take away. Writes nothing."""
    return any(detect_look.ours(name) for name in DATAPATHS)


def remove(config: Config) -> None:
    """Book the last values and take everything away. The caller is sole writer."""
    config = dataclasses.replace(config, enabled=False, origins={**config.origins, "enabled": REMOVAL})
    make_agent(config, make_datapath(config)).start(own_addresses())
