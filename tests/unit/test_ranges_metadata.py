"""What all providers that ask a metadata server have in common: threads, trouble, and what holds meanwhile."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator

import pytest
from metadata_server import PATIENCE, Asked, MetadataServer, Reply, serving
from support import eventually as until

from netacct.identity.metadata_http import MetadataClient
from netacct.identity.ranges_metadata import Known, MetadataRanges, UnansweredError, document, members, network
from netacct.model import Network

Told = queue.Queue[tuple[Network, ...]]


class Plain:
    """A cloud with the simplest protocol there is: a list of {"range": CIDR}; asked again and again."""

    name = "plain"

    def ask(self, client: MetadataClient) -> Known:
        """Ask for everything."""
        entries = members(document(client.request("/", {})), "list")
        return Known(tuple(network(entry["range"]) for entry in entries), (), 0.02)


def ranges(*cidrs: str) -> Reply:
    """An answer with these ranges."""
    return Reply(json.dumps([{"range": cidr} for cidr in cidrs]))


@pytest.fixture
def server() -> Iterator[MetadataServer]:
    """A server that names one range."""
    with serving(lambda _: ranges("10.1.0.5/32")) as made:
        yield made


@pytest.fixture
def told() -> Told:
    """What the provider told."""
    return queue.Queue()


@pytest.fixture
def provider(request: pytest.FixtureRequest, server: MetadataServer, told: Told) -> Iterator[MetadataRanges]:
    """A running provider that has told its first range; its parameter are the seconds for an answer."""
    client = MetadataClient([server.url], getattr(request, "param", PATIENCE))
    made = MetadataRanges(Plain(), client, backoff=0.01)
    made.start(told.put)
    assert texts(told.get(timeout=PATIENCE)) == ["10.1.0.5/32"]
    yield made
    made.stop()


def texts(networks: tuple[Network, ...]) -> list[str]:
    """Networks as text."""
    return [str(each) for each in networks]


def test_changes_are_told_once_each(provider: MetadataRanges, server: MetadataServer, told: Told) -> None:
    """An answer that differs is told, canonical; one that says the same in other words is not."""
    server.answer = lambda _: ranges("10.1.0.6", "10.1.0.5/32", "10.1.0.5", "10.2.0.0/24", "10.2.0.7")
    assert texts(told.get(timeout=PATIENCE)) == ["10.1.0.5/32", "10.1.0.6/32", "10.2.0.0/24"]
    server.answer = lambda _: ranges("10.2.0.0/24", "10.1.0.6", "10.1.0.5")
    server.wait_for(len(server.asked) + 3)
    assert told.empty()
    server.answer = lambda _: ranges()
    assert told.get(timeout=PATIENCE) == ()
    assert provider.healthy().up


@pytest.mark.parametrize(
    "trouble",
    [
        Reply("", 404),
        Reply("", 503),
        Reply("garbage"),
        Reply("[1]"),
        Reply('[{"range": "x"}]'),
        b"",
        b"HTTP/1.1 200 OK",
    ],
)
def test_what_was_known_holds_in_trouble(
    provider: MetadataRanges, server: MetadataServer, told: Told, trouble: Reply | bytes
) -> None:
    """While the server fails nothing is taken back, and its next answer counts."""
    server.answer = lambda _: trouble
    server.wait_for(len(server.asked) + 3)
    until(lambda: not provider.healthy().up)
    health = provider.healthy()
    assert (health.up, health.present) == (False, True)
    assert health.reason
    assert health.age is not None
    assert told.empty()
    server.answer = lambda _: ranges("10.1.0.9")
    assert texts(told.get(timeout=PATIENCE)) == ["10.1.0.9/32"]
    assert provider.healthy().up


def test_an_answer_without_ranges_is_told_once(told: Told) -> None:
    """That there is nothing is an answer as well: it ends what was known from an earlier life."""
    with serving(lambda _: ranges()) as server:
        provider = MetadataRanges(Plain(), MetadataClient([server.url], PATIENCE))
        provider.start(told.put)
        assert told.get(timeout=PATIENCE) == ()
        server.wait_for(3)
        provider.stop()
    assert told.empty()


def test_trouble_is_logged_once(
    provider: MetadataRanges, server: MetadataServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same trouble again and again is one line in the log."""
    server.answer = lambda _: Reply("", 503)
    server.wait_for(len(server.asked) + 5)
    provider.stop()
    assert capsys.readouterr().out.count("503") == 1


