"""Local ranges on Azure: the secondary addresses of the VM's interfaces, and the subnets these are in.

Source: "Azure Instance Metadata Service" of Microsoft's documentation, category `network`. The answer:

    {"interface": [{"ipv4": {"ipAddress": [{"privateIpAddress": "10.1.0.4", "publicIpAddress": ""}, …],
                             "subnet": [{"address": "10.1.0.0", "prefix": "24"}]},
                    "ipv6": {"ipAddress": []}, "macAddress": "000D3AF806EC"}]}

The first address of an interface is the node's (its primary IP configuration; kubernetes/kubernetes#71736), the others
are what Azure CNI gives to pods of a node subnet. Nothing tells of a change, and requests are limited per VM (429 with
Retry-After), so the server is asked once in 60 to 90 seconds; an address that is news to it joins with its lease.
"""

from __future__ import annotations

from netacct.identity.metadata_http import MetadataClient
from netacct.identity.ranges_metadata import (
    Known,
    MetadataRanges,
    UnansweredError,
    document,
    interfaces,
    members,
    network,
    poll_pause,
)
from netacct.identity.ranges_provider import Fact
from netacct.model import Network

PROVIDER = "azure"

URLS = ("http://169.254.169.254",)

_HEADERS = {"Metadata": "true"}
_PATH = "/metadata/instance/network?api-version=2021-02-01&format=json"


class Azure:
    """Asks Azure's instance metadata service."""

    name = PROVIDER

    def ask(self, client: MetadataClient) -> Known:
        """All interfaces. Raises UnansweredError."""
        ranges, facts = _read(document(client.request(_PATH, _HEADERS)))
        return Known(ranges, facts, poll_pause())


def provider(urls: tuple[str, ...] = URLS) -> MetadataRanges:
    """Azure's secondary addresses."""
    return MetadataRanges(Azure(), MetadataClient(urls))


def _read(answer: object) -> tuple[tuple[Network, ...], tuple[Fact, ...]]:
    if not isinstance(answer, dict) or "interface" not in answer:
        raise UnansweredError("the answer has no list of interfaces")
    ranges: list[Network] = []
    facts: list[Fact] = []
    for number, interface in enumerate(interfaces(answer["interface"])):
        for family in ("ipv4", "ipv6"):
            part = interface.get(family) or {}
            if not isinstance(part, dict):
                raise UnansweredError(f"the answer's {family} is no object")
            addresses = [
                network(entry.get("privateIpAddress")) for entry in members(part.get("ipAddress"), "ipAddress")
            ]
            ranges += addresses[1:]
            for entry in members(part.get("subnet"), "subnet"):
                subnet = network(f"{entry.get('address')}/{entry.get('prefix')}")
                facts.append(Fact(subnet, "subnet", f"found in Azure metadata (interface {number})"))
    return tuple(ranges), tuple(facts)
