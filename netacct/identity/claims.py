"""What the lease book keeps of what sources say: a claim for each sandbox on each address. Worker thread only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from netacct.model import UNBOUNDED, Address, Lease, Pod


def uid_of(pod: Pod) -> str:
    """What tells pods apart: the uid, or the name where a source has no uid (a file of tenants)."""
    return pod.uid or f"{pod.namespace}/{pod.name}"


class Word(NamedTuple):
    """The last that one source said of one claim."""

    pod: Pod
    seen_at: float


@dataclass(slots=True)
class Claim:
    """One sandbox on one address, with the word of each source that vouches for it.

    `created` is the latest creation time and `since` the earliest sight that anybody ever told of it.
    """

    ip: Address
    uid: str
    sandbox: str
    words: dict[str, Word] = field(default_factory=dict)
    created: float = UNBOUNDED
    since: float = math.inf

    @property
    def seen_at(self) -> float:
        """When a source spoke last."""
        return max(word.seen_at for word in self.words.values())

    def is_of(self, uid: str, sandbox: str) -> bool:
        """Whether this is a sandbox of this pod; who names no sandbox means any."""
        return self.uid == uid and (self.sandbox == sandbox or not self.sandbox or not sandbox)

    def held(self, lease: Lease) -> bool:
        """Whether this lease, of the same address, is the claim's own."""
        return self.is_of(uid_of(lease.pod), lease.sandbox)

    def learn(self, created: float, since: float) -> None:
        """Take in one more creation time and one more sight."""
        self.created, self.since = max(self.created, created), min(self.since, since)
