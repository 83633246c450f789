"""Local ranges on AWS: the secondary addresses and prefixes of the instance's interfaces, and the VPC's CIDRs.

Source: "Instance metadata categories" and "Use IMDSv2" of the EC2 User Guide. A PUT gives a token, which each GET
carries. Of each interface (by MAC address) these are read, each a text of lines, 404 where there are none:

    local-ipv4s, ipv6s               addresses; the first one is the interface's own, hence the node's
                                     (amazon-vpc-cni-k8s, pkg/awsutils/imds.go)
    ipv4-prefix, ipv6-prefix         prefixes of pods, /28 and /80 (prefix delegation)
    subnet-ipv4-cidr-block, subnet-ipv6-cidr-blocks, vpc-ipv4-cidr-blocks, vpc-ipv6-cidr-blocks

Nothing tells of a change, so the server is asked once in 60 to 90 seconds; an address that is news joins with its
lease. The server also has an IPv6 address, where the instance was made so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from netacct.identity.metadata_http import Answer, MetadataClient
from netacct.identity.ranges_metadata import Known, MetadataRanges, UnansweredError, body, network, poll_pause
from netacct.identity.ranges_provider import Fact
from netacct.model import Network

PROVIDER = "aws"

URLS = ("http://169.254.169.254", "http://[fd00:ec2::254]")

_TOKEN_PATH = "/latest/api/token"  # noqa: S105 -- a path
_TOKEN_SIZE = 4096
_TOKEN_TTL = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}  # six hours, the longest there is
_MACS = "/latest/meta-data/network/interfaces/macs/"
_MAC = re.compile(r"(?:[0-9a-f]{2}:){5}[0-9a-f]{2}")

_ADDRESSES = ("local-ipv4s", "ipv6s")
_PREFIXES = ("ipv4-prefix", "ipv6-prefix")
_FACTS: Mapping[str, Literal["subnet", "VPC"]] = {
    "subnet-ipv4-cidr-block": "subnet",
    "subnet-ipv6-cidr-blocks": "subnet",
    "vpc-ipv4-cidr-blocks": "VPC",
    "vpc-ipv6-cidr-blocks": "VPC",
}


class Aws:
    """Asks EC2's instance metadata service, with a token for as long as the server takes it."""

    name = PROVIDER

    def __init__(self) -> None:
        self._token = ""

    def ask(self, client: MetadataClient) -> Known:
        """All interfaces. Raises UnansweredError."""
        ranges: list[Network] = []
        facts: dict[Fact, None] = {}
        lines = self._lines(client, _MACS)
        if not lines:
            raise UnansweredError("the answer names no interface")
        for line in lines:
            mac = line.rstrip("/")
            if not _MAC.fullmatch(mac):
                raise UnansweredError(f"the answer has {line!r:.60} in place of a MAC address")
            told = self._networks(client, f"{_MACS}{mac}/")
            for name in _ADDRESSES:
                ranges += told.get(name, [])[1:]
            for name in _PREFIXES:
                ranges += told.get(name, [])
            for name, kind in _FACTS.items():
                facts |= {Fact(cidr, kind, f"found in AWS metadata ({name})"): None for cidr in told.get(name, [])}
        return Known(tuple(ranges), tuple(facts), poll_pause())

    def _networks(self, client: MetadataClient, path: str) -> dict[str, list[Network]]:
        """What is there of what is wanted of one interface, by name; nothing is asked for in vain."""
        names = {*_ADDRESSES, *_PREFIXES, *_FACTS}.intersection(self._lines(client, path))
        return {name: [network(text) for text in self._lines(client, path + name)] for name in sorted(names)}

    def _lines(self, client: MetadataClient, path: str) -> list[str]:
        """The lines of a text; none where it is not there."""
        answer = self._get(client, path)
        return [] if answer.status == 404 else body(answer).decode(errors="replace").split()

    def _get(self, client: MetadataClient, path: str) -> Answer:
        for _ in range(2):
            if not self._token:
                answer = client.request(_TOKEN_PATH, _TOKEN_TTL, method="PUT")
                self._token = _checked(body(answer).decode(errors="replace").strip())
            answer = client.request(path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
            self._token = ""  # it has expired, or the instance was moved
        return answer


def _checked(token: str) -> str:
    """The token, which goes into a header. Raises UnansweredError for what is none, and does not show it."""
    if not token.isascii() or not token.isprintable() or not 0 < len(token) <= _TOKEN_SIZE:
        raise UnansweredError("the answer is no token")
    return token


def provider(urls: tuple[str, ...] = URLS) -> MetadataRanges:
    """AWS's secondary addresses and prefixes."""
    return MetadataRanges(Aws(), MetadataClient(urls))
