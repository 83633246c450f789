"""The contract between a provider of local ranges and the agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from netacct.identity.source import Health
from netacct.model import Network


class Fact(NamedTuple):
    """A network around this node that is no local range: a `subnet` that it is in, or the `VPC` around that.

    `words` say where that was found, as in "found in AWS metadata (vpc-ipv4-cidr-blocks)".
    """

    network: Network
    kind: Literal["subnet", "VPC"]
    words: str


class Told(NamedTuple):
    """What a provider says: the local ranges, canonical, and facts besides."""

    ranges: tuple[Network, ...] = ()
    facts: tuple[Fact, ...] = ()


class RangeProvider(Protocol):
    """Somebody who knows which addresses belong to this node's pods."""

    name: str

    def read(self, seconds: float) -> Told:
        """What it says now, for who does not follow it; logs nothing. Raises NetacctError, within about `seconds`."""
        ...

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What it knows besides of the network around this node. From any thread."""
        ...

    def start(self, changed: Callable[[tuple[Network, ...]], None]) -> tuple[Network, ...] | None:
        """Begin, in a thread of its own, and return the ranges of now; None where somebody has to answer first.

        `changed` gets all ranges, canonical, with that answer, and whenever these or the facts differ, from that
        thread; it never blocks.
        """
        ...

    def wait(self, seconds: float) -> None:
        """Wait until there was a first answer, or for so long."""
        ...

    def stop(self) -> None:
        """End the thread and free everything; `changed` is not called any more once this returned. Idempotent."""
        ...

    def healthy(self) -> Health:
        """The health of now; may be called from any thread."""
        ...
