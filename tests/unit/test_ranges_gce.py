"""Local ranges by Google's metadata server, against a local one that answers in its documented form."""

from __future__ import annotations

import json
import queue
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any

import pytest
from metadata_server import Asked, MetadataServer, Reply, serving

from netacct.identity.metadata_http import MetadataClient
from netacct.identity.ranges_gce import Gce
from netacct.identity.ranges_metadata import POLL, MetadataRanges, UnansweredError
from netacct.model import Network

FLAVOR = {"Metadata-Flavor": "Google"}


def interface(*aliases: str, ip: str = "10.128.0.3", mask: str = "255.255.240.0") -> dict[str, Any]:
    """An interface as the metadata server shows it."""
    return {
        "accessConfigs": [{"externalIp": "203.0.113.7", "type": "ONE_TO_ONE_NAT"}],
        "dnsServers": ["169.254.169.254"],
        "forwardedIps": ["198.51.100.9"],
        "gateway": "10.128.0.1",
        "ip": ip,
        "ipAliases": list(aliases),
        "mac": "42:01:0a:80:00:03",
        "mtu": 1460,
        "network": "projects/1234/networks/default",
        "subnetmask": mask,
        "targetInstanceIps": [],
    }


class Google:
    """The metadata server: refuses what lacks the header, and holds a question until something changes."""

    def __init__(self, *interfaces: dict[str, Any]) -> None:
        self._changed = threading.Condition()
        self._interfaces: Any = interfaces
        self._version = 0x10
        self.stopping = False

    def set(self, *interfaces: dict[str, Any]) -> None:
        """Something changed."""
        with self._changed:
            self._interfaces, self._version = interfaces, self._version + 1
            self._changed.notify_all()

    def stop(self) -> None:
        """Let go of whoever waits."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()

    def __call__(self, asked: Asked) -> Reply:
        """Answer one request."""
        if asked.headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in asked.headers:
            return Reply("Missing Metadata-Flavor:Google header.", 403)
        url = urllib.parse.urlsplit(asked.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path != "/computeMetadata/v1/instance/network-interfaces/" or query.get("recursive") != "true":
            return Reply("not found", 404, FLAVOR)
        with self._changed:
            if query.get("wait_for_change") == "true":
                etag, seconds = query["last_etag"], float(query["timeout_sec"])
                self._changed.wait_for(lambda: self.stopping or etag != f"{self._version:x}", seconds)
            return Reply(json.dumps(self._interfaces), headers=FLAVOR | {"ETag": f"{self._version:x}"})


@pytest.fixture
def told() -> queue.Queue[tuple[Network, ...]]:
    """What a provider told."""
    return queue.Queue()


@pytest.fixture
def google() -> Iterator[tuple[Google, MetadataServer]]:
    """A metadata server of an instance with one alias range."""
    answers = Google(interface("10.8.1.0/24"))
    with serving(answers) as server:
        yield answers, server
        answers.stop()


def ask(reply: Reply | bytes) -> list[str]:
    """The ranges by one reply."""
    with serving(lambda _: reply) as server:
        client = MetadataClient([server.url])
        try:
            return [str(network) for network in Gce().ask(client).ranges]
        finally:
            client.close()


def reply(*interfaces: Any) -> Reply:
    """An answer of the metadata server."""
    return Reply(json.dumps(interfaces), headers=FLAVOR | {"ETag": "1f"})


def test_alias_ranges_and_subnets(google: tuple[Google, MetadataServer]) -> None:
    """Alias ranges of all interfaces are local ranges, and the interfaces' subnets are facts."""
    answers, server = google
    answers.set(interface("10.8.1.0/24", "10.128.0.77"), interface("10.9.0.0/28", ip="10.64.0.2", mask="255.255.255.0"))
    client = MetadataClient([server.url])
    known = Gce().ask(client)
    client.close()
    assert [str(network) for network in known.ranges] == ["10.8.1.0/24", "10.128.0.77/32", "10.9.0.0/28"]
    assert [(str(fact.network), fact.kind, fact.words) for fact in known.facts] == [
        ("10.128.0.0/20", "subnet", "found in GCE metadata (nic0)"),
        ("10.64.0.0/24", "subnet", "found in GCE metadata (nic1)"),
    ]


def test_addresses_of_the_instance_and_of_load_balancers_are_no_pods() -> None:
    """An instance without aliases has no local range, whatever else its interface names."""
    assert ask(reply(interface())) == []
    without = interface()
    del without["ipAliases"]
    assert ask(reply(without)) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Reply(json.dumps([interface("10.8.1.0/24")])), "not from Google"),
        (Reply("{", headers=FLAVOR), "not JSON"),
        (Reply("<html>login</html>", headers=FLAVOR), "not JSON"),
        (reply("eth0"), "no list of objects"),
        (Reply('{"ip": "10.0.0.1"}', headers=FLAVOR), "no list of objects"),
        (reply(interface("10.8.1.0/33")), "in place of an address"),
        (reply({"ipAliases": "10.8.1.0/24"}), "no list"),
        (reply({"ipAliases": [7]}), "in place of an address"),
        (Reply("", 404, FLAVOR), "404"),
        (Reply("", 503, FLAVOR), "503"),
    ],
)
def test_what_is_no_answer(bad: Reply, why: str) -> None:
    """Another server's word, garbage and errors are no answer, and the words say what came."""
    with pytest.raises(UnansweredError, match=why):
        ask(bad)


def test_a_change_is_told_at_once(
    google: tuple[Google, MetadataServer], told: queue.Queue[tuple[Network, ...]]
) -> None:
    """The server holds the second question until something changes, and that is told without a poll."""
    answers, server = google
    provider = MetadataRanges(Gce(pause=0.01), MetadataClient([server.url]))
    assert provider.start(told.put) == ()
    try:
        assert [str(network) for network in told.get(timeout=5)] == ["10.8.1.0/24"]
        server.wait_for(2)
        assert "last_etag=10" in server.asked[1].path
        answers.set(interface("10.8.1.0/24", "10.8.2.0/24"))
        assert [str(network) for network in told.get(timeout=5)] == ["10.8.1.0/24", "10.8.2.0/24"]
        server.wait_for(3)
        assert "last_etag=11" in server.asked[2].path
        assert provider.healthy().up
    finally:
        provider.stop()


def test_no_news_after_the_hold_is_asked_again() -> None:
    """The same ETag after the server has held the question is followed by the next one at once."""
    answers = Google(interface("10.8.1.0/24"))
    with serving(answers) as server:
        cloud, client = Gce(hold=1), MetadataClient([server.url])
        assert cloud.ask(client).pause < POLL
        known = cloud.ask(client)
        client.close()
    assert [str(network) for network in known.ranges] == ["10.8.1.0/24"]
    assert known.pause < POLL


@pytest.mark.parametrize("headers", [FLAVOR, FLAVOR | {"ETag": "1f"}, FLAVOR | {"ETag": "a b\tc"}])
def test_a_server_that_does_not_wait_is_polled(headers: dict[str, str]) -> None:
    """A server without a usable ETag, or one that answers at once without news, is asked once a minute at the most."""
    with serving(lambda _: Reply(json.dumps([interface()]), headers=headers)) as server:
        cloud, client = Gce(), MetadataClient([server.url])
        cloud.ask(client)
        assert cloud.ask(client).pause >= POLL
        client.close()
