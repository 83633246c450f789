"""Local ranges from a cloud's metadata server: what the clouds have in common.

What was known holds while the server fails; it is asked again after a pause that doubles, with jitter, so that a
thousand nodes do not come back to it in the same second.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

from netacct import clock, log, model
from netacct.errors import NetacctError
from netacct.identity.metadata_http import Answer, MetadataClient
from netacct.identity.ranges_provider import Fact, Told
from netacct.identity.source import Health
from netacct.log import Repeats
from netacct.model import Network
from netacct.policy import canonical, local_range_fault
from netacct.sleeper import Sleeper, Why

POLL = 60.0
"""Seconds between two answers of a server that cannot tell when something changed, at the least."""

BACKOFF_FIRST, BACKOFF_LIMIT = 1.0, 300.0
"""Seconds between two questions after the first failure, and after many; half to one and a half of it."""

TROUBLE_SECONDS = 3600.0
"""The same trouble is logged again after so long."""


class UnansweredError(NetacctError):
    """The server did not tell; `retry_after` are the seconds for which it wants to be left alone."""

    def __init__(self, why: str, retry_after: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class Known(NamedTuple):
    """What a server told: the ranges of this node's pods, facts about the network, and seconds to the next question."""

    ranges: tuple[Network, ...] = ()
    facts: tuple[Fact, ...] = ()
    pause: float = POLL


class Cloud(Protocol):
    """How one cloud is asked."""

    name: str

    def ask(self, client: MetadataClient) -> Known:
        """Ask for everything. Raises UnansweredError where the answer is none."""
        ...


class MetadataRanges:
    """Asks a metadata server in a thread of its own, and tells what it says whenever that differs.

    Args:
        cloud: what to ask.
        client: whom to ask.
        backoff: seconds to the next question after a first failure.
    """

    def __init__(self, cloud: Cloud, client: MetadataClient, backoff: float = BACKOFF_FIRST) -> None:
        self.name = cloud.name
        self._cloud, self._client, self._backoff = cloud, client, backoff
        self._known: Known | None = None
        self._changed: Callable[[tuple[Network, ...]], None] = lambda _: None
        self._asked = threading.Event()
        self._stopping = False
        self._failures = 0
        self._answered: float | None = None
        self._health = Health(up=False, reason="not asked yet")
        self._repeats = Repeats(TROUBLE_SECONDS)
        self._log = log.get(source=f"{self.name}-ranges")
        self._sleeper = Sleeper(f"ranges-{self.name}")

    def read(self, seconds: float) -> Told:
        """Ask once, in this call. Raises UnansweredError."""
        self._client.expire(seconds)
        try:
            known = self._cloud.ask(self._client)
        finally:
            self._client.close()
        return Told(canonical(each for each in known.ranges if not local_range_fault(each)), known.facts)

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What the server says about the network around this node."""
        return self._known.facts if self._known else ()

    def start(self, changed: Callable[[tuple[Network, ...]], None]) -> None:
        """Begin to ask, and return without waiting for an answer."""
        self._changed = changed
        self._sleeper.start(self._run)

    def wait(self, seconds: float) -> None:
        """Wait for the first question to be answered, or to have failed."""
        self._asked.wait(seconds)

    def stop(self) -> None:
        """End the thread, also while it waits for an answer. Idempotent; there is no second start."""
        self._stopping = True
        self._client.interrupt()
        self._sleeper.stop()

    def healthy(self) -> Health:
        """Whether the last question was answered, and how long ago the last answer came."""
        return self._health._replace(age=None if self._answered is None else clock.now() - self._answered)

    def _run(self) -> None:
        pause = 0.0
        while self._sleeper.sleep(pause) is not Why.STOP:
            pause = self._turn()
            self._asked.set()
        self._client.close()

    def _turn(self) -> float:
        """Ask once; returns the seconds to the next time."""
        try:
            known = self._cloud.ask(self._client)
        except Exception as error:  # noqa: BLE001 -- a provider that died would go unnoticed
            return 0.0 if self._stopping else self._failed(error)
        self._failures, self._answered, self._health = 0, clock.now(), Health(up=True)
        self._take(known._replace(ranges=canonical(self._usable(known.ranges))))
        return known.pause

    def _take(self, known: Known) -> None:
        before, self._known = self._known, known
        if before is None or known.ranges != before.ranges:
            self._log.info("local ranges by metadata", ranges=" ".join(map(str, known.ranges)) or "none")
        if before is None or known[:2] != before[:2]:
            self._changed(known.ranges)

    def _failed(self, error: Exception) -> float:
        reason = str(error) if isinstance(error, NetacctError) else f"{type(error).__name__}: {error}"
        self._health = Health(up=False, reason=reason)
        self._client.close()
        if self._repeats.due(reason):
            self._log.warning("the metadata server does not tell, trying again", error=reason)
        longest = min(self._backoff * 2.0**self._failures, BACKOFF_LIMIT)
        self._failures = min(self._failures + 1, 32)
        pause = longest * random.uniform(0.5, 1.5)  # noqa: S311 -- spreads nodes, guards nothing
        return max(pause, error.retry_after) if isinstance(error, UnansweredError) else pause

    def _usable(self, ranges: Iterable[Network]) -> Iterable[Network]:
        for network in ranges:
            fault = local_range_fault(network)
            if not fault:
                yield network
            elif self._repeats.due(fault):
                self._log.error("metadata names a range that cannot be a local one, left out", why=fault)


def poll_pause() -> float:
    """Seconds to the next question of a server that is polled, different on each node."""
    return POLL * random.uniform(1.0, 1.5)  # noqa: S311 -- as above


def body(answer: Answer) -> bytes:
    """The body of a 200. Raises UnansweredError for anything else."""
    if answer.status != 200:
        raise UnansweredError(answer.why, answer.retry_after or 0.0)
    return answer.body


def document(answer: Answer) -> Any:
    """The JSON of a 200. Raises UnansweredError for anything else."""
    try:
        return json.loads(body(answer))
    except (ValueError, RecursionError):
        raise UnansweredError("the answer is not JSON") from None


def network(text: object) -> Network:
    """A CIDR, or an address as /32 or /128; bits behind the prefix are dropped. Raises UnansweredError."""
    try:
        if isinstance(text, str):
            return model.network(text)
    except ValueError:
        pass
    raise UnansweredError(f"the answer has {text!r:.60} in place of an address")


def interfaces(value: object) -> list[dict[str, Any]]:
    """The interfaces of this machine. Raises UnansweredError where there are none, for without one nobody asks."""
    found = members(value, "list of interfaces")
    if not found:
        raise UnansweredError("the answer names no interface")
    return found


def members(value: object, what: str) -> list[dict[str, Any]]:
    """A list of objects; None is an empty one. Raises UnansweredError for anything else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UnansweredError(f"the answer's {what} is no list of objects")
    return value
