"""The contract between a source of identity and the agent.

A source tells which pod owns which address. Each runs in one thread of its own, owns its state, and hands over values
only: the agent gives it a function that takes an event (and puts it into a queue), and asks it nothing but its health.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from netacct.model import Observation


@dataclass(frozen=True, slots=True)
class Replace:
    """Everything that the source knows: what it told before and what is not in here is gone.

    `seen_at` is when the source learnt it (CLOCK_BOOTTIME seconds), also where there are no observations to say it.
    """

    source: str
    observations: tuple[Observation, ...]
    seen_at: float


@dataclass(frozen=True, slots=True)
class Update:
    """What changed; anything else that the source told before still holds."""

    source: str
    observations: tuple[Observation, ...]


SourceEvent: TypeAlias = Replace | Update


class Health(NamedTuple):
    """Whether a source can be relied on now; `reason` says why not, in words, and is "" where it can.

    `present` is False where what the source asks is not on this node: a source that nobody named is left out then.
    `age` is how many seconds ago a source that asks got its last answer; None where it never did, or does not ask.
    """

    up: bool
    reason: str = ""
    present: bool = True
    age: float | None = None


class Source(Protocol):
    """Somebody who knows which pod owns which address."""

    name: str

    def start(self, emit: Callable[[SourceEvent], None]) -> None:
        """Begin, in a thread of its own. `emit` is called from that thread, or from this call; it never blocks."""
        ...

    def stop(self) -> None:
        """End the thread and free everything; `emit` is not called any more once this returned. Idempotent."""
        ...

    def healthy(self) -> Health:
        """The health of now; may be called from any thread."""
        ...
