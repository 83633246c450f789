"""The identity sources and providers of local ranges that a configuration asks for: made, started, read, stopped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from netacct import clock, providers, yamlfile
from netacct.config import Config
from netacct.identity import cni_cache, host_pods, pods_file, veth
from netacct.identity.cluster_ranges import ClusterRanges
from netacct.identity.cni import CniSource
from netacct.identity.file import FileSource
from netacct.identity.host_pods import HostPods, addresses_only
from netacct.identity.ranges_providers import FoundRanges
from netacct.identity.source import Health, Replace, Source, SourceEvent
from netacct.identity.veth import VethSource
from netacct.kernel import kube_rules
from netacct.model import Network, Observation
from netacct.policy import Prefix

NAMES = (pods_file.SOURCE, cni_cache.SOURCE, veth.SOURCE, host_pods.SOURCE)
"""Every source of this version."""


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
        self._names = config.identity.sources
        self._veth = VethSource() if veth.SOURCE in self._names else None
        self._host_pods = HostPods() if config.host_pods == "cgroup" else None
        makers: dict[str, Callable[[], Source]] = {
            pods_file.SOURCE: lambda: FileSource(config.identity.file.path),
            cni_cache.SOURCE: lambda: CniSource(config.identity.cni.directories),
        }
        self._sources = [makers[name]() for name in self._names if name in makers]
        if self._veth:
            self._sources.append(self._veth)  # the last, because it speaks of what the others say
        if self._host_pods:
            self._sources.append(self._host_pods)  # for the same reason
            self._names = (*self._names, host_pods.SOURCE)
        self._ranges = providers.running(config)
        self._cluster = _cluster(config)

    def start(self) -> FoundRanges:
        """Start all; returns the ranges of now. What sources know now is put before this returns.

        A source that the configuration does not name takes back what it said in an earlier life.
        """
        for name in NAMES:
            if name not in self._names:
                self._put(Replace(name, (), clock.now()))
        for source in self._sources:
            source.start(self._put if source in (self._veth, self._host_pods) else self._hear)
        return self._ranges.start(self._put)

    def start_cluster(self) -> tuple[Prefix, ...]:
        """Start to look for the cluster's ranges; returns those of now."""
        return self._cluster.start(lambda facts: self._put(FoundCluster(facts)))

    def stop(self) -> None:
        """Stop all; nothing is put any more once this returned."""
        self._cluster.stop()
        self._ranges.stop()
        for source in self._sources:
            source.stop()

    def health(self) -> Mapping[str, Health]:
        """The health of each source, by name. May be called from any thread."""
        return {source.name: source.healthy() for source in self._sources}

    def _hear(self, event: SourceEvent) -> None:
        about_addresses = addresses_only(event)
        self._put(about_addresses)
        if self._veth:
            self._veth.learn(about_addresses)
        if self._host_pods:
            self._host_pods.learn(event)


def once(config: Config) -> list[SourceEvent]:
    """What the sources that read files say now, without following them. Raises ConfigError for the pods file."""
    events: list[SourceEvent] = []
    path = config.identity.file.path
    if pods_file.SOURCE in config.identity.sources:
        seen: tuple[Observation, ...] = ()
        if Path(path).exists():
            seen = pods_file.parse(yamlfile.read(path), path, clock.now())
        events.append(Replace(pods_file.SOURCE, seen, clock.now()))
    if cni_cache.SOURCE in config.identity.sources:
        events.append(Replace(cni_cache.SOURCE, CniSource(config.identity.cni.directories).read(), clock.now()))
    said = [HostPods().once(events)] if config.host_pods == "cgroup" else []
    return [*map(addresses_only, events), *said]


def local_ranges(config: Config) -> tuple[Network, ...]:
    """The local ranges by configuration and providers, as of now."""
    return providers.found(config).networks


def cluster_ranges(config: Config) -> tuple[tuple[Prefix, ...], tuple[str, ...]]:
    """The ranges of the whole cluster that are found now, and what was there and was not taken for one, in words."""
    return _cluster(config).read()


def _cluster(config: Config) -> ClusterRanges:
    directories = config.ranges.cni.directories
    return ClusterRanges(config.cluster_ranges.providers, (kube_rules.read, kube_rules.read_legacy), directories)
