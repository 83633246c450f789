"""Local ranges on Google Cloud: the alias IP ranges of the instance's interfaces, and the subnets these are in.

Source: "About VM metadata" and "Predefined metadata keys" of Compute Engine's documentation. The answer is a list:

    [{"ip": "10.128.0.3", "subnetmask": "255.255.240.0", "ipAliases": ["10.8.1.0/24"], "mac": "42:01:…", …}]

With `wait_for_change` and the ETag of the last answer the server answers when something changed, or after
`timeout_sec` with the same ETag. So a change is known at once, and a node asks once a minute.
"""

from __future__ import annotations

from urllib.parse import quote

from netacct import clock
from netacct.identity.metadata_http import MetadataClient
from netacct.identity.ranges_metadata import (
    Known,
    MetadataRanges,
    UnansweredError,
    document,
    interfaces,
    network,
    poll_pause,
)
from netacct.identity.ranges_provider import Fact
from netacct.model import Network

PROVIDER = "gce"

URLS = ("http://169.254.169.254",)

HOLD_SECONDS = 60
"""For so long the server holds a question to which there is no news."""

_MORE_SECONDS = 10.0
"""So much longer its answer may take."""

_HEADERS = {"Metadata-Flavor": "Google"}
_PATH = "/computeMetadata/v1/instance/network-interfaces/?recursive=true&alt=json"


class Gce:
    """Asks Google's metadata server; the second and later questions wait there for a change.

    Args:
        hold: seconds for which the server holds a question.
        pause: seconds between its answer and the next question; twice as long after each answer that came early and
            without news.
    """

    name = PROVIDER

    def __init__(self, hold: int = HOLD_SECONDS, pause: float = 1.0) -> None:
        self._hold, self._pause = hold, pause
        self._etag = ""
        self._early = 0
        self._last: tuple[tuple[Network, ...], tuple[Fact, ...]] | None = None

    def ask(self, client: MetadataClient) -> Known:
        """All interfaces. Raises UnansweredError."""
        begun, etag = clock.now(), self._etag
        if etag:
            path = f"{_PATH}&wait_for_change=true&last_etag={quote(etag, safe='')}&timeout_sec={self._hold}"
            answer = client.request(path, _HEADERS, timeout=self._hold + _MORE_SECONDS)
        else:
            answer = client.request(_PATH, _HEADERS)
        if answer.status == 200 and answer.headers.get("metadata-flavor") != "Google":
            raise UnansweredError("the answer is not from Google's metadata server: it lacks Metadata-Flavor")
        ranges, facts = _read(document(answer))
        self._etag = answer.headers.get("etag", "")
        news = (ranges, facts) != self._last
        self._last = ranges, facts
        if news or clock.now() - begun > self._hold / 2:
            self._early = 0
        else:
            self._early = min(self._early + 1, 16)  # a server that never waits is polled in the end
        return Known(ranges, facts, min(self._pause * 2.0**self._early, poll_pause()))


def provider(urls: tuple[str, ...] = URLS) -> MetadataRanges:
    """Google's alias ranges."""
    return MetadataRanges(Gce(), MetadataClient(urls))


def _read(answer: object) -> tuple[tuple[Network, ...], tuple[Fact, ...]]:
    ranges: list[Network] = []
    facts: list[Fact] = []
    for number, interface in enumerate(interfaces(answer)):
        aliases = interface.get("ipAliases") or []
        if not isinstance(aliases, list):
            raise UnansweredError("the answer's ipAliases is no list")
        ranges += map(network, aliases)
        if interface.get("ip") and interface.get("subnetmask"):
            subnet = network(f"{interface['ip']}/{interface['subnetmask']}")
            facts.append(Fact(subnet, "subnet", f"found in GCE metadata (nic{number})"))
    return tuple(ranges), tuple(facts)
