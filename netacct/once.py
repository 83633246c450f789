"""Making an agent, and being one for as long as a command needs it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from netacct import choosing, desired, policy_file, sources
from netacct.accounting.store import Store
from netacct.agent import Agent
from netacct.books import Books
from netacct.config import Config
from netacct.identity.ranges import own_addresses
from netacct.kernel.base import Datapath
from netacct.kernel.interfaces import Interfaces
from netacct.list_files import ListFiles
from netacct.moving import OpenDatapath


def make_datapath(config: Config) -> OpenDatapath:
    """The datapath that the configuration names, or for `auto` the one that suits this node; logs which and why."""
    choice, datapath = choosing.choose(config)
    choosing.announce(choice)
    return datapath


def make_agent(config: Config, datapath: Datapath, lists: ListFiles | None = None) -> Agent:
    """An agent with its books loaded from the state directory. Raises ConfigError where the policy has an error.

    What the other datapath left on this node is booked and taken away when the agent starts.
    """
    lists = lists or ListFiles(config.state_dir)
    policy = policy_file.load(config.policy, lists, config.origins.get("policy", ""))
    lists.keep()
    books = Books(Store(Path(config.state_dir)), config, config.identity.sources)
    return Agent(config, policy, datapath, books, choosing.other_of(datapath.name), Interfaces())


def apply(config: Config) -> list[str]:
    """Install or repair, and book what was counted meanwhile; returns what differed. The caller is sole writer."""
    desired.require_enabled(config)
    agent = make_agent(config, make_datapath(config))
    agent.found_ranges(sources.local_ranges(config))
    return agent.start(own_addresses(), sources.once(config))


def remove(config: Config) -> None:
    """Book the last values and take everything away. The caller is sole writer."""
    config = dataclasses.replace(config, enabled=False)
    make_agent(config, make_datapath(config)).start(own_addresses())
