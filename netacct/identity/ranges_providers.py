"""All providers of local ranges that run here, as one: their union, and who named what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from netacct import log
from netacct.errors import NetacctError
from netacct.identity.ranges_provider import Fact, RangeProvider, Told
from netacct.identity.source import Health
from netacct.model import Network
from netacct.policy import canonical

FIRST_WAIT = 1.0
"""Seconds for which `start` waits for a metadata server, over all of them: with its answer the first plan is whole."""


@dataclass(frozen=True, slots=True)
class FoundRanges:
    """The local ranges that providers have found, all of them.

    `networks` is canonical. `names` has each network that a provider named, also such as lie inside of others, with the
    providers' names. `facts` are about the network around this node. `faults` are the providers that could not be read,
    with the reason: ranges may be missing.
    """

    networks: tuple[Network, ...] = ()
    names: tuple[tuple[Network, str], ...] = ()
    facts: tuple[Fact, ...] = ()
    faults: tuple[str, ...] = ()


def read(
    providers: Iterable[RangeProvider], seconds: float, known: Mapping[str, Iterable[Network]] | None = None
) -> FoundRanges:
    """What providers say now, each within `seconds`, without following them; `known` are ranges by others, by name."""
    ranges: dict[str, Iterable[Network]] = dict(known or {})
    facts: list[Fact] = []
    faults: list[str] = []
    for provider in providers:
        try:
            told = provider.read(seconds)
        except NetacctError as error:
            faults.append(f"{provider.name}: {error}")
        else:
            ranges[provider.name] = told.ranges
            facts += told.facts
    return replace(merge(ranges, facts), faults=tuple(faults))


def merge(ranges: Mapping[str, Iterable[Network]], facts: Iterable[Fact] = ()) -> FoundRanges:
    """The union of what providers say, by their names."""
    named: dict[Network, list[str]] = {}
    for name, networks in ranges.items():
        for network in networks:
            named.setdefault(network, []).append(name)
    names = tuple((network, ", ".join(several)) for network, several in named.items())
    return FoundRanges(canonical(named), names, tuple(dict.fromkeys(facts)))


class RangeProviders:
    """Runs providers, and tells all that they found whenever that differs.

    Args:
        providers: most trusted first, which is the order of their names.
    """

    def __init__(self, providers: Sequence[RangeProvider]) -> None:
        self._providers = tuple(providers)
        self._lock = threading.Lock()
        self._said: dict[str, Told] = {}
        self._told = FoundRanges()
        self._tell: Callable[[FoundRanges], None] | None = None
        self._log = log.get(source="ranges")

    @property
    def said(self) -> Mapping[str, Told]:
        """What each has said last, by name."""
        with self._lock:
            return dict(self._said)

    def start(
        self,
        changed: Callable[[FoundRanges], None],
        wait: float = FIRST_WAIT,
        before: Mapping[str, Told] | None = None,
    ) -> FoundRanges:
        """Start all, and return what they found; a provider that cannot start is left out.

        Args:
            changed: takes what comes later, from threads, one at a time; must not block.
            wait: seconds for first answers, over all of them.
            before: what providers said in an earlier life (`said`), which holds until they have an answer.
        """
        self._said.update(before or {})
        for provider in self._providers:
            self._start(provider)
        deadline = time.monotonic() + wait  # for all of them: they ask at the same time
        for provider in self._providers:
            provider.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            self._tell = changed
            self._told = self._merged()
            return self._told

    def stop(self) -> None:
        """Stop all; nothing is told any more once this returned."""
        for provider in self._providers:
            provider.stop()

    def health(self) -> Mapping[str, Health]:
        """The health of each, by name. From any thread."""
        return {provider.name: provider.healthy() for provider in self._providers}

    def _start(self, provider: RangeProvider) -> None:
        heard = threading.Event()

        def changed(ranges: tuple[Network, ...]) -> None:
            heard.set()
            self._take(provider, ranges)

        try:
            first = provider.start(changed)
        except NetacctError as error:
            self._log.error("a provider of local ranges cannot start", provider=provider.name, error=str(error))
            return
        if first is not None and not heard.is_set():
            self._take(provider, first)

    def _take(self, provider: RangeProvider, ranges: tuple[Network, ...]) -> None:
        with self._lock:
            self._said[provider.name] = Told(ranges, provider.facts)
            found = self._merged()
            if self._tell is not None and found != self._told:
                self._told = found
                self._tell(found)

    def _merged(self) -> FoundRanges:
        said = {provider.name: self._said.get(provider.name, Told()) for provider in self._providers}
        return merge(
            {name: told.ranges for name, told in said.items()}, (fact for told in said.values() for fact in told.facts)
        )
