"""What a table of nf_tables is made of, as values: parts of rules, chains, sets, counters. Pure.

`nft_layout.py` puts them together; they become messages (`nft_expressions.py`), or text (`nft_render.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from netacct.kernel.nft_many import Content
from netacct.kernel.nft_messages import Hook
from netacct.model import CounterKey, Family, Network, key_width

Side: TypeAlias = Literal["src", "dst"]

HOOK_NAMES = {1: "input", 2: "forward", 3: "output", 4: "postrouting"}
"""NF_INET_*"""


class Prefix(NamedTuple):
    """Matches packets with this end in a prefix."""

    side: Side
    network: Network


class Member(NamedTuple):
    """Matches packets with this end, cut to `length` bits, in a set that does not count."""

    side: Side
    content: str
    length: int


class NotLoopback(NamedTuple):
    """Matches packets that did not come in by lo ("iif"), or do not leave by it ("oif")."""

    way: Literal["iif", "oif"]


class Protocol(NamedTuple):
    """Matches packets of a protocol (after IPv6 extension headers)."""

    number: int


class UdpPort(NamedTuple):
    """Matches the destination port, once it is known that there are ports."""

    port: int


class Mark(NamedTuple):
    """Where all bits of the mask are 0: sets them to a value; else the rule ends here."""

    value: int
    mask: int


class CountAt(NamedTuple):
    """Matches packets whose end is in a counter set, and counts them there."""

    side: Side
    name: str


class CountOf(NamedTuple):
    """Matches packets of a socket whose cgroup, or the one around it at this level, is in a counter set; counts there.

    A packet without a socket does not match, nor one of a connection that has no full socket (yet, or any more).
    """

    level: int
    name: str


class AddTo(NamedTuple):
    """Counts at this end in a counter set, making the element where it is missing; no match where there is no room."""

    side: Side
    name: str


class Tally(NamedTuple):
    """Counts in a named counter."""

    name: str


class Choose(NamedTuple):
    """Goes to the chain that a map has for this end, cut to `length` bits; else no match."""

    side: Side
    content: str
    length: int


class Jump(NamedTuple):
    """Goes to a chain and comes back."""

    chain: str


class Goto(NamedTuple):
    """Goes to a chain for good."""

    chain: str


class Return(NamedTuple):
    """Back to where the jump was."""


Part: TypeAlias = (
    Prefix
    | Member
    | NotLoopback
    | Protocol
    | UdpPort
    | Mark
    | CountAt
    | CountOf
    | AddTo
    | Tally
    | Choose
    | Jump
    | Goto
    | Return
)
Rule: TypeAlias = tuple[Part, ...]
"""Parts that are gone through in order, until one does not match."""


@dataclass(frozen=True, slots=True)
class CounterSet:
    """A counter for each address. `dynamic`: packets add addresses. The kernel's name may have a number behind it.

    A set for hostNetwork pods has a counter for each cgroup instead.
    """

    name: str
    key: CounterKey
    size: int
    dynamic: bool

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return key_width(self.key)

    @property
    def sentinel(self) -> bytes:
        """The element that carries the epoch: no packet looks it up."""
        return b"\xff" * self.width


@dataclass(frozen=True, slots=True)
class Counter:
    """One named counter. The kernel's name has its epoch behind it."""

    name: str
    key: CounterKey


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain with all of its rules; a base chain where it has a hook."""

    name: str
    rules: tuple[Rule, ...]
    hook: Hook | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """The table of one family, in an order in which it can be made: what chains refer to stands before them."""

    family: Family
    sets: tuple[CounterSet, ...]
    counters: tuple[Counter, ...]
    contents: tuple[Content, ...]
    chains: tuple[Chain, ...]
