"""Everything that the checks look at, as plain values. A `Facts()` without arguments is a clean namespace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from netacct.kernel.detect import IPTABLES
from netacct.kernel.marks import Finding as MarkUser
from netacct.kernel.modules import Modules
from netacct.kernel.xtables import Entry
from netacct.model import Family, Network
from netacct.policy import Tunnel

# --- kernel and process ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Process:
    """This process: the capabilities that it lacks, and whether it is in a pod whose namespace is not the host's."""

    missing: tuple[str, ...] = ()
    kubernetes: bool = False
    initial_namespace: bool = True


class Holder(NamedTuple):
    """Who holds a lock.

    pid, command: as /proc tells; the command is "" for a process that is gone and left the lock to a child.
    watched: seconds for which we saw it held without a break.
    age:     seconds since the process began, which bounds the rest; None where that is not known.
    waiting: how many wait for it.
    """

    pid: int
    command: str
    watched: float
    age: float | None
    waiting: int


@dataclass(frozen=True, slots=True)
class XtablesLock:
    """The lock file; `problem` is why it cannot be used, "" where it can."""

    path: str = "/run/xtables.lock"
    problem: str = ""
    holder: Holder | None = None


# --- the agent and its files -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Agent:
    """The agent as seen from outside.

    pid: who holds the writer's lock; None where nobody does (0: somebody whose pid is not visible).
    socket: the control socket is there. trouble: why it did not answer.
    stored: totals of this boot are stored, so that somebody counted.
    """

    pid: int | None = None
    other_namespace: bool = False
    socket: bool = False
    trouble: str = ""
    stored: bool = False


@dataclass(frozen=True, slots=True)
class Datapath:
    """What counts here, or would.

    name:      the chosen one; "" where none can be had. reason: why it is that one.
    named:     the configuration names it, against all signs.
    installed: the datapaths of which anything is in the kernel.
    obstacles: why rules would see little here, or are forbidden.
    """

    name: str = IPTABLES
    reason: str = ""
    named: bool = False
    installed: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rules:
    """Our rules: whether any are here, and how they differ from what should be (empty where nothing should be).

    paused: the agent was asked to remove them.
    """

    installed: bool = False
    differences: tuple[str, ...] = ()
    unavailable: str = ""
    paused: bool = False


class Directory(NamedTuple):
    """A directory of ours; `problem` is why it cannot be used. A missing one is made by the agent."""

    key: str
    path: str
    problem: str = ""
    mode: int = 0o700
    owner: int = 0
    free: int = 1 << 40


class Fault(NamedTuple):
    """An error in a file that the user wrote."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What the files ask for. `configured`: a user has set anything at all.

    unread:    providers of local ranges that cannot be read, and why, in words.
    unknown:   those of pod, node and service for which neither the policy has a CIDR nor one was found.
    unused:    ranges of the cluster that were found and are not used, and why, in words.
    pods:      the pods' ranges of the whole cluster, as far as they are known.
    host_pods: hostNetwork pods shall be told apart by their cgroups.
    """

    configured: bool = False
    enabled: bool = True
    local: tuple[Network, ...] = ()
    policy: str = "default"
    unread: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    pods: tuple[Network, ...] = ()
    tunnel: Tunnel = field(default_factory=Tunnel)
    marks: Literal["auto", "on", "off"] = "auto"
    mask: int = 0
    host_pods: bool = False
    faults: tuple[Fault, ...] = ()


# --- the network -------------------------------------------------------------------------------------------------


class Masquerade(NamedTuple):
    """A CNI plugin that gives packets the node's address: of pods in `ranges`, to wherever is outside of these."""

    file: str
    plugin: str
    ranges: tuple[Network, ...]


class Link(NamedTuple):
    """A network interface.

    number: its index. master: that of the bridge that it is a port of, or 0.
    port:   of its UDP encapsulation, 0 for none or unknown.
    calls:  a bridge's own nf_call_iptables and nf_call_ip6tables.
    """

    number: int
    name: str
    kind: str
    up: bool = True
    master: int = 0
    port: int = 0
    calls: tuple[bool, bool] = (False, False)


class InterfaceNetwork(NamedTuple):
    """The network that an address of an interface is in. `link`: the interface's index."""

    link: int
    network: Network


class XtTable(NamedTuple):
    """A legacy table: its chains, the built-in ones without their policy."""

    family: Family
    name: str
    chains: Mapping[str, tuple[Entry, ...]]

    @property
    def tool(self) -> str:
        """The command that shows it."""
        return "iptables" if self.family == 4 else "ip6tables"


class NftChain(NamedTuple):
    """A chain of nftables. A base chain has a hook; `drops` is its policy. Family: ip, ip6 or inet."""

    family: str
    table: str
    name: str
    hook: str = ""
    priority: int = 0
    drops: bool = False


class NftRule(NamedTuple):
    """What matters of a rule of nftables.

    drops: it can end a packet (drop, reject, queue). jumps: the chains that it leads to.
    expressions: the names of those that we look for: `tproxy`, `flow_offload`.
    """

    family: str
    table: str
    chain: str
    number: int
    drops: bool = False
    jumps: tuple[str, ...] = ()
    expressions: frozenset[str] = frozenset()


class Flowtable(NamedTuple):
    """A flowtable of nftables, and how many rules use it."""

    family: str
    table: str
    name: str
    users: int


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it.

    cgroups: where the whole cgroup v2 tree is mounted, "" where it is not.
    saved:   files that others load rulesets from, with something of ours in them.
    unread:  what could not be looked at, and why.
    """

    modules: Modules = field(default_factory=Modules)
    process: Process = Process()
    lock: XtablesLock = XtablesLock()
    agent: Agent = Agent()
    datapath: Datapath = Datapath()
    rules: Rules = Rules()
    directories: tuple[Directory, ...] = ()
    settings: Settings = Settings()
    mark_users: tuple[MarkUser, ...] = ()
    links: tuple[Link, ...] = ()
    networks: tuple[InterfaceNetwork, ...] = ()
    masquerades: tuple[Masquerade, ...] = ()
    xtables: tuple[XtTable, ...] = ()
    nft_chains: tuple[NftChain, ...] = ()
    nft_rules: tuple[NftRule, ...] = ()
    flowtables: tuple[Flowtable, ...] = ()
    virtual_services: int = 0
    cgroups: str = "/sys/fs/cgroup"
    saved: tuple[str, ...] = ()
    sysctls: Mapping[str, int] = field(default_factory=dict)
    wall_clock: float | None = None
    unread: tuple[Fault, ...] = ()
