"""Opening the datapath that this node shall count with, and the other one where it left something."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from netacct.config import Config
from netacct.errors import DatapathError, MissingFeatureError
from netacct.kernel import detect, detect_look
from netacct.kernel.detect import DATAPATHS, IPTABLES, NFTABLES, OTHER, Choice, Facts
from netacct.log import get
from netacct.moving import FindOther, OpenDatapath


def choose(config: Config) -> tuple[Choice, OpenDatapath]:
    """The datapath for a configuration, open, and why it is that one.

    Errors: DatapathError where rules would see little on this node, and `auto` was to decide that; MissingFeatureError
    where a datapath cannot be had; PermissionRefusedError.
    """
    choice, datapath = open_suitable(config, detect_look.look())
    if config.enabled:  # else rules are only taken away
        try:
            detect.require_sight(config.datapath, choice)
        except DatapathError:
            datapath.close()
            raise
    return choice, datapath


def asked(config: Config) -> str:
    """The datapath that a configuration names, or needs: hostNetwork pods can be told apart by nftables only."""
    return NFTABLES if config.host_pods == "cgroup" else config.datapath


def open_suitable(config: Config, facts: Facts) -> tuple[Choice, OpenDatapath]:
    """As `choose`, by facts, and without a judgement on what rules would see."""
    configured = asked(config)
    while True:
        choice = detect.decide(configured, facts)
        if configured != config.datapath:
            choice = replace(choice, reason="`host_pods: cgroup` needs it")
        try:
            return choice, open_datapath(choice.name)
        except MissingFeatureError as error:  # a library, or what no file told
            if choice.name == configured or choice.name in facts.unusable:
                raise
            facts = replace(facts, unusable={**facts.unusable, choice.name: str(error)})


def suitable(config: Config) -> str:
    """The datapath that `choose` would open, by name; one that is asked for also where it cannot be had here.

    Errors: as for `choose`, but that nothing is judged.
    """
    configured = asked(config)
    if configured in DATAPATHS:
        return configured
    choice, datapath = open_suitable(config, detect_look.look())
    datapath.close()
    return choice.name


def announce(choice: Choice) -> None:
    """Log what was chosen and why."""
    get().info("datapath", datapath=choice.name, reason=choice.reason)
    for obstacle in choice.facts.obstacles:
        get().warning("rules will not count all that pods send", reason=obstacle)


def open_datapath(name: str) -> OpenDatapath:
    """A datapath in this thread's network namespace. Errors: MissingFeatureError, PermissionRefusedError."""
    if name == IPTABLES:
        from netacct.kernel.iptables import IptablesDatapath  # noqa: PLC0415 -- 4 MB, and a tenth of a second

        return IptablesDatapath()
    from netacct.kernel.nftables import NftablesDatapath  # noqa: PLC0415 -- as above

    return NftablesDatapath()


def other_of(name: str) -> FindOther:
    """How to open the datapath that is not `name`, where it left anything."""
    return partial(_open_if_there, OTHER[name])


def left_over(name: str = "") -> list[str]:
    """In words, what every datapath but `name` left here; empty where there is nothing."""
    others = [other for other in DATAPATHS if other != name and detect_look.ours(other)]
    return [f"rules and counters of the datapath {other} are left over" for other in others]


def _open_if_there(name: str) -> OpenDatapath | None:
    return open_datapath(name) if detect_look.ours(name) else None
