"""The identity sources and providers of local ranges that a configuration asks for: made, started, read, stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from netacct import clock, providers, source_makers
from netacct.config import Config
from netacct.identity import cni_cache, file, pods_file
from netacct.identity.cluster_ranges import ClusterRanges
from netacct.identity.cni import CniSource
from netacct.identity.host_pods import HostPods, addresses_only
from netacct.identity.ranges_provider import Fact, Told
from netacct.identity.ranges_providers import FoundRanges
from netacct.identity.source import Health, Replace, SourceEvent
from netacct.kernel import kube_rules
from netacct.model import Observation
from netacct.policy import Prefix


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """The ranges of the whole cluster that were found, all of them."""

    facts: tuple[Prefix, ...]


class Sources:
    """What runs for one configuration.

    Args:
        config: which sources and providers, and where they look.
        put: takes events and ranges, from any thread; never blocks.
    """

    def __init__(self, config: Config, put: Callable[[SourceEvent | FoundRanges | FoundCluster], None]) -> None:
        self._put = put
        self._made = source_makers.make(config)
        self._ranges = providers.running(config)
        self._cluster = _cluster(config)

    def start(self, earlier: Sources | None = None) -> FoundRanges:
        """Start all; returns the ranges of now. What sources know now is put before this returns.

        A source that the configuration does not name takes back what it said in an earlier life; what providers of
        ranges said then holds until they have an answer.

        Args:
            earlier: what ran before, and is stopped.
        """
        for name in source_makers.NAMES:
            if name not in self._made.by_name:
                self._put(Replace(name, (), clock.now()))
        for source in self._made.by_name.values():
            source.start(self._put if source is self._made.host_pods else self._hear)
        found = self._ranges.start(self._found, before=earlier.said_ranges if earlier else None)
        self._cluster.learn(providers.cluster_facts(found.facts))
        return found

    @property
    def said_ranges(self) -> Mapping[str, Told]:
        """What each provider of local ranges has said last, by name."""
        return self._ranges.said

    def start_cluster(self) -> tuple[Prefix, ...]:
        """Start to look for the cluster's ranges; returns those of now."""
        return self._cluster.start(lambda facts: self._put(FoundCluster(facts)))

    def stop(self) -> None:
        """Stop all; nothing is put any more once this returned."""
        self._cluster.stop()
        self._ranges.stop()
        for source in self._made.by_name.values():
            source.stop()

    def hurry(self) -> None:
        """Somebody's bytes have no owner: let those that ask every so often ask soon. From any thread."""
        for source in self._made.polled:
            source.hurry()

    def health(self) -> Mapping[str, Health]:
        """The health of each source and of each provider of local ranges (`cni-ranges`), by name. Any thread.

        Of sources that nobody named only those that are on this node.
        """
        sources = {name: source.healthy() for name, source in self._made.by_name.items()}
        shown = {name: health for name, health in sources.items() if health.present or not self._made.auto}
        return shown | {f"{name}-ranges": health for name, health in self._ranges.health().items()}

    def _found(self, found: FoundRanges) -> None:
        self._cluster.learn(providers.cluster_facts(found.facts))
        self._put(found)

    def _hear(self, event: SourceEvent) -> None:
        about_addresses = addresses_only(event)
        self._put(about_addresses)
        for hearer in self._made.hearers:
            if hearer.name != event.source:
                hearer.learn(about_addresses)
        if self._made.host_pods:
            self._made.host_pods.learn(event)


def once(config: Config) -> list[SourceEvent]:
    """What the sources that read files say now, without following them. Raises ConfigError for the pods file."""
    events: list[SourceEvent] = []
    path = config.identity.file.path
    if pods_file.SOURCE in config.identity.sources:
        data = file.read(path)
        seen: tuple[Observation, ...] = () if data is None else pods_file.parse(data, path, clock.now())
        events.append(Replace(pods_file.SOURCE, seen, clock.now()))
    if cni_cache.SOURCE in config.identity.sources:
        events.append(Replace(cni_cache.SOURCE, CniSource(config.identity.cni.directories).read(), clock.now()))
    said = [HostPods().once(events)] if config.host_pods == "cgroup" else []
    return [*map(addresses_only, events), *said]


def cluster_ranges(config: Config, facts: Iterable[Fact]) -> tuple[tuple[Prefix, ...], tuple[str, ...]]:
    """The ranges of the whole cluster that are found now, and what was there and was not taken for one, in words.

    `facts` are those of the providers of local ranges.
    """
    cluster = _cluster(config)
    cluster.learn(providers.cluster_facts(facts))
    return cluster.read()


def _cluster(config: Config) -> ClusterRanges:
    directories = config.ranges.cni.directories
    return ClusterRanges(config.cluster_ranges.providers, (kube_rules.read, kube_rules.read_legacy), directories)
