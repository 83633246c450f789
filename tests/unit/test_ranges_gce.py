"""Local ranges by Google's metadata server, against a local one that answers in its documented form."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from typing import Any

import pytest
from metadata_server import FLAVOR, PATIENCE, Google, MetadataServer, Reply, google_interface, serving

from netacct.identity.metadata_http import MetadataClient
from netacct.identity.ranges_gce import Gce
from netacct.identity.ranges_metadata import POLL, MetadataRanges, UnansweredError
from netacct.model import Network


@pytest.fixture
def told() -> queue.Queue[tuple[Network, ...]]:
    """What a provider told."""
    return queue.Queue()


@pytest.fixture
def google() -> Iterator[tuple[Google, MetadataServer]]:
    """A metadata server of an instance with one alias range."""
    answers = Google(google_interface("10.8.1.0/24"))
    with serving(answers) as server:
        yield answers, server
        answers.stop()


def ask(reply: Reply | bytes) -> list[str]:
    """The ranges by one reply."""
    with serving(lambda _: reply) as server:
        client = MetadataClient([server.url], PATIENCE)
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
    answers.set(
        google_interface("10.8.1.0/24", "10.128.0.77"),
        google_interface("10.9.0.0/28", ip="10.64.0.2", mask="255.255.255.0"),
    )
    client = MetadataClient([server.url], PATIENCE)
    known = Gce().ask(client)
    client.close()
    assert [str(network) for network in known.ranges] == ["10.8.1.0/24", "10.128.0.77/32", "10.9.0.0/28"]
    assert [(str(fact.network), fact.kind, fact.words) for fact in known.facts] == [
        ("10.128.0.0/20", "subnet", "found in GCE metadata (nic0)"),
        ("10.64.0.0/24", "subnet", "found in GCE metadata (nic1)"),
    ]


def test_addresses_of_the_instance_and_of_load_balancers_are_no_pods() -> None:
    """An instance without aliases has no local range, whatever else its interface names."""
    assert ask(reply(google_interface())) == []
    without = google_interface()
    del without["ipAliases"]
    assert ask(reply(without)) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Reply(json.dumps([google_interface("10.8.1.0/24")])), "not from Google"),
        (Reply("{", headers=FLAVOR), "not JSON"),
        (Reply("<html>login</html>", headers=FLAVOR), "not JSON"),
        (reply("eth0"), "no list of objects"),
        (Reply('{"ip": "10.0.0.1"}', headers=FLAVOR), "no list of objects"),
        (reply(google_interface("10.8.1.0/33")), "in place of an address"),
        (reply(), "names no interface"),
        (Reply("null", headers=FLAVOR), "names no interface"),
        (reply({"ipAliases": "10.8.1.0/24"}), "no list"),
        (reply({"ipAliases": ["fd00::%eth0/64"]}), "in place of an address"),
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
    provider = MetadataRanges(Gce(pause=0.01), MetadataClient([server.url], PATIENCE))
    provider.start(told.put)
    try:
        assert [str(network) for network in told.get(timeout=PATIENCE)] == ["10.8.1.0/24"]
        server.wait_for(2)
        assert "last_etag=10" in server.asked[1].path
        answers.set(google_interface("10.8.1.0/24", "10.8.2.0/24"))
        assert [str(network) for network in told.get(timeout=PATIENCE)] == ["10.8.1.0/24", "10.8.2.0/24"]
        server.wait_for(3)
        assert "last_etag=11" in server.asked[2].path
        assert provider.healthy().up
    finally:
        provider.stop()


def test_no_news_after_the_hold_is_asked_again() -> None:
    """The same ETag after the server has held the question is followed by the next one at once."""
    answers = Google(google_interface("10.8.1.0/24"))
    with serving(answers) as server:
        cloud, client = Gce(hold=1), MetadataClient([server.url], PATIENCE)
        assert cloud.ask(client).pause < POLL
        known = cloud.ask(client)
        client.close()
    assert [str(network) for network in known.ranges] == ["10.8.1.0/24"]
    assert known.pause < POLL


@pytest.mark.parametrize("headers", [FLAVOR, FLAVOR | {"ETag": "1f"}, FLAVOR | {"ETag": "a b&c"}])
def test_a_server_that_does_not_wait_is_polled(headers: dict[str, str]) -> None:
    """A server that has no ETag, or answers early without news, is asked ever less, down to once a minute."""
    with serving(lambda _: Reply(json.dumps([google_interface()]), headers=headers)) as server:
        cloud, client = Gce(), MetadataClient([server.url], PATIENCE)
        pauses = [cloud.ask(client).pause for _ in range(10)]
        client.close()
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert all(pause >= POLL for pause in pauses[6:])