@pytest.mark.parametrize("provider", [0.2], indirect=True)
def test_a_slow_answer_is_none(provider: MetadataRanges, server: MetadataServer, told: Told) -> None:
    """An answer that takes longer than the timeout counts as trouble, and nothing waits for it."""

    def slow(_: Asked) -> Reply:
        server.stopping.wait(PATIENCE)
        return ranges()

    server.answer = slow
    server.wait_for(len(server.asked) + 2)
    assert provider.healthy().reason == "no answer in time"
    assert told.empty()


def test_the_server_is_left_alone_for_as_long_as_it_says(provider: MetadataRanges, server: MetadataServer) -> None:
    """After a 429 with Retry-After nothing is asked before that time has passed."""
    limited = threading.Event()

    def answer(_: Asked) -> Reply:
        limited.set()
        return Reply("", 429, {"Retry-After": "60"})

    server.answer = answer
    assert limited.wait(PATIENCE)
    count = len(server.asked)
    until(lambda: "429" in provider.healthy().reason)
    assert not server.stopping.wait(0.3)
    assert len(server.asked) == count


def test_ranges_that_cannot_be_local_are_left_out(
    provider: MetadataRanges, server: MetadataServer, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    """A range that holds loopback or multicast addresses is dropped with an error in the log, the others count."""
    server.answer = lambda _: ranges("127.0.0.0/8", "10.3.0.0/24", "224.0.0.0/4")
    assert texts(told.get(timeout=PATIENCE)) == ["10.3.0.0/24"]
    assert capsys.readouterr().out.count("cannot be a local one") == 2
    assert provider.healthy().up


def test_a_dead_server_does_not_hold_up_anybody(told: Told) -> None:
    """With a server that never answers, `start` and `stop` return at once, and `wait` when its time is over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        provider = MetadataRanges(Plain(), MetadataClient([url], timeout=3600))
        provider.start(told.put)
        provider.wait(0.05)
        assert provider.healthy() == (False, "not asked yet", True, None)
        thread = threading.Thread(target=provider.stop)
        thread.start()
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert told.empty()
    assert not any(each.name == "ranges-plain" for each in threading.enumerate())


def test_the_first_question_is_waited_for(told: Told) -> None:
    """`wait` returns once the first answer was told, and also once the first question has failed."""
    with serving(lambda _: ranges("10.1.0.5")) as server:
        provider = MetadataRanges(Plain(), MetadataClient([server.url], PATIENCE))
        provider.start(told.put)
        provider.wait(PATIENCE)
        assert texts(told.get_nowait()) == ["10.1.0.5/32"]
        provider.stop()
    provider = MetadataRanges(Plain(), MetadataClient([server.url], PATIENCE))
    provider.start(told.put)
    provider.wait(PATIENCE)
    assert "refused" in provider.healthy().reason
    provider.stop()


def test_reading_once() -> None:
    """Who does not follow gets what may be a local range, in one connection and without a line in the log."""
    with serving(lambda _: ranges("127.0.0.0/8", "10.3.0.7", "10.3.0.0/24")) as server:
        assert texts(MetadataRanges(Plain(), MetadataClient([server.url], PATIENCE)).read(PATIENCE).ranges) == [
            "10.3.0.0/24"
        ]
        server.answer = lambda _: Reply("", 503)
        with pytest.raises(UnansweredError, match="503"):
            MetadataRanges(Plain(), MetadataClient([server.url], PATIENCE)).read(PATIENCE)


def test_reading_once_ends_in_time_over_all_requests() -> None:
    """The time to read is for all that is asked together, not for each request."""

    class Many(Plain):
        """Asks without an end."""

        def ask(self, client: MetadataClient) -> Known:
            while True:
                super().ask(client)

    with serving(lambda _: ranges("10.3.0.7")) as server, pytest.raises(UnansweredError, match="no answer in time"):
        MetadataRanges(Many(), MetadataClient([server.url], PATIENCE)).read(0.2)
