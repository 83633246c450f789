"""A plan laid out for xtables and ipset: which sets, chains and rules, as values. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from netacct.model import Address, CounterKey, Family, Network

CHAIN_PREFIX = "NETACCT-"
"""Every chain of ours starts with this, and no chain of anybody else."""

SET_PREFIX = "nacc"
"""Every ipset of ours starts with this; the family (4 or 6) follows."""

SENTINEL: dict[Family, Address] = {4: b"\xff" * 4, 6: b"\xff" * 16}
"""The element of a pod counter set that carries its epoch: packets 1, bytes the number. No pod can have it."""

Side: TypeAlias = Literal["src", "dst"]


@dataclass(frozen=True, slots=True)
class SetSpec:
    """One ipset.

    key:        the counters it holds; None where it only classifies.
    catch_all:  one counter for every address (a rest or host counter). The kernel name is `name` + "-" + six
                characters of [0-9a-z] that are its epoch, because it has no room for a sentinel.
    networks:   the whole content of a classifying set (hash:net).
    size:       elements it must hold without ever growing (the sentinel included).
    """

    name: str
    type: Literal["hash:ip", "hash:net", "bitmap:ip"]
    family: Family
    key: CounterKey | None = None
    catch_all: bool = False
    networks: tuple[Network, ...] = ()
    size: int = 0


@dataclass(frozen=True, slots=True)
class SetMatch:
    """`-m set [!] --match-set NAME SIDE [! --update-counters]`. `name` is a SetSpec's name."""

    name: str
    side: Side
    negate: bool = False
    update_counters: bool = True


@dataclass(frozen=True, slots=True)
class Jump:
    """`-j CHAIN`, or `-g CHAIN`."""

    chain: str
    goto: bool = False


@dataclass(frozen=True, slots=True)
class Return:
    """`-j RETURN`."""


@dataclass(frozen=True, slots=True)
class SetMark:
    """`-j MARK --set-xmark VALUE/MASK`."""

    value: int
    mask: int


@dataclass(frozen=True, slots=True)
class AddToSet:
    """`-j SET --add-set NAME SIDE`, without --exist: an element that is there keeps its counters."""

    name: str
    side: Side


Target: TypeAlias = Jump | Return | SetMark | AddToSet | None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; a field left at its default does not match on anything.

    not_in / not_out: `! -i NAME` / `! -o NAME`. udp_ports: `-p udp -m multiport --dports`.
    unmarked: `-m mark --mark 0/MASK`.
    """

    target: Target = None
    source: Network | None = None
    destination: Network | None = None
    not_in: str = ""
    not_out: str = ""
    protocol: int | None = None
    udp_ports: tuple[int, ...] = ()
    unmarked: int | None = None
    sets: tuple[SetMatch, ...] = ()


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of ours with all of its rules, or a built-in chain (a hook) with those rules of ours at its head."""

    name: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything of one family, in an order in which it can be made: sets, then chains, then hooks."""

    family: Family
    sets: tuple[SetSpec, ...]
    chains: tuple[Chain, ...]
    hooks: tuple[Chain, ...]
