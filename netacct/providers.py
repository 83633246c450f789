"""The providers of local ranges that a configuration asks for: made, run as one, or read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from netacct.config import Config
from netacct.identity import cloud, ranges_cni, ranges_rtnetlink
from netacct.identity.ranges_cni import CniRanges
from netacct.identity.ranges_provider import Fact, RangeProvider
from netacct.identity.ranges_providers import FoundRanges, RangeProviders, read
from netacct.identity.ranges_rtnetlink import RtnetlinkRanges
from netacct.model import Network
from netacct.policy import CLUSTER, NODE, Prefix

AUTO = "auto"

CONFIGURED = "local_ranges"
"""Who names the ranges of the configuration itself: its key."""

READ_SECONDS = 2.0
"""For so long a command without an agent waits for a server."""

Make = Callable[[Config], RangeProvider]


def names(config: Config, dmi: str = cloud.DMI) -> tuple[str, ...]:
    """The providers to use; `auto` is CNI configuration, the cloud's own where this is one, and routes.

    A metadata server is asked only where the firmware says that there is one, or where the configuration names it.
    """
    if config.ranges.providers != AUTO:
        return tuple(config.ranges.providers)
    here = cloud.which(dmi)
    return (ranges_cni.PROVIDER, *([here] if here else ()), ranges_rtnetlink.PROVIDER)


def make(config: Config, dmi: str = cloud.DMI) -> list[RangeProvider]:
    """The providers to use, in order; nothing is asked or followed yet."""
    return [_MAKERS[name](config) for name in names(config, dmi)]


def running(config: Config) -> RangeProviders:
    """All of them as one, to be started."""
    return RangeProviders(make(config))


def found(config: Config, known: Mapping[str, Iterable[Network]] | None = None) -> FoundRanges:
    """All local ranges of now, also those of the configuration, without following them; logs nothing.

    Args:
        config: which providers, and the ranges that need none.
        known: ranges by others than providers, by who names them.
    """
    return read(make(config), READ_SECONDS, {CONFIGURED: config.local_ranges, **(known or {})})


def cluster_facts(facts: Iterable[Fact]) -> tuple[Prefix, ...]:
    """What is known of the networks around this node, as ranges of the whole cluster.

    Other nodes are in a node's subnet. A VPC surely holds nodes, and perhaps their pods and much besides: `cluster`.
    """
    return tuple(Prefix(fact.network, NODE if fact.kind == "subnet" else CLUSTER, fact.words) for fact in facts)


def _cni(config: Config) -> RangeProvider:
    return CniRanges(config.ranges.cni.directories)


def _rtnetlink(config: Config) -> RangeProvider:
    return RtnetlinkRanges(any_veth=config.ranges.providers != AUTO)


# The others are imported where they are used: most nodes need none of them.


def _metadata(name: str, config: Config) -> RangeProvider:
    from netacct.identity import ranges_aws, ranges_azure, ranges_gce  # noqa: PLC0415 -- see above

    made = {cloud.GCE: ranges_gce.provider, cloud.AZURE: ranges_azure.provider, cloud.AWS: ranges_aws.provider}[name]
    return made() if config.ranges.metadata.url == AUTO else made((config.ranges.metadata.url,))


def _kubernetes(config: Config) -> RangeProvider:
    from netacct.identity.ranges_kubernetes import KubernetesRanges  # noqa: PLC0415 -- see above

    return KubernetesRanges(config.identity.apiserver.kubeconfig, config.identity.apiserver.node)


_MAKERS: dict[str, Make] = {
    ranges_cni.PROVIDER: _cni,
    **{name: partial(_metadata, name) for name in (cloud.GCE, cloud.AZURE, cloud.AWS)},
    ranges_rtnetlink.PROVIDER: _rtnetlink,
    "kubernetes": _kubernetes,
}
