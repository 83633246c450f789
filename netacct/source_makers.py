"""Makes the identity sources that a configuration names, each with what it needs, and says who hears whom."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from netacct import clock
from netacct.config import Config
from netacct.config_keys import AUTO_SOURCES
from netacct.identity import (
    apiserver,
    aws_cni,
    azure_cni,
    cni_cache,
    cri,
    host_pods,
    kubelet,
    kubelet_pods_api,
    pods_file,
    veth,
)
from netacct.identity.apiserver import ApiServerSource
from netacct.identity.aws_cni import AwsCniSource
from netacct.identity.azure_cni import AzureCniSource
from netacct.identity.cni import CniSource
from netacct.identity.cri import CriSource
from netacct.identity.file import FileSource
from netacct.identity.host_pods import HostPods
from netacct.identity.kubelet import Access, KubeletSource
from netacct.identity.kubelet_pods_api import KubeletPodsApi
from netacct.identity.source import Source, SourceEvent
from netacct.identity.veth import VethSource

NAMES = (*AUTO_SOURCES, veth.SOURCE, apiserver.SOURCE, host_pods.SOURCE)
"""Every source of this version."""

FIRST_ANSWER_SECONDS = 10.0
"""A better source that is on this node has so long for its first answer, before anybody else is asked."""


class Hearer(Source, Protocol):
    """A source that speaks of what the others say, or of what they do not."""

    def learn(self, event: SourceEvent) -> None:
        """Hear what another source says."""
        ...


class Polled(Source, Protocol):
    """A source that asks every so often."""

    def hurry(self) -> None:
        """Ask soon."""
        ...


@dataclass(frozen=True, slots=True)
class Made:
    """The sources, in the order in which to start them: those who hear others come after them.

    `auto` is whether nobody named them.
    """

    auto: bool
    by_name: Mapping[str, Source]
    hearers: Sequence[Hearer]
    polled: Sequence[Polled]
    host_pods: HostPods | None


def make(config: Config) -> Made:
    """The sources that this configuration names; nothing is started.

    With `auto` the kubelet and the runtime are asked only while those who know the same better are not up.
    """
    identity, labels, networks = config.identity, config.metrics.pod_labels, config.identity.multus_networks
    auto = identity.sources == AUTO_SOURCES
    pods_api = KubeletPodsApi(labels=labels, networks=networks)
    access = Access(
        identity.kubelet.url,
        identity.kubelet.ca_file,
        identity.kubelet.certificate_file,
        identity.kubelet.key_file,
        identity.kubelet.token_file,
        identity.apiserver.node,
    )
    asked = KubeletSource(access, _unless(auto, pods_api), identity.poll, labels, networks)
    runtime = CriSource(labels=labels, needed=_unless(auto, pods_api, asked), interval=identity.poll)
    hearers: dict[str, Callable[[], Hearer]] = {
        azure_cni.SOURCE: AzureCniSource,
        aws_cni.SOURCE: AwsCniSource,
        veth.SOURCE: VethSource,
    }
    makers: dict[str, Callable[[], Source]] = {
        pods_file.SOURCE: lambda: FileSource(identity.file.path),
        cni_cache.SOURCE: lambda: CniSource(identity.cni.directories),
        kubelet_pods_api.SOURCE: lambda: pods_api,
        kubelet.SOURCE: lambda: asked,
        cri.SOURCE: lambda: runtime,
        apiserver.SOURCE: lambda: ApiServerSource(
            identity.apiserver.kubeconfig, identity.apiserver.node, labels, networks=networks
        ),
    }
    hearing = [hearers[name]() for name in identity.sources if name in hearers]
    sources = [makers[name]() for name in identity.sources if name in makers] + hearing
    host = HostPods() if config.host_pods == "cgroup" else None
    return Made(
        auto,
        {source.name: source for source in (*sources, *((host,) if host else ()))},
        hearing,
        [source for source in (asked, runtime) if source in sources],
        host,
    )


def _unless(auto: bool, *better: Source) -> Callable[[], bool]:
    """Whether somebody is needed beside these: always where an operator named the sources."""
    begun = clock.now()

    def needed() -> bool:
        answers = [source.healthy() for source in better]
        early = clock.now() - begun < FIRST_ANSWER_SECONDS
        return not auto or not any(health.up or (early and health.present) for health in answers)

    return needed
