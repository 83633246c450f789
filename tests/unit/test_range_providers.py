"""Which providers of local ranges run, what they find together, and who named what."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from metadata_server import Asked, Reply, serving

from netacct import providers
from netacct.cli import main
from netacct.config import Config, load
from netacct.errors import NetacctError
from netacct.identity.ranges_provider import Fact, Told
from netacct.identity.ranges_providers import FoundRanges, RangeProviders, merge, read
from netacct.identity.source import Health
from netacct.model import Network

Take = Callable[[FoundRanges], None]


def nets(*cidrs: str) -> tuple[Network, ...]:
    """Networks."""
    return tuple(map(ipaddress.ip_network, cidrs))


class Stub:
    """A provider that says what the test tells it to: no real one can be made to fail in each of these ways."""

    def __init__(self, name: str, *first: str, late: bool = False, asks: bool = False, fault: str = "") -> None:
        self.name = name
        self.facts: tuple[Fact, ...] = ()
        self._first = () if late else nets(*first)
        self._late = nets(*first) if late else ()
        self._asks = asks or late
        self._fault = fault
        self._changed: Callable[[tuple[Network, ...]], None]
        self.stopped = False

    def read(self, seconds: float) -> Told:
        """What it says, unless it has a fault."""
        assert seconds > 0
        if self._fault:
            raise NetacctError(self._fault)
        return Told(self._first + self._late, self.facts)

    def start(self, changed: Callable[[tuple[Network, ...]], None]) -> tuple[Network, ...] | None:
        """The first ranges, unless they come late."""
        self._changed = changed
        if self._fault:
            raise NetacctError(self._fault)
        return None if self._asks else self._first

    def wait(self, seconds: float) -> None:
        """What comes late comes now."""
        assert seconds >= 0
        if self._late:
            self.say(*map(str, self._late))

    def say(self, *cidrs: str) -> None:
        """From now on these, told from a thread as a real provider does."""
        thread = threading.Thread(target=self._changed, args=(nets(*cidrs),))
        thread.start()
        thread.join()

    def stop(self) -> None:
        """Note it."""
        self.stopped = True

    def healthy(self) -> Health:
        """Up unless it has a fault."""
        return Health(up=not self._fault, reason=self._fault)


@pytest.fixture
def told() -> queue.Queue[FoundRanges]:
    """What was told."""
    return queue.Queue()


def test_the_union_is_canonical_and_names_who_said_what() -> None:
    """Ranges inside of others and doubles count once, neighbours stay apart, and each has its names."""
    found = merge({"cni": nets("10.1.0.0/24", "fd00::/64"), "azure": nets("10.1.0.7/32", "10.2.0.2/32", "10.2.0.3/32")})
    assert found.networks == nets("10.1.0.0/24", "10.2.0.2/32", "10.2.0.3/32", "fd00::/64")
    assert dict(found.names)[nets("10.1.0.7/32")[0]] == "azure"
    both = merge({"cni": nets("10.1.0.0/24"), "kubernetes": nets("10.1.0.0/24")})
    assert both.names == ((nets("10.1.0.0/24")[0], "cni, kubernetes"),)


def test_changes_of_any_provider_are_told(told: queue.Queue[FoundRanges]) -> None:
    """The first answer has what is there; each change after that is told as the whole union, no change is not."""
    one, two = Stub("one", "10.1.0.0/24"), Stub("two")
    running = RangeProviders([one, two])
    assert running.start(told.put).networks == nets("10.1.0.0/24")
    two.say("10.2.0.0/24")
    assert told.get_nowait().networks == nets("10.1.0.0/24", "10.2.0.0/24")
    two.say("10.2.0.0/24")
    assert told.empty()
    one.say()
    assert told.get_nowait().networks == nets("10.2.0.0/24")
    running.stop()
    assert one.stopped
    assert two.stopped


def test_a_first_answer_that_comes_while_waiting_is_part_of_the_start(told: queue.Queue[FoundRanges]) -> None:
    """What a server answers in time is in the first ranges, and is not told again."""
    running = RangeProviders([Stub("cni", "10.1.0.0/24"), Stub("gce", "10.2.0.0/24", late=True)])
    assert running.start(told.put).networks == nets("10.1.0.0/24", "10.2.0.0/24")
    assert told.empty()


def test_what_was_said_before_holds_until_there_is_an_answer(told: queue.Queue[FoundRanges]) -> None:
    """After a reload, who has to ask somebody first keeps the word of its earlier life; others speak for themselves."""
    one, two = Stub("one", "10.1.0.0/24"), Stub("two", "10.2.0.0/24", late=True)
    two.facts = (Fact(nets("10.0.0.0/8")[0], "VPC", "found"),)
    earlier = RangeProviders([one, two])
    earlier.start(told.put)
    one, two = Stub("one"), Stub("two", asks=True)
    running = RangeProviders([one, two])
    first = running.start(told.put, before=earlier.said)
    assert first.networks == nets("10.2.0.0/24")
    assert [fact.kind for fact in first.facts] == ["VPC"]
    two.say()
    assert told.get_nowait() == FoundRanges()
    assert RangeProviders([one]).start(told.put, before=earlier.said) == FoundRanges()  # nobody asks `two` any more


def test_facts_alone_are_news(told: queue.Queue[FoundRanges]) -> None:
    """A changed fact is told although the ranges are the same; the same fact of two providers counts once."""
    one, two = Stub("one", "10.1.0.0/24"), Stub("two")
    running = RangeProviders([one, two])
    running.start(told.put)
    one.facts = two.facts = (Fact(nets("10.0.0.0/8")[0], "VPC", "found by somebody"),)
    one.say("10.1.0.0/24")
    assert told.get_nowait().facts == one.facts


def test_a_provider_that_cannot_start_is_left_out(
    told: queue.Queue[FoundRanges], capsys: pytest.CaptureFixture[str]
) -> None:
    """The others run without it, the log and its health say why."""
    running = RangeProviders([Stub("bad", fault="no netlink"), Stub("good", "10.1.0.0/24")])
    assert running.start(told.put).networks == nets("10.1.0.0/24")
    assert "no netlink" in capsys.readouterr().out
    assert {name: health.up for name, health in running.health().items()} == {"bad": False, "good": True}


def test_reading_once_says_what_is_missing() -> None:
    """Without following, what can be read is there, and who cannot be read is named with the reason."""
    good = Stub("good", "10.1.0.0/24")
    good.facts = (Fact(nets("10.0.0.0/8")[0], "VPC", "found"),)
    found = read([Stub("bad", fault="no answer in time"), good], 1.0, {"local_ranges": nets("10.3.0.0/24")})
    assert found.networks == nets("10.1.0.0/24", "10.3.0.0/24")
    assert found.faults == ("bad: no answer in time",)
    assert found.facts == good.facts


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """The defaults, with CNI configuration that names one range."""
    path = tmp_path / "netacct.yaml"
    path.write_text(f"ranges: {{cni: {{directories: [{tmp_path}]}}}}\nlocal_ranges: [10.3.0.0/24]\n")
    network = {"name": "pods", "plugins": [{"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"}}]}
    (tmp_path / "10-pods.conflist").write_text(json.dumps(network))
    return load(str(path))


def asking(config: Config, *names: str, url: str = "auto") -> Config:
    """The configuration with these providers, or with this metadata server."""
    ranges = dataclasses.replace(config.ranges, metadata=dataclasses.replace(config.ranges.metadata, url=url))
    return dataclasses.replace(config, ranges=dataclasses.replace(ranges, providers=names) if names else ranges)


@pytest.fixture
def dmi(tmp_path: Path) -> Callable[..., str]:
    """Makes a directory with what firmware says."""

    def make(**fields: str) -> str:
        directory = tmp_path / "dmi"
        directory.mkdir(exist_ok=True)
        for name, text in fields.items():
            (directory / name).write_text(text + "\n")
        return str(directory)

    return make


def test_auto_asks_a_metadata_server_only_where_firmware_names_a_cloud(config: Config, dmi: Callable[..., str]) -> None:
    """On any other machine, `auto` is what costs no request: CNI configuration and routes."""
    assert providers.names(config, dmi()) == ("cni", "rtnetlink")
    assert providers.names(config, dmi(sys_vendor="Amazon EC2")) == ("cni", "aws", "rtnetlink")
    assert providers.names(asking(config, "gce"), dmi(sys_vendor="Amazon EC2")) == ("gce",)


def test_every_provider_can_be_made(config: Config) -> None:
    """Each name that the configuration takes makes the provider of that name, and an empty list makes none."""
    every = ("cni", "gce", "azure", "aws", "kubernetes", "rtnetlink")
    assert [made.name for made in providers.make(asking(config, *every))] == list(every)
    none = dataclasses.replace(config, ranges=dataclasses.replace(config.ranges, providers=()))
    assert providers.make(none) == []


def test_a_command_finds_ranges_without_an_agent(config: Config) -> None:
    """What is configured, what is in files and what the metadata server of the configuration says is found at once."""
    body = {"interface": [{"ipv4": {"ipAddress": [{"privateIpAddress": ip} for ip in ("10.2.0.4", "10.2.0.5")]}}]}

    def answer(asked: Asked) -> Reply:
        return Reply(json.dumps(body) if asked.headers.get("metadata") == "true" else "", 200)

    with serving(answer) as server:
        found = providers.found(asking(config, "cni", "azure", url=server.url), {"source cni": nets("10.4.0.1/32")})
    assert found.networks == nets("10.1.0.0/24", "10.2.0.5/32", "10.3.0.0/24", "10.4.0.1/32")
    assert {str(network): name for network, name in found.names} == {
        "10.1.0.0/24": "cni",
        "10.2.0.5/32": "azure",
        "10.3.0.0/24": "local_ranges",
        "10.4.0.1/32": "source cni",
    }
    assert found.faults == ()


def test_a_dead_metadata_server_costs_a_command_little(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that never answers is given up after the time for it, and named; nothing is logged or printed."""
    monkeypatch.setattr(providers, "READ_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        found = providers.found(asking(config, "cni", "aws", url=url))
    assert found.networks == nets("10.1.0.0/24", "10.3.0.0/24")
    assert found.faults == ("aws: no answer in time",)
    assert capsys.readouterr() == ("", "")


def test_the_agent_starts_with_a_dead_metadata_server(config: Config, told: queue.Queue[FoundRanges]) -> None:
    """The start waits for a server no longer than it is told to, and stops at once."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        running = providers.running(asking(config, "cni", "gce", "azure", "aws", url=url))
        assert running.start(told.put, wait=0.1).networks == nets("10.1.0.0/24")
        running.stop()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ranges-")]
    assert told.empty()


def test_explain_names_the_provider(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`rules explain` says who named the local range that an address lies in, and who could not be read."""
    assert config.local_ranges
    pods = tmp_path / "pods.yaml"
    pods.write_text("pods: [{namespace: team-a, name: train-0, uid: u0, ips: [10.4.0.1]}]\n")
    path = tmp_path / "netacct.yaml"
    with serving(lambda _: Reply("", 503)) as server:
        ranges = f"{{providers: [cni, azure], cni: {{directories: [{tmp_path}]}}, metadata: {{url: '{server.url}'}}}}"
        path.write_text(
            f"ranges: {ranges}\nlocal_ranges: [10.3.0.0/24]\nidentity: {{sources: [file], file: {{path: {pods}}}}}\n"
            "cluster_ranges: {providers: []}\n"
        )
        named = {}
        for address in ("10.1.0.9", "10.3.0.9", "10.4.0.1"):
            assert main(["rules", "explain", address, "--config.file", str(path), "-o", "json"]) == 0
            facts = json.loads(capsys.readouterr().out)
            assert facts["because"] == "local range"
            assert facts["not_read"] == "azure: the server answered 503 Service Unavailable"
            named[address] = facts["named_by"]
    assert named == {"10.1.0.9": "cni", "10.3.0.9": "local_ranges", "10.4.0.1": "source file"}
